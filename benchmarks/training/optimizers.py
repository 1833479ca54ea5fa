"""Compare optimizers at their best learning rates: a transformer on two texts, a small conv net on digits.

    python -m benchmarks.training.optimizers                                 # everything; can be stopped at any time
    python -m benchmarks.training.optimizers --only digits --minutes 5       # a part of it

AdamW, Optax's Muon (RMS matched, as muonjax's is), muonjax's "fast" and "balanced", and MuonClip where there is
attention. The first seed searches each optimizer's rate in factors of two until the best one is between two worse ones;
then the other seeds run at the best rate. Runs that the JSON contains already are not repeated. Times are the number of
steps times the median time of a step, with all optimizers measured in turn.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import time
from typing import Any

import jax
import matplotlib
import optax

import muonjax
from benchmarks.common import measure
from benchmarks.training import answers as training_answers
from benchmarks.training import tasks as training_tasks
from muonjax import NewtonSchulz

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PICTURE = pathlib.Path(__file__).parents[2] / "docs" / "images" / "training.png"
FIRST_RATE = 2**-8  # 0.0039; AdamW's usual 1e-3 is two factors of two below
DECAY = 0.1


def not_vectors(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def adamw(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=0.95, weight_decay=DECAY, mask=not_vectors)


def optax_muon(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    settings = {"weight_decay": DECAY, "adam_weight_decay": DECAY, "adam_b2": 0.95, "consistent_rms": 0.2}
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=numbers, **settings)


def fast(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    return muonjax.muon(rate, newton_schulz=NewtonSchulz.fast(), muon_weight_dimension_numbers=numbers)


def balanced(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    return muonjax.muon(rate, newton_schulz=NewtonSchulz.balanced(), muon_weight_dimension_numbers=numbers)


def muonclip(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    return muonjax.muonclip(rate, sites, muon_weight_dimension_numbers=numbers)


COLORS = {"AdamW": "C1", "Optax's Muon": "C7", "fast": "C2", "balanced": "C3", "MuonClip": "C0"}
OPTIMIZERS = {
    "AdamW": adamw,
    "Optax's Muon": optax_muon,
    "fast": fast,
    "balanced": balanced,
    "MuonClip": muonclip,
}


def make(task: training_tasks.Task, optimizer: str, rate: float, seed: int, steps: int) -> training_tasks.Run:
    """A run before its first step: warm-up over a tenth of the steps, then a cosine decay to a tenth of the rate."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(2, steps), 0.1 * rate)
    return training_tasks.Run(task, lambda *settings: OPTIMIZERS[optimizer](schedule, *settings), seed)


