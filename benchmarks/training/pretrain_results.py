"""What was measured: the rows of pretrain.json, the best run of each method, and their picture."""

import math
import pathlib
from typing import NamedTuple

from benchmarks.common import measure
from benchmarks.training.decoder import SIZES

Row = measure.Row


class Piece(NamedTuple):
    """A step to be timed, or a run; what its row in the JSON is known by, together with the device."""

    kind: str
    size: str
    method: str
    attention: str
    rate: float | None = None
    seed: int = 0
    fraction: float = 1.0  # of AdamW's steps


def piece_of(row: Row) -> Piece:
    """What a row of the JSON has measured."""
    return Piece(*(row[name] for name in Piece._fields))


class Results:
    """The rows of the JSON that this device has measured, and those of others, which stay as they are."""

    def __init__(self, folder: pathlib.Path, device: str):
        self.folder = folder
        self.device = device
        self.content: Row = {"data": {}, "rows": []}
        for path in (measure.RESULTS, folder):
            content = measure.read("pretrain", path)
            self.content["data"] |= content.get("data", {})
            for row in content.get("rows", []):
                self._put(row)

    def add(self, piece: Piece, result: Row) -> None:
        """Put a row in the place of the one before, unless that is complete and this is not; write the file."""
        commit = measure.provenance()["commit"]
        row = {**piece._asdict(), "device": self.device, "commit": commit, **result}
        self._put(row)
        self.content["best"] = summary(self.rows)
        measure.write("pretrain", self.content, folder=self.folder)

    def _put(self, row: Row) -> None:
        key = piece_of(row)._asdict() | {"device": row["device"]}
        rows = self.content["rows"]
        known = measure.matching(rows, **key)
        if row["complete"] or not (known and known[0]["complete"]):
            self.content["rows"] = measure.replaced(rows, key, row)

    @property
    def rows(self) -> list[Row]:
        """The complete rows of this device."""
        rows = self.content["rows"]
        return measure.matching(rows, device=self.device, complete=True)


def final_loss(row: Row) -> float:
    """The last held-out loss of a run; infinity if it diverged."""
    return row["curve"]["held_out"][-1] or math.inf


def losses(rows: list[Row], size: str, method: str) -> dict[float, float]:
    """The last held-out losses by rate, of the runs that did not diverge."""
    runs = measure.matching(rows, kind="run", size=size, method=method)
    by_rate = {}
    for row in measure.matching(runs, seed=0, fraction=1.0):
        loss = final_loss(row)
        if loss < math.inf:
            by_rate[row["rate"]] = loss
    return dict(sorted(by_rate.items()))


def best_runs(rows: list[Row]) -> dict[tuple[str, str, float], Row]:
    """The runs with the lowest last loss, by size, method and fraction of the steps."""
    runs = measure.matching(rows, kind="run", seed=0)
    runs.sort(key=final_loss, reverse=True)
    return {(row["size"], row["method"], row["fraction"]): row for row in runs}


def summary(rows: list[Row]) -> list[Row]:
    """For each of the best runs, the part of AdamW's tokens and seconds after which it has AdamW's last loss."""
    best = best_runs(rows)
    lines = []
    for (size, method, fraction), row in best.items():
        adamw = best.get((size, "adamw", 1.0))
        curve = row["curve"]
        if adamw is None:
            continue
        by_rate = losses(rows, size, method)
        line = {
            "size": size,
            "method": method,
            "fraction": fraction,
            "rate": row["rate"],
            "steps": row["steps"],
            "tokens": row["tokens"],
            "held_out": curve["held_out"][-1],
            "losses": {f"{rate:g}": loss for rate, loss in by_rate.items()},
            "largest_logit": max(curve["largest_logit"]),
            "clipped": row.get("clipped"),
        }
        for axis in ("step", "seconds"):
            at = crossing(curve[axis], curve["held_out"], final_loss(adamw))
            line[f"part_of_{axis}"] = at and at / adamw["curve"][axis][-1]
        lines.append(line)
    return lines


def crossing(x: list[float], y: list[float], goal: float) -> float | None:
    """The first x at which the straight lines through the points are no more than the goal."""
    for i in range(1, len(y)):
        if y[i] <= goal < y[i - 1]:
            share = (y[i - 1] - goal) / (y[i - 1] - y[i])
            return x[i - 1] + (x[i] - x[i - 1]) * share
    return None


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Held-out loss against tokens and against seconds: each method's best run at the largest size."""
    import matplotlib.pyplot as plt

    best = best_runs(rows)
    largest = max((size for size, *_ in best), key=lambda size: SIZES[size].width)
    figure, panels = plt.subplots(
        1, 2, figsize=(9, 3.4), sharey=True, layout="constrained"
    )
    for (size, method, fraction), row in best.items():
        if size != largest:
            continue
        curve = row["curve"]
        label = f"{method}, rate {row['rate']:g}" + ", half the steps" * (fraction < 1)
        style = "--" if fraction < 1 else "-"
        million_tokens = [step * row["tokens"] / 1e6 for step in curve["step"]]
        for axes, x in zip(panels, (million_tokens, curve["seconds"]), strict=True):
            axes.plot(x[1:], curve["held_out"][1:], style, label=label, linewidth=1.2)
            axes.grid(alpha=0.3)
    panels[0].set(xlabel="million tokens", ylabel="held-out loss (nats per token)")
    panels[1].set(xlabel=f"seconds on one {rows[0]['device']}")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
