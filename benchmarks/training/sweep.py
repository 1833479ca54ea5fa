"""Sweep learning rates: how many of AdamW's steps MuonClip needs for AdamW's final held-out loss.

Full schedules of every length, on the example's model and text. Runs that the JSON contains already are skipped, so the
sweep can be stopped and continued.
"""

import functools
import itertools
import tempfile
from typing import Any

import train_transformer

from benchmarks.common import measure
from benchmarks.training.book import Book, command_line, summary

RATES = {
    "adamw": (1e-3, 2e-3, 3e-3, 4e-3, 8e-3),
    "muonclip": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}


def one_run(optimizer: str, rate: float, steps: int, seed: int, extra: list[str]) -> dict[str, Any]:
    """The held-out loss of a run of the example."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--optimizer", optimizer, "--learning-rate", str(rate), "--steps", str(steps), *extra]
        # No logit reaches the threshold: the optimizers are compared without clipping.
        arguments += ["--threshold", "100", "--seed", str(seed), "--out", folder, "--quiet", "--sample", "0"]
        arguments += ["--checkpoint-every", str(steps), "--eval-every", str(steps)]
        loss = train_transformer.train(train_transformer.parse(arguments))
    return {"held_out": round(loss, 5), "provenance": measure.provenance()}


def main() -> None:
    parser = command_line(__doc__, "training_sweep", steps=400)
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.6, 0.5], help="MuonClip's steps in units of AdamW's"
    )
    parser.set_defaults(seeds=[0])
    args, extra = parser.parse_known_args()
    book = Book(args.name, {"steps": args.steps}, args.minutes)
    lengths = {"adamw": [args.steps], "muonclip": [round(args.steps * share) for share in args.shares]}
    for seed, optimizer in itertools.product(args.seeds, RATES):
        for steps, rate in itertools.product(lengths[optimizer], RATES[optimizer]):
            key = {"optimizer": optimizer, "steps": steps, "learning_rate": rate, "seed": seed}
            book.ensure(key, functools.partial(one_run, optimizer, rate, steps, seed, extra))
    best = summary(book.rows, ("optimizer", "steps"))
    book.write(best, best=best)


if __name__ == "__main__":
    main()
