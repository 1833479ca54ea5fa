"""Compare Muon with and without EMA-Nesterov by held-out loss and by steps to the same loss, on two texts, over seeds.

    python -m benchmarks.training.ema_nesterov                 # everything; can be stopped and continued
    python -m benchmarks.training.ema_nesterov --minutes 10    # starts no run after ten minutes

The small transformers of `variants`. On each text the first seed searches each recipe's rate at the full length; the
other seeds run at the best rate, and shorter runs at that rate say after how many steps a recipe, with a schedule of
that length, has the loss that AdamW or Muon have at the full length.
"""

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import measure
from benchmarks.training.int8_momentum import TEXTS, best_rates, text
from benchmarks.training.small_models import Model
from benchmarks.training.small_runs import Book, Recipe, Trainer, search

RATES = {"rms": (4e-3, 8e-3, 1.6e-2), "adamw": (2e-3, 4e-3, 8e-3)}
RECIPES = {
    "AdamW": Recipe(size="adamw"),
    "Muon": Recipe(),
    **{
        f"EMA-Nesterov, beta {beta}, decay {decay}": Recipe(look_ahead=beta, look_ahead_decay=decay)
        for beta in (0.3, 0.6)
        for decay in (0.95, 0.99)
    },
}


def steps_to(loss: float, losses: dict[int, float]) -> float | None:
    """After how many steps a recipe has `loss`, between the lengths that were run; None if none of them is so good."""
    lengths = sorted(losses)
    for short, long in itertools.pairwise(lengths):
        if losses[long] <= loss < losses[short]:
            return long - (loss - losses[long]) / (losses[short] - losses[long]) * (long - short)
    return None if losses[lengths[-1]] > loss else float(lengths[0])


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each text and recipe, at its best rate: the mean loss at the full length, and steps to AdamW's and Muon's."""
    full = max(row["steps"] for row in runs)
    means: dict[tuple[str, str], dict[int, float]] = {}
    rows = []
    for name, recipe in dict.fromkeys((row["text"], row["recipe"]) for row in runs):
        mine = [row for row in runs if (row["text"], row["recipe"]) == (name, recipe)]
        first = [row for row in mine if (row["seed"], row["steps"]) == (mine[0]["seed"], full)]
        rate = min(first, key=lambda row: row["held_out"])["learning_rate"]
        by_length: dict[int, list[float]] = {}
        for row in mine:
            if row["learning_rate"] == rate:
                by_length.setdefault(row["steps"], []).append(row["held_out"])
        means[name, recipe] = {length: statistics.mean(losses) for length, losses in by_length.items()}
        losses = by_length[full]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        row = {"text": name, "recipe": recipe, "learning_rate": rate, "seeds": len(losses)}
        rows.append({**row, "held_out": means[name, recipe][full], "spread": spread})
    for row in rows:
        for other in ("AdamW", "Muon"):
            target = means.get((row["text"], other), {}).get(full)
            found = target and steps_to(target, means[row["text"], row["recipe"]])
            row[f"steps_to_{other.lower()}"] = found
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = {"steps": 300, "batch": 16, "width": 128, "layers": 2, "head_size": 16, "context": 64}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument(
        "--shorter", type=float, nargs="*", default=[0.6, 0.7, 0.8, 0.9], help="parts of --steps"
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one searches the rates"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--name", default="ema_nesterov", help="name of the JSON under benchmarks/results")
    args = parser.parse_args(arguments)
    _, adam_rate = best_rates()
    settings = {name: getattr(args, name) for name in sizes} | {"adam_rate": adam_rate}
    book = Book(args.name, settings, time.monotonic() + 60 * args.minutes)
    model = Model("MHA", args.layers, args.width, args.head_size, args.context)

    @functools.cache
    def trainer(name: str, recipe: str, steps: int) -> Trainer:
        return Trainer(model, RECIPES[recipe], steps, args.batch, text(name))

    def run(rate: float, name: str, recipe: str, steps: int, seed: int) -> float:
        return trainer(name, recipe, steps).run(rate, adam_rate, seed)

    for name in TEXTS:
        for recipe in args.recipes:
            key = {"text": name, "recipe": recipe, "steps": args.steps, "seed": args.seeds[0]}

            def at_full_length(rate: float, where=(name, recipe)) -> float:
                return run(rate, *where, args.steps, args.seeds[0])

            if not search(book, key, RATES[RECIPES[recipe].size], at_full_length):
                continue
            rate = min(book.find(**key), key=lambda row: row["held_out"])["learning_rate"]
            lengths = [args.steps, *(round(part * args.steps) for part in args.shorter)]
            for steps in lengths:
                for seed in args.seeds:
                    one = {
                        "text": name,
                        "recipe": recipe,
                        "steps": steps,
                        "seed": seed,
                        "learning_rate": rate,
                    }
                    book.ensure(one, functools.partial(run, rate, name, recipe, steps, seed))
    rows = summary(book.rows)
    book.write(recipes=rows)
    print(measure.table(rows))


if __name__ == "__main__":
    main()
