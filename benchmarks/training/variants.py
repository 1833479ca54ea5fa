"""Compare variants of Muon by held-out loss after equal steps: per head, NorMuon, Hyperball, cautious weight decay.

    python -m benchmarks.training.variants                 # everything; can be stopped and continued
    python -m benchmarks.training.variants --minutes 10    # starts no run after ten minutes

Small byte-level transformers (`small_models`) with four layouts of attention. Embeddings, norms and head train with
AdamW at one rate for all variants, the best one for plain Muon. The first seed searches each variant's rate in factors
of two until the best one is between two worse ones, and tries one more rate between the best and its better neighbour;
the other seeds run at the best rate.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import measure
from benchmarks.training.small_models import Model
from benchmarks.training.small_runs import Book, Recipe, Trainer, search

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


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each layout and variant the mean over the seeds at its best rate, and the ratio to `muon`'s, seed by seed."""
    best: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for layout, variant in dict.fromkeys((row["layout"], row["variant"]) for row in runs):
        mine = [row for row in runs if (row["layout"], row["variant"]) == (layout, variant)]
        first = [row for row in mine if row["seed"] == mine[0]["seed"]]
        rate = min(first, key=lambda row: row["held_out"])["learning_rate"]
        best[layout, variant] = {row["seed"]: row for row in mine if row["learning_rate"] == rate}
    result = []
    for (layout, variant), seeds in best.items():
        base = best[layout, "muon"]
        losses = [row["held_out"] for row in seeds.values()]
        ratios = [row["held_out"] / base[seed]["held_out"] for seed, row in seeds.items() if seed in base]
        row = {
            "layout": layout,
            "variant": variant,
            "learning_rate": next(iter(seeds.values()))["learning_rate"],
        }
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        row |= {"seeds": len(losses), "held_out": statistics.mean(losses), "spread": spread}
        result.append(
            {**row, "ratio": statistics.mean(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
        )
    return result


def adam_rate(book: Book, trainer: Trainer) -> float | None:
    """The best rate for the parameters that AdamW trains, with plain Muon at its middle rate; None if out of time."""
    key = {"layout": "MHA", "variant": "rate of AdamW's share", "seed": 0}
    for rate in ADAM_RATES:
        if not book.ensure(
            {**key, "learning_rate": rate}, lambda rate=rate: trainer.run(RATES["rms"][1], rate, 0)
        ):
            return None
    return min(book.find(**key), key=lambda row: row["held_out"])["learning_rate"]


def towards_the_better(losses: dict[float, float]) -> float:
    """The rate between the best one and the better one of its two neighbours at a factor of two."""
    best = min(
        (rate for rate in losses if {rate / 2, rate * 2} <= losses.keys()), key=lambda rate: losses[rate]
    )
    return min((best / 2, best * 2), key=lambda rate: losses[rate]) ** 0.5 * best**0.5


def train_seeds(
    book: Book,
    key: dict[str, Any],
    rates: tuple[float, ...],
    seeds: list[int],
    run: Callable[[int, float], float],
) -> None:
    """Search the rate with the first seed, then train the others at the best one."""
    first, *others = seeds

    def losses() -> dict[float, float]:
        return {row["learning_rate"]: row["held_out"] for row in book.find(**key, seed=first)}

    if not search(book, {**key, "seed": first}, rates, functools.partial(run, first)):
        return
    between = towards_the_better(losses())
    if not book.ensure(
        {**key, "seed": first, "learning_rate": between}, functools.partial(run, first, between)
    ):
        return
    best = min(losses(), key=lambda rate: losses()[rate])
    for seed in others:
        book.ensure({**key, "seed": seed, "learning_rate": best}, functools.partial(run, seed, best))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    for name, default in {
        "steps": 300,
        "batch": 16,
        "width": 128,
        "layers": 2,
        "head-size": 16,
        "context": 64,
    }.items():
        add(f"--{name}", type=int, default=default)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one searches the rates")
    add("--minutes", type=float, default=math.inf, help="start no run after this time")
    add("--name", default="variants", help="name of the JSON under benchmarks/results")
    args = parser.parse_args(arguments)
    sizes = {key: getattr(args, key) for key in ("steps", "batch", "width", "layers", "head_size", "context")}
    book = Book(args.name, sizes, time.monotonic() + 60 * args.minutes)

    @functools.cache
    def trainer(layout: str, variant: str) -> Trainer:
        model = Model(layout, args.layers, args.width, args.head_size, args.context)
        return Trainer(model, VARIANTS[variant], args.steps, args.batch)

    adam = adam_rate(book, trainer("MHA", "muon"))
    for layout, variant in dict.fromkeys(PLAN) if adam else ():

        def run(seed: int, rate: float, where=(layout, variant)) -> float:
            return trainer(*where).run(rate, adam, seed)

        train_seeds(
            book, {"layout": layout, "variant": variant}, RATES[VARIANTS[variant].size], args.seeds, run
        )
    rows = summary([row for row in book.rows if row["variant"] in VARIANTS])
    book.write(adam_rate=adam, variants=rows)
    print(measure.table(rows))


if __name__ == "__main__":
    main()
