"""Compare variants of Muon by held-out loss after equal steps: per head, NorMuon, Hyperball, cautious weight decay.

    python -m benchmarks.training.variants                 # everything; can be stopped and continued
    python -m benchmarks.training.variants --minutes 10    # starts no run after ten minutes

Small byte-level transformers (`small_models`) with four layouts of attention. Embeddings, norms and head train with
AdamW at one rate for all variants, the best one for plain Muon. The first seed searches each variant's rate in factors
of two until the best one is between two worse ones, and tries one more rate between the best and its better neighbour;
the other seeds run at the best rate.
"""

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.training.book import Book, Rows, command_line, search, summary
from benchmarks.training.small_models import Model
from benchmarks.training.small_runs import SIZES, Recipe, Trainer

RATES = {"rms": (4e-3, 8e-3, 1.6e-2), "hyperball": (1e-2, 2e-2, 4e-2), "adamw": (2e-3, 4e-3, 8e-3)}
ADAM_RATES = (2e-3, 4e-3, 8e-3)
VARIANTS = {
    "muon": Recipe(),
    "per head": Recipe("heads"),
    "NorMuon": Recipe(neurons=True),
    "cautious weight decay": Recipe(cautious=True),
    "Hyperball": Recipe(size="hyperball"),
    "Hyperball, NorMuon": Recipe(neurons=True, size="hyperball"),
    "AdamW": Recipe(size="adamw"),
}
LAYOUTS = ("MHA", "GQA", "MLA", "fused")
BY_LAYOUT = {layout: [(layout, "muon"), (layout, "per head")] for layout in LAYOUTS}
PLAN = (
    BY_LAYOUT["MHA"]
    + BY_LAYOUT["GQA"]
    + BY_LAYOUT["MLA"]
    + [("MHA", v) for v in VARIANTS]
    + BY_LAYOUT["fused"]
)


def table(runs: Rows) -> list[dict[str, Any]]:
    """For each layout and variant the loss at its best rate, and the ratio to `muon`'s, seed by seed."""
    return summary(runs, ("layout", "variant"), lambda layout, variant: (layout, "muon"))


def adam_rate(book: Book, trainer: Trainer) -> float | None:
    """The best rate for the parameters that AdamW trains, with plain Muon at its middle rate; None if out of time."""
    key = {"layout": "MHA", "variant": "rate of AdamW's share", "seed": 0}
    for rate in ADAM_RATES:
        run = functools.partial(trainer.run, RATES["rms"][1], rate, 0)
        if not book.ensure({**key, "learning_rate": rate}, run):
            return None
    losses = book.losses(**key)
    return min(losses, key=losses.__getitem__)


def towards_the_better(losses: dict[float, float]) -> float:
    """The rate between the best one and the better one of its two neighbours at a factor of two."""
    best = min(
        (rate for rate in losses if {rate / 2, rate * 2} <= losses.keys()), key=lambda rate: losses[rate]
    )
    return min((best / 2, best * 2), key=lambda rate: losses[rate]) ** 0.5 * best**0.5


def train_seeds(
    book: Book, key: dict[str, Any], rates: tuple[float, ...], seeds: list[int], run: Callable[..., float]
) -> None:
    """Search the rate with the first seed, then train the others at the best one."""
    first, *others = seeds
    one = {**key, "seed": first}
    if search(book, one, rates, functools.partial(run, first)) is None:
        return
    between = towards_the_better(book.losses(**one))
    if book.ensure({**one, "learning_rate": between}, functools.partial(run, first, between)):
        losses = book.losses(**one)
        best = min(losses, key=losses.__getitem__)
        for seed in others:
            book.ensure({**key, "seed": seed, "learning_rate": best}, functools.partial(run, seed, best))


def main(arguments: list[str] | None = None) -> None:
    args = command_line(__doc__, "variants", **SIZES).parse_args(arguments)
    book = Book(args.name, {size: getattr(args, size) for size in SIZES}, args.minutes)

    @functools.cache
    def trainer(layout: str, variant: str) -> Trainer:
        model = Model(layout, args.layers, args.width, args.head_size, args.context)
        return Trainer(model, VARIANTS[variant], args.steps, args.batch)

    adam = adam_rate(book, trainer("MHA", "muon"))
    for layout, variant in dict.fromkeys(PLAN) if adam else ():

        def run(seed: int, rate: float, where=(layout, variant)) -> float:
            return trainer(*where).run(rate, adam, seed)

        key = {"layout": layout, "variant": variant}
        train_seeds(book, key, RATES[VARIANTS[variant].size], args.seeds, run)
    rows = table([row for row in book.rows if row["variant"] in VARIANTS])
    book.write(rows, adam_rate=adam, variants=rows)


if __name__ == "__main__":
    main()
