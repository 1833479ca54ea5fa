"""What was measured: the rows of pretrain.json, the best run of each method, and their picture."""

import json
import math
import pathlib
from typing import Any, NamedTuple

from benchmarks.common import measure
from benchmarks.training.decoder import SIZES

Row = dict[str, Any]


class Piece(NamedTuple):
    """A step to be timed, or a run; what its row in the JSON is known by, together with the device."""

    kind: str
    size: str
    method: str
    attention: str
    rate: float | None = None
    seed: int = 0
    fraction: float = 1.0  # of AdamW's steps


class Results:
    """The rows of the JSON that this device has measured, and those of others, which stay as they are."""

    def __init__(self, folder: pathlib.Path, device: str):
        self.path, self.device = folder / "pretrain.json", device
        self.content: dict[str, Any] = {"data": {}, "rows": []}
        for path in (measure.RESULTS / "pretrain.json", self.path):
            content = (
                json.loads(path.read_text())
                if path.exists()
                else {"data": {}, "rows": []}
            )
            self.content["data"] |= content["data"]
            for row in content["rows"]:
                self._put(row)

    def add(self, piece: Piece, result: Row) -> None:
        """Put a row in the place of the one before, unless that is complete and this is not; write the file."""
        made = measure.provenance()
        self._put(
            {
                **piece._asdict(),
                "device": self.device,
                "commit": made["commit"],
                **result,
            }
        )
        self.content["best"] = summary(self.rows)
        measure.save(self.path, {"provenance": made, **self.content})

    def _put(self, row: Row) -> None:
        key = {name: row[name] for name in (*Piece._fields, "device")}
        rows = self.content["rows"]
        same = [other for other in rows if key.items() <= other.items()]
        if same and same[0]["complete"] and not row["complete"]:
            return
        self.content["rows"] = [*(other for other in rows if other not in same), row]

    @property
    def rows(self) -> list[Row]:
        """The complete rows of this device."""
        rows = self.content["rows"]
        return [row for row in rows if row["complete"] and row["device"] == self.device]


def final_loss(row: Row) -> float:
    """The last held-out loss of a run; infinity if it diverged."""
    return row["curve"]["held_out"][-1] or math.inf


def losses(rows: list[Row], size: str, method: str) -> dict[float, float]:
    """The last held-out losses by rate, of the runs that did not diverge."""
    key = {"kind": "run", "size": size, "method": method, "seed": 0, "fraction": 1.0}
    same = [row for row in rows if key.items() <= row.items()]
    return {row["rate"]: final_loss(row) for row in same if final_loss(row) < math.inf}


def best_runs(rows: list[Row]) -> dict[tuple[str, str, float], Row]:
    """The runs with the lowest last loss, by size, method and fraction of the steps."""
    runs = [row for row in rows if row["kind"] == "run" and row["seed"] == 0]
    runs.sort(key=final_loss, reverse=True)
    return {(row["size"], row["method"], row["fraction"]): row for row in runs}


def summary(rows: list[Row]) -> list[Row]:
    """For each of the best runs, the part of AdamW's tokens and seconds after which it has AdamW's last loss."""
    best, lines = best_runs(rows), []
    for (size, method, _), row in best.items():
        reference, curve = best.get((size, "adamw", 1.0)), row["curve"]
        if reference is None:
            continue
        line = {
            name: row[name]
            for name in ("size", "method", "fraction", "rate", "steps", "tokens")
        }
        line["held_out"] = curve["held_out"][-1]
        line["seconds"] = curve["seconds"][-1]
        line["largest_logit"] = max(curve["largest_logit"])
        line["clipped"] = row.get("clipped")
        by_rate = losses(rows, size, method)
        line["losses"] = {f"{rate:g}": by_rate[rate] for rate in sorted(by_rate)}
        for axis in ("step", "seconds"):
            at = crossing(curve[axis], curve["held_out"], final_loss(reference))
            line[f"part_of_{axis}"] = at and at / reference["curve"][axis][-1]
        lines.append(line)
    return lines


def crossing(x: list[float], y: list[float], goal: float) -> float | None:
    """The first x at which the straight lines through the points are no more than the goal."""
    for i in range(1, len(y)):
        if y[i] <= goal < y[i - 1]:
            return x[i - 1] + (x[i] - x[i - 1]) * (y[i - 1] - goal) / (y[i - 1] - y[i])
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
        million_tokens = [step * row["tokens"] / 1e6 for step in curve["step"]]
        style = "--" if fraction < 1 else "-"
        for axes, x in zip(panels, (million_tokens, curve["seconds"]), strict=True):
            axes.plot(x[1:], curve["held_out"][1:], style, label=label, linewidth=1.2)
    panels[0].set(xlabel="million tokens", ylabel="held-out loss (nats per token)")
    panels[1].set(xlabel=f"seconds on one {rows[0]['device']}")
    panels[0].legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
