"""Draw the metrics of training runs: loss, attention logits, QK-Clip's scalings, and the statistics of `monitor`."""

import csv
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(path: pathlib.Path) -> dict[str, list[float]]:
    """The columns of a metrics file; empty cells are left out together with their step."""
    columns: dict[str, list[float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    columns.setdefault(name, []).append(float(value))
                    columns.setdefault(f"step of {name}", []).append(float(row["step"]))
    return columns


def draw(runs: dict[str, pathlib.Path], to: pathlib.Path, threshold: float | None = None) -> None:
    """Loss on the left; the largest attention logit of each layer on the right, over the number of clipped heads."""
    figure, (losses, logits) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, (name, path) in enumerate(runs.items()):
        columns = read(path)
        color = f"C{index}"
        losses.plot(columns["step of loss"], columns["loss"], color=color, alpha=0.25, linewidth=1)
        label = f"{name}: held out {columns['held_out'][-1]:.3f}"
        losses.plot(columns["step of held_out"], columns["held_out"], ".-", color=color, label=label)
        _draw_logits(logits, name, columns, None if len(runs) == 1 else color)
        if any(columns.get("clipped_heads", [])):
            _draw_clips(logits, name, columns)
    if threshold is not None and threshold < 1.5 * logits.get_ylim()[1]:
        label = f"threshold {threshold:g}"
        logits.axhline(threshold, color="black", linestyle="--", linewidth=1, label=label)
    losses.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss, and held-out loss (dots)")
    logits.set(xlabel="step", ylabel="largest logit", title="Largest attention logit of each layer")
    for axes in (losses, logits):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(to, dpi=120)
    plt.close(figure)


STATISTICS = {
    "update_to_weight": "RMS of updates ÷ RMS of weights",
    "momentum_norm": "norm of the momentum",
    "orthogonality": "distance of updates from orthogonal",
}


def draw_statistics(runs: dict[str, pathlib.Path], to: pathlib.Path) -> None:
    """What `muonjax.monitor` measured: a panel per statistic; matrices as lines, all other parameters dashed."""
    figure, panels = plt.subplots(1, len(STATISTICS), figsize=(13, 3.6), layout="constrained")
    for index, (name, path) in enumerate(runs.items()):
        columns = read(path)
        for axes, statistic in zip(panels, STATISTICS, strict=True):
            for group, style in (("muon", "-"), ("adam", "--")):
                column = f"monitor/{group}/{statistic}"
                if group == "muon" or statistic != "orthogonality":
                    label = f"{name}, {'matrices' if group == 'muon' else 'other parameters'}"
                    steps = columns[f"step of {column}"]
                    axes.plot(steps, columns[column], style, color=f"C{index}", linewidth=1, label=label)
    for axes, (statistic, title) in zip(panels, STATISTICS.items(), strict=True):
        axes.set(xlabel="step", title=title)
        if statistic != "orthogonality":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(to, dpi=120)
    plt.close(figure)


def _draw_logits(axes: Any, name: str, columns: dict[str, list[float]], color: str | None) -> None:
    """One line per layer: of its own colour and label if `color` is None, else darker with depth."""
    layers = sum(column.startswith("max_logit_") for column in columns)
    for layer in range(layers):
        label = name if color and layer == layers - 1 else None
        axes.plot(
            columns["step of loss"],
            columns[f"max_logit_{layer}"],
            color=color or f"C{layer}",
            alpha=0.35 + 0.65 * (layer + 1) / layers,
            linewidth=1,
            label=label if color else f"{name}, layer {layer}",
        )


def _draw_clips(axes: Any, name: str, columns: dict[str, list[float]]) -> None:
    """The number of heads that each step scaled, in grey on an axis to the right."""
    steps, heads = columns["step of clipped_heads"], columns["clipped_heads"]
    counts = axes.twinx()
    counts.fill_between(steps, heads, step="mid", color="grey", alpha=0.3, linewidth=0)
    counts.set(ylim=(0, 4 * max(heads)), ylabel="heads clipped per step (grey)")
    counts.yaxis.set_ticks(range(0, int(max(heads)) + 1, 1 + int(max(heads)) // 6))
    axes.plot([], [], color="grey", alpha=0.5, linewidth=5, label=f"{name}: {sum(heads):,.0f} clips in all")
