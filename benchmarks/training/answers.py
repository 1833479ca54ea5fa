"""Summarize the runs of `optimizers.py`: each optimizer at its best rate, and comparisons between them."""

import math
import statistics
from typing import Any

from benchmarks.training import book
from benchmarks.training.book import Rows

QUESTIONS = (
    ("orthogonalization", "balanced", "fast"),
    ("orthogonalization", "balanced", "Optax's Muon"),
    ("gain", "balanced", "AdamW"),
    ("gain", "MuonClip", "AdamW"),
    ("rate", "balanced", "AdamW"),
    ("clip", "MuonClip", "balanced"),
)


def summary(rows: Rows, costs: Rows) -> list[dict[str, Any]]:
    """One row per task and optimizer: mean and standard deviation over the seeds at its best rate."""
    keys = ("task", "optimizer")
    result = []
    for row, runs in zip(book.summary(rows, keys), book.at_best_rates(rows, keys).values(), strict=True):
        name = row["task"], row["optimizer"]
        tried = {r["learning_rate"] for r in rows if (r["task"], r["optimizer"]) == name}
        points = zip(*(runs[seed]["curve"] for seed in sorted(runs)), strict=True)
        row |= {
            "bracketed": {row["learning_rate"] / 2, row["learning_rate"] * 2} <= tried,
            "accuracy": statistics.mean(run["accuracy"] for run in runs.values()),
            "losses": {str(seed): run["held_out"] for seed, run in sorted(runs.items())},
            "curve": [[point[0][0], statistics.mean(p[1] for p in point)] for point in points],
        }
        for cost in costs:
            if (cost["task"], cost["optimizer"]) == name:
                row |= {key: cost[key] for key in ("seconds", "ratio")}
        result.append(row)
    return result


def _stays_below_from(curve: list[list[float]], loss: float) -> float | None:
    """The first step after which the held-out loss never exceeds `loss`."""
    step = None
    for at, value in reversed(curve):
        if value > loss:
            break
        step = at
    return step


def answers(best: Rows) -> list[dict[str, Any]]:
    """For each task and question: the two optimizers compared, and the figures."""
    found = {(row["task"], row["optimizer"]): row for row in best}
    result = []
    for task in dict.fromkeys(task for task, _ in found):
        for question, of, against in QUESTIONS:
            a, b = found.get((task, of)), found.get((task, against))
            if not a or not b or not (gaps := _gaps(a, b)):
                continue
            gap = {"mean": statistics.mean(gaps), "low": min(gaps), "high": max(gaps)}
            answer = {"task": task, "question": question, "of": of, "against": against, "gap": gap}
            if question == "gain":
                step = _stays_below_from(a["curve"], b["held_out"])
                answer["steps"] = step / b["curve"][-1][0] if step else None
                if step and "seconds" in a and "seconds" in b:
                    answer["time"] = answer["steps"] * a["seconds"] / b["seconds"]
            if question == "rate":
                answer["factors_of_two"] = math.log2(a["learning_rate"] / b["learning_rate"])
            result.append(answer)
    return result


def _gaps(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """Held-out losses of `a` minus those of `b`, over the seeds."""
    seeds = a["losses"].keys() & b["losses"].keys()
    return [a["losses"][seed] - b["losses"][seed] for seed in seeds]
