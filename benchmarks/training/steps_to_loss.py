"""How many of AdamW's steps Muon needs for AdamW's final held-out loss, and what a training step of each costs.

Model and text are the example's, each run has a whole schedule, and no logit is clipped. Each optimizer takes five
learning rates with one seed, and then its best rate with three seeds. Runs that the JSON contains already are skipped,
so the experiment can be stopped and continued.
"""

import pathlib
import statistics
import tempfile
from typing import Any

import matplotlib.pyplot as plt
import plots
import train_transformer
from text_data import Text

from benchmarks.common import measure

RATES = {
    "adamw": (1e-3, 2e-3, 3e-3, 4e-3, 8e-3),
    "muon": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
STEPS = {"adamw": 400, "muon": 200}
SEEDS = (0, 1, 2)
EVERY = 20  # steps between held-out losses

Run = measure.Row


def run(key: Run) -> list[float]:
    """Train the example once and return its held-out losses in nats per byte; the last one is after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--out={folder}", f"--eval-every={EVERY}", "--sample=0", "--quiet"]
        flags.append(f"--checkpoint-every={key['steps']}")
        for name, value in key.items():
            flags.append(f"--{name.replace('_', '-')}={value}")
        train_transformer.train(train_transformer.parse(flags))
        metrics = plots.read(pathlib.Path(folder, "metrics.csv"))
    _, losses = plots.column(metrics, "held_out")
    return [round(loss, 5) for loss in losses]


def at_best_rate(runs: list[Run], optimizer: str) -> list[Run]:
    """The runs of an optimizer at the rate whose final loss is lowest with the first seed, one for each seed."""
    first = measure.matching(runs, optimizer=optimizer, seed=SEEDS[0])
    best = min(first, key=lambda run: run["held_out"][-1])
    rate = best["learning_rate"]
    return measure.matching(runs, optimizer=optimizer, learning_rate=rate)


def summary(runs: list[Run]) -> measure.Row:
    """Mean, least and greatest final loss over the seeds, for each optimizer at its best learning rate."""
    rows = {}
    for optimizer, steps in STEPS.items():
        best = at_best_rate(runs, optimizer)
        losses = [run["held_out"][-1] for run in best]
        rows[optimizer] = {
            "learning_rate": best[0]["learning_rate"],
            "steps": steps,
            "seeds": len(best),
            "mean": statistics.mean(losses),
            "least": min(losses),
            "most": max(losses),
        }
    return rows


def cost() -> measure.Row:
    """Time a whole training step (loss, gradients, update) of the optimizers in turn."""
    tokens = Text().batch(0, 0, 16, 128)

    def steps(optimizer: str):
        args = train_transformer.parse([f"--optimizer={optimizer}", "--quiet"])
        trainer = train_transformer.Trainer(args)
        state = [trainer.params, trainer.opt_state]

        def step() -> Any:
            *state[:], loss, _ = trainer.step(*state, tokens)
            return loss

        return step

    calls = {optimizer: steps(optimizer) for optimizer in RATES}
    return measure.summaries(measure.interleave(calls, rounds=40))


def draw(runs: list[Run]) -> None:
    """Draw the held-out losses of each optimizer at its best learning rate, one line for each seed."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for optimizer, name in (("adamw", "AdamW"), ("muon", "Muon")):
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
    content = measure.read("steps_to_loss")
    content.pop("provenance", None)
    runs = content.setdefault("runs", [])

    def add(optimizer: str, rate: float, seed: int) -> None:
        key = {"optimizer": optimizer, "learning_rate": rate, "seed": seed}
        key["steps"] = STEPS[optimizer]
        if not measure.matching(runs, **key):
            runs.append(key | {"held_out": run(key), "every": EVERY})
            measure.write("steps_to_loss", content)

    for optimizer, rates in RATES.items():
        for rate in rates:
            add(optimizer, rate, SEEDS[0])
        best = at_best_rate(runs, optimizer)[0]["learning_rate"]
        for seed in SEEDS:
            add(optimizer, best, seed)
    content |= {"best": summary(runs), "cost": cost()}
    measure.write("steps_to_loss", content)
    draw(runs)


if __name__ == "__main__":
    main()