def train(task: training_tasks.Task, optimizer: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """A whole run; a loss that is not finite counts as ten nats."""
    began = time.perf_counter()
    run = make(task, optimizer, rate, seed, steps)
    curve = []
    for step in range(1, steps + 1):
        run.step()
        if step % max(1, steps // 20) == 0 or step == steps:
            loss, accuracy = run.measure()
            curve.append([step, round(loss, 5) if math.isfinite(loss) else 10.0, round(accuracy, 5)])
    return {
        "task": task.name,
        "optimizer": optimizer,
        "learning_rate": rate,
        "seed": seed,
        "steps": steps,
        "data": task.fingerprint,
        "held_out": curve[-1][1],
        "accuracy": curve[-1][2],
        "curve": curve,
        "whole_seconds": round(time.perf_counter() - began, 1),
        "provenance": measure.provenance(),
    }


def step_costs(task: training_tasks.Task, optimizers: list[str], rounds: int) -> list[dict[str, Any]]:
    """Median seconds per step of each optimizer, measured in turn, and the ratio to AdamW's of the same round."""
    runs = {name: make(task, name, FIRST_RATE, 0, 200) for name in optimizers}
    seconds = measure.interleave({name: run.step for name, run in runs.items()}, rounds=rounds)
    return [
        {"task": task.name, "optimizer": name, **measure.summary(times, seconds["AdamW"])}
        for name, times in seconds.items()
    ]


def draw(best: list[dict[str, Any]], rows: list[dict[str, Any]], to: pathlib.Path) -> None:
    """One row of panels per task: held-out loss against steps, time and learning rate."""
    tasks = list(dict.fromkeys(row["task"] for row in best))
    figure, panels = plt.subplots(
        len(tasks), 3, figsize=(13, 3.6 * len(tasks)), layout="constrained", squeeze=False
    )
    for task, (by_step, by_time, by_rate) in zip(tasks, panels, strict=True):
        mine = [row for row in best if row["task"] == task]
        for row in mine:
            color = COLORS[row["optimizer"]]
            steps, losses = zip(*row["curve"], strict=True)
            label = f"{row['optimizer']}: {row['held_out']:.3f} ± {row['spread']:.3f}"
            by_step.plot(steps, losses, ".-", color=color, label=label, markersize=4)
            if "seconds" in row:
                by_time.plot([s * row["seconds"] for s in steps], losses, ".-", color=color, markersize=4)
            first = min(r["seed"] for r in rows)
            swept = sorted(
                (r["learning_rate"], r["held_out"])
                for r in rows
                if (r["task"], r["optimizer"], r["seed"]) == (task, row["optimizer"], first)
            )
            by_rate.plot(*zip(*swept, strict=True), "o-", color=color, markersize=4)
        unit = "nats" if task == "digits" else "nats per byte"
        ends = [row["held_out"] for row in mine]
        top = min(max(row["curve"][0][1] for row in mine), statistics.median(ends) * 8)
        for axes in (by_step, by_time):
            axes.set(ylim=(min(ends) * 0.9, top), yscale="log", ylabel=f"held-out loss ({unit})")
        by_step.set(xlabel="step", title=f"{task}: each at its best rate, mean of the seeds")
        by_time.set(xlabel="seconds of steps", title="the same by time")
        by_rate.set(xlabel="learning rate", title="last loss by learning rate, first seed")
        by_rate.set(xscale="log", yscale="log", ylabel=f"held-out loss ({unit})")
        by_step.legend(fontsize=8, frameon=False)
        for axes in (by_step, by_time, by_rate):
            axes.grid(alpha=0.3, which="both")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110)
    plt.close(figure)


class Book:
    """The JSON file of all runs, rewritten after every run."""

    def __init__(self, name: str, steps: int, only: str, until: float):
        self.name, self.steps, self.only, self.until = name, steps, re.compile(only), until
        path = measure.RESULTS / f"{name}.json"
        held = json.loads(path.read_text()) if path.exists() else {}
        if held and held["steps"] != steps:
            raise SystemExit(
                f"{path} contains runs of {held['steps']} steps, not {steps}: choose another --name."
            )
        self.rows: list[dict[str, Any]] = held.get("runs", [])
        self.costs: list[dict[str, Any]] = held.get("costs", [])

    def wants(self, task: str, optimizer: str) -> bool:
        """Whether a run was requested and there is time for it."""
        return bool(self.only.search(f"{task}/{optimizer}")) and time.monotonic() < self.until

    def losses(self, task: training_tasks.Task, optimizer: str, seed: int) -> dict[float, float]:
        """Last held-out loss by rate."""
        rows = [row for row in self.rows if row["task"] == task.name]
        if any(row["data"] != task.fingerprint for row in rows):
            raise SystemExit(f"{self.name}.json contains runs on another {task.name}: choose another --name.")
        key = (optimizer, seed)
        return {r["learning_rate"]: r["held_out"] for r in rows if (r["optimizer"], r["seed"]) == key}

    def run(self, task: training_tasks.Task, optimizer: str, rate: float, seed: int) -> None:
        """Train, and add the run to the file."""
        self.rows.append(train(task, optimizer, rate, seed, self.steps))
        row = self.rows[-1]
        print(
            f"{task.name}, {optimizer}, rate {rate:.2g}, seed {seed}: {row['held_out']:.4f} "
            f"({row['whole_seconds']:.0f} s)",
            flush=True,
        )
        self.write()

    def write(self) -> None:
        """Write all runs and their summary."""
        best = training_answers.summary(self.rows, self.costs) if self.rows else []
        content = {"steps": self.steps, "best": best, "answers": training_answers.answers(best)}
        measure.write(self.name, {**content, "costs": self.costs, "runs": self.rows})


def settled(losses: dict[float, float], most: int) -> bool:
    """Whether the search for a rate is over."""
    return bool(losses) and (training_answers.next_rate(losses) is None or len(losses) >= most)


def sweep(book: Book, task: training_tasks.Task, optimizer: str, first: int, most: int) -> None:
    """Search the best rate of an optimizer with the first seed, in at most `most` runs."""
    while not settled(losses := book.losses(task, optimizer, first), most):
        if not book.wants(task.name, optimizer):
            return
        rate = training_answers.next_rate(losses) if losses else FIRST_RATE
        assert rate is not None
        book.run(task, optimizer, rate, first)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=200, help="steps of a run and of its schedule")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one searches the rates")
    add("--only", default="", help="regular expression searched in task/optimizer, such as digits/AdamW")
    add("--minutes", type=float, default=math.inf, help="start no run after this time")
    add("--most", type=int, default=7, help="largest number of rates to try")
    add("--name", default="training", help="name of the JSON under benchmarks/results")
    add("--picture", type=pathlib.Path, default=PICTURE)
    add("--tiny", action="store_true", help="tiny models, to test the program")
    args = parser.parse_args(arguments)
    book = Book(args.name, args.steps, args.only, time.monotonic() + 60 * args.minutes)
    for name, build in training_tasks.TASKS.items():
        if not any(book.wants(name, optimizer) for optimizer in OPTIMIZERS):
            continue
        task = build(args.tiny)
        optimizers = [o for o in OPTIMIZERS if task.sites or o != "MuonClip"]
        if not any(cost["task"] == name for cost in book.costs):
            book.costs += step_costs(task, optimizers, rounds=2 if args.tiny else 15)
            book.write()
        for optimizer in optimizers:
            sweep(book, task, optimizer, args.seeds[0], args.most)
        for seed in args.seeds[1:]:
            for optimizer in optimizers:
                losses = book.losses(task, optimizer, args.seeds[0])
                if not settled(losses, args.most) or not book.wants(name, optimizer):
                    continue
                rate = min(losses, key=lambda rate: losses[rate])
                if rate not in book.losses(task, optimizer, seed):
                    book.run(task, optimizer, rate, seed)
    if book.rows:
        book.write()
        best = training_answers.summary(book.rows, book.costs)
        draw(best, book.rows, args.picture)
        hidden = ("losses", "curve")
        print(measure.table([{k: v for k, v in row.items() if k not in hidden} for row in best]))
        for answer in training_answers.answers(best):
            print(json.dumps(answer))


if __name__ == "__main__":
    main()
