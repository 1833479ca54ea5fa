"""How many of AdamW's steps Muon needs for AdamW's final held-out loss, and what a training step of each costs.

Model and text are the example's, each run has a whole schedule, and no logit is clipped. Each optimizer takes five
learning rates with one seed, and then its best rate with three seeds. Runs that the JSON contains already are skipped,
so the experiment can be stopped and continued.
"""

import argparse
import pathlib
import statistics
import tempfile
from typing import Any

import matplotlib.pyplot as plt
import plots
import train_transformer
from text_data import Text

from benchmarks.common import measure

NAMES = {"adamw": "AdamW", "muon": "Muon"}
RATES = {
    "adamw": (1e-3, 2e-3, 3e-3, 4e-3, 8e-3),
    "muon": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
STEPS = {"adamw": 400, "muon": 200}
SEEDS = (0, 1, 2)
EVERY = 20  # steps between held-out losses

Run = dict[str, Any]


def arguments(optimizer: str, rate: float, seed: int, out: str) -> argparse.Namespace:
    """The example's settings for one run."""
    steps = STEPS[optimizer]
    flags = {
        "optimizer": optimizer,
        "learning-rate": rate,
        "steps": steps,
        "seed": seed,
        "out": out,
        "sample": 0,
        "checkpoint-every": steps,
        "eval-every": EVERY,
    }
    given = [f"--{name}={value}" for name, value in flags.items()]
    return train_transformer.parse([*given, "--quiet"])


def run(optimizer: str, rate: float, seed: int) -> Run:
    """Train the example once and return its held-out losses in nats per byte; the last one is after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(optimizer, rate, seed, folder)
        train_transformer.train(args)
        _, losses = plots.column(
            plots.read(pathlib.Path(folder, "metrics.csv")), "held_out"
        )
    key = {
        "optimizer": optimizer,
        "learning_rate": rate,
        "steps": args.steps,
        "seed": seed,
    }
    return key | {"held_out": [round(x, 5) for x in losses], "every": EVERY}


def matching(runs: list[Run], **key: Any) -> list[Run]:
    """The runs with these settings."""
    return [run for run in runs if key.items() <= run.items()]


def at_best_rate(runs: list[Run], optimizer: str) -> list[Run]:
    """The runs of an optimizer at the rate whose final loss is lowest with the first seed, one for each seed."""
    first = matching(runs, optimizer=optimizer, seed=SEEDS[0])
    best = min(first, key=lambda run: run["held_out"][-1])
    return matching(runs, optimizer=optimizer, learning_rate=best["learning_rate"])


def summary(runs: list[Run]) -> dict[str, Any]:
    """Mean, least and greatest final loss over the seeds, for each optimizer at its best learning rate."""
    rows = {}
    for optimizer in RATES:
        best = at_best_rate(runs, optimizer)
        losses = [run["held_out"][-1] for run in best]
        rows[optimizer] = {
            "learning_rate": best[0]["learning_rate"],
            "steps": best[0]["steps"],
            "seeds": len(best),
            "mean": statistics.mean(losses),
            "least": min(losses),
            "most": max(losses),
        }
    return rows


def cost(rounds: int = 40) -> dict[str, dict[str, float]]:
    """Time a whole training step (loss, gradients, update) of the optimizers in turn."""
    tokens = Text().batch(0, 0, 16, 128)

    def steps(optimizer: str):
        trainer = train_transformer.Trainer(
            arguments(optimizer, RATES[optimizer][0], 0, "unused")
        )
        state = [trainer.params, trainer.opt_state]

        def step() -> Any:
            *state[:], loss, _ = trainer.step(*state, tokens)
            return loss

        return step

    seconds = measure.interleave({name: steps(name) for name in RATES}, rounds=rounds)
    return {
        name: measure.summary(times, seconds["adamw"])
        for name, times in seconds.items()
    }


def draw(runs: list[Run]) -> None:
    """Draw the held-out losses of each optimizer at its best learning rate, one line for each seed."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for optimizer, name in NAMES.items():
        color = plots.COLORS[optimizer]
        for row in at_best_rate(runs, optimizer):
            steps = range(EVERY, row["steps"] + 1, EVERY)
            label = f"{name}, {row['steps']} steps" if row["seed"] == SEEDS[0] else None
            axes.plot(steps, row["held_out"], color=color, label=label, linewidth=1.2)
            axes.plot(steps[-1], row["held_out"][-1], "o", color=color, markersize=4)
    axes.set(xlabel="training step", ylabel="held-out loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    plots.save(figure, measure.IMAGES / "steps_to_loss.png")


def main() -> None:
    args = measure.options(__doc__, again=0)  # 1 measures the cost of a step again
    known = measure.read("steps_to_loss")
    runs = known.pop("runs", [])

    def add(optimizer: str, rate: float, seed: int) -> None:
        if not matching(runs, optimizer=optimizer, learning_rate=rate, seed=seed):
            runs.append(run(optimizer, rate, seed))
            measure.write("steps_to_loss", known | {"runs": runs})

    for optimizer, rates in RATES.items():
        for rate in rates:
            add(optimizer, rate, SEEDS[0])
        best = at_best_rate(runs, optimizer)[0]["learning_rate"]
        for seed in SEEDS:
            add(optimizer, best, seed)
    if args.again or "cost" not in known:
        known["cost"] = cost()
    known["best"] = summary(runs)
    measure.write("steps_to_loss", known | {"runs": runs}, known["best"], known["cost"])
    draw(runs)


if __name__ == "__main__":
    main()
