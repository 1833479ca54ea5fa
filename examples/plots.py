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


# The same colour for an optimizer in every picture.
COLORS = {"muonclip": "C0", "adamw": "C1", "adamclip": "C2", "muon": "C3"}


def draw(runs: dict[str, pathlib.Path], to: pathlib.Path, threshold: float | None = None) -> None:
    """Loss on the left; the largest attention logit of each layer on the right, over the number of clipped heads."""
    found = {name: read(path) for name, path in runs.items()}
    clips = {name: columns for name, columns in found.items() if any(columns.get("clipped_heads", []))}
    mosaic = [["loss", "logits"], ["loss", "clips"]] if clips else [["loss", "logits"]]
    figure, panels = plt.subplot_mosaic(
        mosaic, figsize=(11, 4.4), layout="constrained", height_ratios=[4, 1][: len(mosaic)]
    )
    for name, columns in found.items():
        color = COLORS[name]
        panels["loss"].plot(columns["step of loss"], columns["loss"], color=color, alpha=0.25, linewidth=1)
        label = f"{name}: held out {columns['held_out'][-1]:.3f}"
        panels["loss"].plot(columns["step of held_out"], columns["held_out"], ".-", color=color, label=label)
        _draw_logits(panels["logits"], name, columns)
    if threshold is not None and threshold < 1.5 * panels["logits"].get_ylim()[1]:
        label = f"threshold {threshold:g}"
        panels["logits"].axhline(threshold, color="black", linestyle="--", linewidth=1, label=label)
    for name, columns in clips.items():
        steps, heads = columns["step of clipped_heads"], columns["clipped_heads"]
        panels["clips"].fill_between(steps, heads, step="mid", color=COLORS[name], linewidth=0)
        title = f"Heads that {name} scaled, per step: {sum(heads):,.0f} in all"
        panels["clips"].set(ylim=(0, 1.05 * max(heads)), ylabel="heads", title=title)
        panels["clips"].yaxis.get_major_locator().set_params(integer=True)
    panels["loss"].set(ylabel="loss (nats per byte)", title="Training loss, and held-out loss (dots)")
    panels["logits"].set(
        ylabel="largest logit", title="Largest attention logit of each layer (darker: deeper)"
    )
    for axes in panels.values():
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    if clips:
        panels["logits"].set_xlabel("")
    panels["loss"].legend(fontsize=8, frameon=False)
    panels["logits"].legend(fontsize=8, frameon=False, loc="upper left")
    figure.savefig(to, dpi=120)
    plt.close(figure)


STATISTICS = {
    "update_to_weight": "RMS of updates ÷ RMS of weights",
    "momentum_norm": "norm of the momentum",
    "orthogonality": "distance of updates from orthogonal\n(0: singular values equal; 1: one dominates)",
}


def draw_statistics(runs: dict[str, pathlib.Path], to: pathlib.Path) -> None:
    """What `muonjax.monitor` measured: a panel per statistic; matrices as lines, all other parameters dashed."""
    figure, panels = plt.subplots(1, len(STATISTICS), figsize=(13, 3.6), layout="constrained")
    for name, path in runs.items():
        columns = read(path)
        for axes, statistic in zip(panels, STATISTICS, strict=True):
            for group, style in (("muon", "-"), ("adam", "--")):
                column = f"monitor/{group}/{statistic}"
                if group == "muon" or statistic != "orthogonality":
                    label = f"{name}, {'matrices' if group == 'muon' else 'other parameters'}"
                    steps = columns[f"step of {column}"]
                    axes.plot(steps, columns[column], style, color=COLORS[name], linewidth=1, label=label)
    for axes, (statistic, title) in zip(panels, STATISTICS.items(), strict=True):
        axes.set(xlabel="step", title=title)
        if statistic != "orthogonality":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(to, dpi=120)
    plt.close(figure)


def _draw_logits(axes: Any, name: str, columns: dict[str, list[float]]) -> None:
    """One line per layer, darker with depth."""
    layers = sum(column.startswith("max_logit_") for column in columns)
    for layer in range(layers):
        axes.plot(
            columns["step of loss"],
            columns[f"max_logit_{layer}"],
            color=COLORS[name],
            alpha=0.35 + 0.65 * (layer + 1) / layers,
            linewidth=1,
            label=name if layer == layers - 1 else None,
        )
