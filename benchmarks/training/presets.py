"""Compare the held-out loss of the example by Newton–Schulz preset, after equally many steps, over seeds.

Muon alone, all else equal: Optax's settings (Jordan's quintic five times, Frobenius norm; the tests compare them with
Optax), "fast" and "balanced". Each at the best of a few rates with the first seed, then with the other seeds at that
rate. Runs that the JSON contains already are skipped, so the program can be stopped and continued.
"""

import functools
from typing import Any

import train_transformer

import muonjax
from benchmarks.training.book import Book, command_line, search, summary
from benchmarks.training.sweep import one_run
from muonjax import NewtonSchulz

PRESETS = {
    "Optax's": NewtonSchulz(coefficients=muonjax.JORDAN, num_steps=5, normalization="frobenius", deflation=0),
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
}
RATES = (4e-3, 8e-3, 1.6e-2)


def run(preset: str, steps: int, extra: list[str], seed: int, rate: float) -> dict[str, Any]:
    """One run of the example with this preset."""
    train_transformer.make_optimizer = lambda args, distribution=None: muonjax.muon(
        train_transformer.make_schedule(args), newton_schulz=PRESETS[preset]
    )
    return one_run("muon", rate, steps, seed, extra)


def main() -> None:
    args, extra = command_line(__doc__, "preset_training", steps=200).parse_known_args()
    book = Book(args.name, {"steps": args.steps}, args.minutes)
    first, *others = args.seeds
    for preset in PRESETS:
        train = functools.partial(run, preset, args.steps, extra)
        rate = search(book, {"preset": preset, "seed": first}, RATES, functools.partial(train, first))
        for seed in others if rate is not None else ():
            key = {"preset": preset, "seed": seed, "learning_rate": rate}
            book.ensure(key, functools.partial(train, seed, rate))
    presets = summary(book.rows, ("preset",), lambda preset: ("Optax's",))
    book.write(presets, presets=presets)


if __name__ == "__main__":
    main()
