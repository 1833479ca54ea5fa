"""The pictures that a training run leaves behind."""

import csv
import pathlib

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
    """Loss on the left, the largest attention logit of each layer on the right; one colour a run."""
    figure, (losses, logits) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for color, (name, path) in enumerate(runs.items()):
        columns = read(path)
        losses.plot(columns["step of loss"], columns["loss"], color=f"C{color}", alpha=0.25, linewidth=1)
        last = columns["held_out"][-1]
        label = f"{name}: held out {last:.3f}"
        losses.plot(columns["step of held_out"], columns["held_out"], ".-", color=f"C{color}", label=label)
        layers = sorted(
            (c for c in columns if c.startswith("max_logit_")), key=lambda c: int(c.rsplit("_", 1)[1])
        )
        for layer, column in enumerate(layers):
            alpha = 0.35 + 0.65 * (layer + 1) / len(layers)
            label = (
                f"{name}, layer {layer}" if len(runs) == 1 else (name if layer == len(layers) - 1 else None)
            )
            shade = f"C{layer}" if len(runs) == 1 else f"C{color}"
            logits.plot(
                columns["step of loss"], columns[column], color=shade, alpha=alpha, linewidth=1, label=label
            )
    if threshold is not None and threshold < 1.5 * logits.get_ylim()[1]:
        logits.axhline(
            threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}"
        )
    losses.set(xlabel="step", ylabel="loss (nats a byte)", title="Training loss, and held-out loss (dots)")
    logits.set(xlabel="step", ylabel="largest logit", title="Largest attention logit of each layer")
    for axes in (losses, logits):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(to, dpi=120)
    plt.close(figure)
