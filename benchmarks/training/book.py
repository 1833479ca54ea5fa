"""Keep training runs in a JSON file that can be continued, search learning rates, and compare the runs seed by seed."""

import argparse
import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import measure

Rows = Sequence[dict[str, Any]]


def command_line(document: str | None, name: str, **sizes: int) -> argparse.ArgumentParser:
    """The options of every training benchmark, and an option for each size."""
    parser = argparse.ArgumentParser(description=(document or "").split("\n\n")[0])
    for size, default in sizes.items():
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, default=default)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first searches the rates"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--name", default=name, help="name of the JSON under benchmarks/results")
    return parser


class Book:
    """A JSON file of runs, each a row of settings and its held-out loss or other results, and trained once."""

    def __init__(self, name: str, settings: dict[str, Any], minutes: float = math.inf):
        self.name, self.settings, self.until = name, settings, time.monotonic() + 60 * minutes
        held = measure.read(name) or {"settings": settings}
        if held["settings"] != settings:
            raise SystemExit(
                f"{name}.json has runs with {held['settings']}, not {settings}: choose another --name."
            )
        self.rows: list[dict[str, Any]] = held.get("runs", [])
        others = ("provenance", "settings", "runs")
        self.summaries = {name: value for name, value in held.items() if name not in others}

    def find(self, **key: Any) -> list[dict[str, Any]]:
        """The rows with these values."""
        return [row for row in self.rows if all(row[name] == value for name, value in key.items())]

    def losses(self, **key: Any) -> dict[float, float]:
        """Held-out losses by learning rate."""
        return {row["learning_rate"]: row["held_out"] for row in self.find(**key)}

    def ensure(self, key: dict[str, Any], train: Callable[[], float | dict[str, Any]]) -> bool:
        """Train and write the row `key`, unless it is there; False if the time is over."""
        if self.find(**key):
            return True
        if time.monotonic() > self.until:
            return False
        began = time.perf_counter()
        found = train()
        results = found if isinstance(found, dict) else {"held_out": round(found, 5)}
        row = {**key, **results, "seconds": round(time.perf_counter() - began, 1)}
        self.rows.append(row)
        shown = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
        print(", ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
        self.write()
        return True

    def write(self, *shown: Any, **summaries: Any) -> None:
        """Write all runs, and the summaries that a benchmark derives from them; others stay as they are."""
        self.summaries |= summaries
        measure.write(self.name, {"settings": self.settings, **self.summaries, "runs": self.rows}, *shown)


def next_rate(losses: dict[float, float], first: Sequence[float] = (), least: int = 1) -> float | None:
    """The rate to try next: all of `first`, then half or twice the best so far; None if both were tried.

    If fewer than `least` were tried then, twice the largest.
    """
    todo = [rate for rate in first if rate not in losses]
    if not todo:
        best = min(losses, key=losses.__getitem__)
        todo = [rate for rate in (best / 2, best * 2) if rate not in losses]
        todo += [max(losses) * 2] if len(losses) < least else []
    return todo[0] if todo else None


def search(
    book: Book,
    key: dict[str, Any],
    first: Sequence[float],
    train: Callable[[float], float | dict[str, Any]],
    *,
    least: int = 1,
    most: float = math.inf,
) -> float | None:
    """The best rate, between two worse ones or of `most`; None if the time is over before it is known."""
    while (rate := next_rate(losses := book.losses(**key), first, least)) is not None and len(losses) < most:
        if not book.ensure({**key, "learning_rate": rate}, lambda rate=rate: train(rate)):
            return None
    return min(losses, key=losses.__getitem__)


def at_best_rates(rows: Rows, keys: Sequence[str]) -> dict[tuple[Any, ...], dict[int, dict[str, Any]]]:
    """The runs of each group by seed, at the rate with the least loss of the first seed, which alone tried several."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = {}
    for group, mine in groups.items():
        first = [row for row in mine if row["seed"] == min(row["seed"] for row in mine)]
        rate = min(first, key=lambda row: row["held_out"]).get("learning_rate")
        found[group] = {row["seed"]: row for row in mine if row.get("learning_rate") == rate}
    return found


def compared(
    runs: dict[int, dict[str, Any]],
    others: dict[int, dict[str, Any]],
    name: str = "ratio",
    how: Callable[[float, float], float] = operator.truediv,
) -> dict[str, float]:
    """Mean, least and most of the held-out losses in units of the others', or minus them, over the seeds of both."""
    found = [how(runs[seed]["held_out"], others[seed]["held_out"]) for seed in runs if seed in others]
    if not found:
        return {}
    return {name: statistics.mean(found), f"{name}_low": min(found), f"{name}_high": max(found)}


def summary(
    rows: Rows,
    keys: Sequence[str],
    base: Callable[..., tuple[Any, ...]] | None = None,
    name: str = "ratio",
    how: Callable[[float, float], float] = operator.truediv,
) -> list[dict[str, Any]]:
    """For each group the mean and spread over the seeds at its best rate, compared with the group `base`, if given."""
    best = at_best_rates(rows, keys)
    result = []
    for group, runs in best.items():
        losses = [row["held_out"] for row in runs.values()]
        row = dict(zip(keys, group, strict=True))
        rate = next(iter(runs.values())).get("learning_rate")
        row |= {"learning_rate": rate} if rate is not None else {}
        row |= {"seeds": len(losses), "held_out": statistics.mean(losses)}
        row |= {"spread": statistics.stdev(losses) if len(losses) > 1 else 0.0}
        result.append(row | (compared(runs, best[base(*group)], name, how) if base else {}))
    return result
