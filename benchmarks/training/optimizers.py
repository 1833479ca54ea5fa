"""Compare optimizers at their best learning rates: a transformer on two texts, a small conv net on digits.

    python -m benchmarks.training.optimizers                                 # everything; can be stopped at any time
    python -m benchmarks.training.optimizers --only digits --minutes 5       # a part of it

AdamW, Optax's Muon (RMS matched, as muonjax's is), muonjax's "fast" and "balanced", and MuonClip where there is
attention. The first seed searches each optimizer's rate in factors of two until the best one is between two worse ones;
then the other seeds run at the best rate. Runs that the JSON contains already are not repeated. Times are the number of
steps times the median time of a step, with all optimizers measured in turn.
"""

import functools
import itertools
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
from benchmarks.training.book import Book, command_line, search
from muonjax import NewtonSchulz

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import ticker

PICTURE = pathlib.Path(__file__).parents[2] / "docs" / "images" / "training.png"
FIRST_RATE = 2**-8  # 0.0039; AdamW's usual 1e-3 is two factors of two below
DECAY = 0.1


def adamw(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    decayed = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    return optax.adamw(rate, b2=0.95, weight_decay=DECAY, mask=decayed)


def optax_muon(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    settings = {"weight_decay": DECAY, "adam_weight_decay": DECAY, "adam_b2": 0.95, "consistent_rms": 0.2}
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=numbers, **settings)


def ours(preset: NewtonSchulz, rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    return muonjax.muon(rate, newton_schulz=preset, program=numbers)


def muonclip(rate: Any, numbers: Any, sites: Any) -> optax.GradientTransformation:
    return muonjax.muonclip(rate, sites, dimension_numbers=numbers)


COLORS = {"AdamW": "C1", "Optax's Muon": "C7", "fast": "C2", "balanced": "C3", "MuonClip": "C0"}
OPTIMIZERS = {
    "AdamW": adamw,
    "Optax's Muon": optax_muon,
    "fast": functools.partial(ours, NewtonSchulz.fast()),
    "balanced": functools.partial(ours, NewtonSchulz.balanced()),
    "MuonClip": muonclip,
}


def make(task: training_tasks.Task, optimizer: str, rate: float, seed: int, steps: int) -> training_tasks.Run:
    """A run before its first step: warm-up over a tenth of the steps, then a cosine decay to a tenth of the rate."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(2, steps), 0.1 * rate)
    return training_tasks.Run(task, lambda *settings: OPTIMIZERS[optimizer](schedule, *settings), seed)


def train(task: training_tasks.Task, optimizer: str, seed: int, steps: int, rate: float) -> dict[str, Any]:
    """A whole run; a loss that is not finite counts as ten nats."""
    run = make(task, optimizer, rate, seed, steps)
    curve = []
    for step in range(1, steps + 1):
        run.step()
        if step % max(1, steps // 20) == 0 or step == steps:
            loss, accuracy = run.measure()
            curve.append([step, round(loss, 5) if math.isfinite(loss) else 10.0, round(accuracy, 5)])
    _, held_out, accuracy = curve[-1]
    results = {"data": task.fingerprint, "held_out": held_out, "accuracy": accuracy, "curve": curve}
    return results | {"provenance": measure.provenance()}


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
            # MuonClip's line is Muon's where nothing was clipped.
            line = {
                "color": color,
                "markersize": 4,
                "linestyle": "--" if row["optimizer"] == "MuonClip" else "-",
            }
            by_step.plot(steps, losses, marker=".", label=label, **line)
            if "seconds" in row:
                by_time.plot([s * row["seconds"] for s in steps], losses, marker=".", **line)
            first = min(r["seed"] for r in rows)
            swept = sorted(
                (r["learning_rate"], r["held_out"])
                for r in rows
                if (r["task"], r["optimizer"], r["seed"]) == (task, row["optimizer"], first)
            )
            by_rate.plot(*zip(*swept, strict=True), marker="o", **line)
        unit = "nats" if task == "digits" else "nats per byte"
        ends = [row["held_out"] for row in mine]
        top = min(max(row["curve"][0][1] for row in mine), statistics.median(ends) * 8)
        for axes in (by_step, by_time):
            axes.set(ylim=(min(ends) * 0.9, top), yscale="log", ylabel=f"held-out loss ({unit})")
        by_step.set(xlabel="step", title=f"{task}: best rates, mean of the seeds")
        by_time.set(xlabel="time of all steps so far, seconds", title="the same by time")
        by_rate.set(xlabel="learning rate", title="last loss by learning rate, first seed")
        by_rate.set(xscale="log", yscale="log", ylabel=f"held-out loss ({unit})")
        tried = sorted({r["learning_rate"] for r in rows if r["task"] == task})
        by_rate.set_xticks(tried, [f"{rate:.2g}" for rate in tried])
        by_rate.xaxis.set_minor_locator(ticker.NullLocator())
        by_step.legend(fontsize=8, frameon=False)
        for axes in (by_step, by_time, by_rate):
            axes.grid(alpha=0.3, which="both")
            axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__, "training", steps=200)
    add = parser.add_argument
    add("--only", default="", help="regular expression searched in task/optimizer, such as digits/AdamW")
    add("--most", type=int, default=7, help="largest number of rates to try")
    add("--picture", type=pathlib.Path, default=PICTURE)
    add("--tiny", action="store_true", help="tiny models, to test the program")
    args = parser.parse_args(arguments)
    book = Book(args.name, {"steps": args.steps}, args.minutes)
    costs = book.summaries.get("costs", [])
    first, *others = args.seeds
    for name, build in training_tasks.TASKS.items():
        wanted = [optimizer for optimizer in OPTIMIZERS if re.search(args.only, f"{name}/{optimizer}")]
        if not wanted or time.monotonic() > book.until:
            continue
        task = build(args.tiny)
        if any(row["data"] != task.fingerprint for row in book.find(task=name)):
            raise SystemExit(f"{args.name}.json contains runs on another {name}: choose another --name.")
        optimizers = [optimizer for optimizer in OPTIMIZERS if task.sites or optimizer != "MuonClip"]
        if not any(cost["task"] == name for cost in costs):
            costs += step_costs(task, optimizers, rounds=2 if args.tiny else 15)
            book.write(costs=costs)
        best = {}
        for optimizer in [optimizer for optimizer in optimizers if optimizer in wanted]:
            key = {"task": name, "optimizer": optimizer, "seed": first}
            run = functools.partial(train, task, optimizer, first, args.steps)
            best[optimizer] = search(book, key, (FIRST_RATE,), run, most=args.most)
        for seed, (optimizer, rate) in itertools.product(others, best.items()):
            key = {"task": name, "optimizer": optimizer, "seed": seed, "learning_rate": rate}
            if rate is not None:
                book.ensure(key, functools.partial(train, task, optimizer, seed, args.steps, rate))
    best = training_answers.summary(book.rows, costs)
    answers = training_answers.answers(best)
    shown = [{key: value for key, value in row.items() if key not in ("losses", "curve")} for row in best]
    book.write(shown, best=best, answers=answers)
    draw(best, book.rows, args.picture)


if __name__ == "__main__":
    main()
