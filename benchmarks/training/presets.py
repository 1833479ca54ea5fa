"""Compare the held-out loss of the example by Newton–Schulz preset, after equally many steps, over seeds.

Muon alone, all else equal: Optax's settings (Jordan's quintic five times, Frobenius norm; the tests compare them with
Optax), "fast" and "balanced". Each at the best of a few rates with the first seed, then with the other seeds at that
rate. Runs that the JSON contains already are skipped, so the program can be stopped and continued.
"""

import argparse
import json
import statistics
from typing import Any

import train_transformer

import muonjax
from benchmarks.common import measure
from benchmarks.training.sweep import one_run
from muonjax import NewtonSchulz

PRESETS = {
    "Optax's": NewtonSchulz(coefficients=muonjax.JORDAN, num_steps=5, normalization="frobenius", deflation=0),
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
}
RATES = (4e-3, 8e-3, 1.6e-2)


def run(preset: str, rate: float, steps: int, seed: int, extra: list[str]) -> dict[str, Any]:
    """One run of the example with this preset."""
    settings = PRESETS[preset]
    train_transformer.make_optimizer = lambda args, distribution=None: muonjax.muon(
        train_transformer.make_schedule(args), newton_schulz=settings
    )
    return {"preset": preset, **one_run("muon", rate, steps, seed, extra)}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean held-out loss over the seeds at the best rate, and its ratio to Optax's, paired by seed."""
    by_preset = {}
    for preset in PRESETS:
        mine = [row for row in rows if row["preset"] == preset]
        if mine:
            rate = min(mine, key=lambda row: (row["seed"] != rows[0]["seed"], row["held_out"]))[
                "learning_rate"
            ]
            by_preset[preset] = {row["seed"]: row for row in mine if row["learning_rate"] == rate}
    base = by_preset["Optax's"]
    result = []
    for preset, seeds in by_preset.items():
        ratios = [row["held_out"] / base[seed]["held_out"] for seed, row in seeds.items() if seed in base]
        losses = [row["held_out"] for row in seeds.values()]
        rate = next(iter(seeds.values()))["learning_rate"]
        result.append(
            {
                "preset": preset,
                "learning_rate": rate,
                "seeds": len(seeds),
                "held_out": statistics.mean(losses),
                "ratio": statistics.mean(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="preset_training", help="name of the JSON under benchmarks/results")
    args, extra = parser.parse_known_args()
    path = measure.RESULTS / f"{args.name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def ensure(preset: str, rate: float, seed: int) -> None:
        if not any((r["preset"], r["learning_rate"], r["seed"]) == (preset, rate, seed) for r in rows):
            rows.append(run(preset, rate, args.steps, seed, extra))
            measure.write(args.name, {"steps": args.steps, "presets": summary(rows), "runs": rows})

    for preset in PRESETS:
        for rate in RATES:
            ensure(preset, rate, args.seeds[0])
    for seed in args.seeds[1:]:
        for row in summary(rows):
            ensure(row["preset"], row["learning_rate"], seed)
    print(measure.table(summary(rows)))


if __name__ == "__main__":
    main()
