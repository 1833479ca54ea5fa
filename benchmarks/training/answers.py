"""Summarize the runs of `optimizers.py`: each optimizer at its best rate, and comparisons between them."""

import math
import statistics
from typing import Any

Rows = list[dict[str, Any]]


def next_rate(losses: dict[float, float]) -> float | None:
    """The rate to try next: half or twice the best so far; None if both were tried."""
    best = min(losses, key=lambda rate: losses[rate])
    return next((rate for rate in (best / 2, best * 2) if rate not in losses), None)


def best_rate(rows: Rows) -> float:
    """The rate with the least loss of the first seed, the only one that tried several rates."""
    first = min(row["seed"] for row in rows)
    return min((row for row in rows if row["seed"] == first), key=lambda row: row["held_out"])[
        "learning_rate"
    ]


def summary(rows: Rows, costs: Rows) -> Rows:
    """One row per task and optimizer: mean and standard deviation over the seeds at its best rate."""
    result = []
    for task, optimizer in dict.fromkeys((row["task"], row["optimizer"]) for row in rows):
        mine = [row for row in rows if (row["task"], row["optimizer"]) == (task, optimizer)]
        rate = best_rate(mine)
        tried = [row["learning_rate"] for row in mine]
        chosen = sorted((r for r in mine if r["learning_rate"] == rate), key=lambda row: row["seed"])
        losses = [row["held_out"] for row in chosen]
        cost = [c for c in costs if (c["task"], c["optimizer"]) == (task, optimizer)]
        result.append(
            {
                "task": task,
                "optimizer": optimizer,
                "learning_rate": rate,
                "bracketed": rate / 2 in tried and rate * 2 in tried,
                "seeds": len(chosen),
                "held_out": statistics.mean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "accuracy": statistics.mean(row["accuracy"] for row in chosen),
                "losses": {str(row["seed"]): row["held_out"] for row in chosen},
                "curve": [
                    [point[0][0], statistics.mean(p[1] for p in point)]
                    for point in zip(*(row["curve"] for row in chosen), strict=True)
                ],
                **({key: cost[0][key] for key in ("seconds", "ratio")} if cost else {}),
            }
        )
    return result


def _gap(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float] | None:
    """Held-out loss of `a` minus that of `b`, over the seeds."""
    gaps = [a["losses"][seed] - b["losses"][seed] for seed in a["losses"] if seed in b["losses"]]
    return {"mean": statistics.mean(gaps), "low": min(gaps), "high": max(gaps)} if gaps else None


def _stays_below_from(curve: list[list[float]], loss: float) -> float | None:
    """The first step after which the held-out loss never exceeds `loss`."""
    step = None
    for at, value in reversed(curve):
        if value > loss:
            break
        step = at
    return step


def answers(best: Rows) -> Rows:
    """For each task and question: the two optimizers compared, and the figures."""
    result = []
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for row in best:
        tables.setdefault(row["task"], {})[row["optimizer"]] = row
    for task, table in tables.items():

        def compare(question: str, a: str, b: str, table=table, task=task) -> dict[str, Any] | None:
            if a not in table or b not in table or not (gap := _gap(table[a], table[b])):
                return None
            answer = {"task": task, "question": question, "of": a, "against": b, "gap": gap}
            result.append(answer)
            return answer

        compare("orthogonalization", "balanced", "fast")
        compare("orthogonalization", "balanced", "Optax's Muon")
        for muon in ("balanced", "MuonClip"):
            if answer := compare("gain", muon, "AdamW"):
                step = _stays_below_from(table[muon]["curve"], table["AdamW"]["held_out"])
                answer["steps"] = step / table["AdamW"]["curve"][-1][0] if step else None
                if step and "seconds" in table[muon] and "seconds" in table["AdamW"]:
                    answer["time"] = answer["steps"] * table[muon]["seconds"] / table["AdamW"]["seconds"]
        if answer := compare("rate", "balanced", "AdamW"):
            ratio = table["balanced"]["learning_rate"] / table["AdamW"]["learning_rate"]
            answer["factors_of_two"] = math.log2(ratio)
            answer["within_one"] = abs(math.log2(ratio)) <= 1
        if answer := compare("clip", "MuonClip", "balanced"):
            answer["never_worse"] = answer["gap"]["high"] <= 0
            answer["within_spread"] = answer["gap"]["mean"] <= table["balanced"]["spread"]
    return result
