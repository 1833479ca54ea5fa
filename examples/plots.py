"""Draw training runs from lists of `muonjax.metrics(state)`: loss, attention logits, clips, and sizes of updates."""

import csv
import pathlib
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

History = Sequence[Mapping[str, float]]  # a row for each step

# The same color for an optimizer in every picture.
COLORS = {"muonclip": "C0", "adamw": "C1", "adamclip": "C2", "muon": "C3"}


def read(path: pathlib.Path) -> list[dict[str, float]]:
    """The rows of a file of metrics, without their empty cells."""
    with path.open() as file:
        return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(file)]


def column(history: History, name: str) -> tuple[list[float], list[float]]:
    """The steps at which a metric was recorded, and its values."""
    steps, values = [], []
    for i, row in enumerate(history):
        if name in row:
            steps.append(row.get("step", row.get("count", i + 1)))
            values.append(row[name])
    return steps, values


def plot(
    runs: Mapping[str, History], threshold: float | None = None, loss_name: str = "loss"
) -> Figure:
    """Draw what the rows of one or several runs have; a notebook shows the figure that is returned.

    Args:
      runs: For each optimizer a row for each `step` or `count`: `muonjax.metrics(state)`, with `loss` and `held_out`
        where they are known, and `logit/<module>` for logits that no clip has recorded.
      threshold: The threshold of the clip.
      loss_name: What the axis of the loss says, such as "loss (nats per byte)".
    """
    figure, ((loss, logits), (sizes, clips)) = plt.subplots(
        2, 2, figsize=(10, 6), layout="constrained", height_ratios=(2, 1), sharex=True
    )
    for name, history in runs.items():
        color = COLORS.get(name)
        (line,) = loss.plot(*column(history, "loss"), color=color, linewidth=1)
        color = line.get_color()
        steps, held_out = column(history, "held_out")
        if held_out:
            line.set_alpha(0.25)
            label = f"{name}: held-out {held_out[-1]:.3f}"
            loss.plot(steps, held_out, ".-", color=color, label=label)
        else:
            line.set_label(name)
        _plot_logits(logits, name, history, color)
        for group, style in (("muon", "-"), ("adam", "--")):
            ratios = column(history, f"monitor/{group}/update_to_weight")
            what = "matrices" if group == "muon" else "other parameters"
            # One label for all runs, because their colors are those of the other panels
            label = what if name == next(iter(runs)) else None
            sizes.plot(*ratios, style, color=color, linewidth=1, label=label)
        steps, heads = column(history, "qk_clip/num_clipped")
        if heads:
            label = f"{name}: {sum(heads):,.0f} in all"
            clips.fill_between(
                steps, heads, step="mid", color=color, alpha=0.4, linewidth=0, label=label
            )
    if threshold is not None:
        logits.axhline(
            threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}"
        )
    loss.set(ylabel=loss_name, title="Training loss, and held-out loss (dots)")
    logits.set(ylabel="largest logit", title="Largest logit of each layer (darker: deeper)")
    sizes.set(ylabel="ratio", yscale="log", xlabel="step", title="RMS of updates ÷ RMS of weights")
    clips.yaxis.set_major_locator(MaxNLocator(integer=True))
    clips.set(ylabel="heads", xlabel="step", title="Heads that the clip scaled in each step")
    for axes in (loss, logits, sizes, clips):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=9, frameon=False)
    return figure


def save(figure: Figure, path: pathlib.Path) -> None:
    """Write a figure as PNG and forget it."""
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_logits(axes: Axes, name: str, history: History, color: str) -> None:
    names = history[0] if history else {}
    layers = [key for key in names if key.startswith("logit/")]
    if not layers:
        layers = [key for key in names if key.startswith("qk_clip/largest/")]
    for i, key in enumerate(layers):
        alpha, label = 0.35 + 0.65 * (i + 1) / len(layers), name if i == len(layers) - 1 else None
        axes.plot(*column(history, key), color=color, alpha=alpha, linewidth=1, label=label)
