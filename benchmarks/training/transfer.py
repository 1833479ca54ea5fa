"""Find out which scaling of updates keeps its best learning rate when width or depth change.

    python -m benchmarks.training.transfer                 # everything; can be stopped and continued
    python -m benchmarks.training.transfer --minutes 10    # starts no run after ten minutes

Small byte-level transformers (`small_models`), one seed. For each rule and size at least four rates are tried, in
factors of two, until the best one is between two worse ones; the reported rate is that of the minimum of the parabola
through these three. Embeddings, norms and head train with AdamW at a fixed rate. "adamw" is AdamW for all parameters,
for comparison. Each rule also has a coordinate check: how much the first ten steps change the activations at each
width, with the best rate of the first width. And for each width the spectral norm of AdamW's updates is measured.
"""

import functools
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from benchmarks.training.book import Book, command_line, next_rate, search
from benchmarks.training.small_models import Model
from benchmarks.training.small_runs import Recipe, Trainer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"
FIRST = {"rms": 8e-3, "width": 1.6e-2, "spectral": 1.6e-2, "hyperball": 2e-2, "adamw": 4e-3}
LEAST = 4  # rates of a sweep
CHECKED = (1, 10)  # steps of the coordinate check
Size = tuple[int, int]  # width, layers


def trainer(rule: str, size: Size, settings: dict[str, Any]) -> Trainer:
    width, layers = size
    model = Model("MHA", layers, width, settings["head_size"], settings["context"])
    return Trainer(model, Recipe(size=rule), settings["steps"], settings["batch"])


def sweep(book: Book, rule: str, size: Size, first: float) -> float | None:
    """The best rate of one rule and size; None if the time is over."""
    key = {"rule": rule, "width": size[0], "layers": size[1]}
    made = functools.cache(lambda: trainer(rule, size, book.settings))
    return search(
        book, key, (first,), lambda rate: made().run(rate, book.settings["adam_rate"], 0), least=LEAST
    )


def coordinate_check(rule: str, size: Size, rate: float, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """RMS change of each activation after the first steps of a run, on one batch."""
    run = trainer(rule, size, settings)
    params, state = run.start(0)
    windows = run.windows(1, 0)
    activations = jax.jit(lambda params: run.model.apply(params, windows[:, :-1])[1])
    before, rows = activations(params), []
    for step in range(1, max(CHECKED) + 1):
        rates = jnp.float32(rate), jnp.float32(settings["adam_rate"])
        params, state, _ = run.step(params, state, run.windows(0, step), *rates)
        if step in CHECKED:
            now = activations(params)
            moved = {n: float(jnp.sqrt(jnp.mean((now[n] - before[n]) ** 2))) for n in before}
            rows.append({"rule": rule, "width": size[0], "learning_rate": rate, "step": step, "moved": moved})
    return rows


def spectral_share(size: Size, rate: float, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Spectral norms of AdamW's updates, in units of those of orthogonal matrices with the same RMS: mean and range."""
    run = trainer("adamw", size, settings)
    params, state = run.start(0)
    for step in range(steps):
        before = params["block_0"]
        params, state, _ = run.step(
            jax.tree.map(jnp.copy, params), state, run.windows(0, step), jnp.float32(rate), jnp.float32(rate)
        )
    shares = []
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(params["block_0"]), strict=True):
        if old.ndim > 1:
            m = old.shape[0] if old.shape[-1] != size[0] else math.prod(old.shape[:-1])
            update = np.asarray(new - old, np.float64).reshape(m, -1)
            orthogonal = np.sqrt(np.mean(update**2) * max(update.shape))  # spectral norm at the same RMS
            shares.append(np.linalg.norm(update, 2) / orthogonal)
    return {"width": size[0], "mean": np.mean(shares), "low": min(shares), "high": max(shares)}


def vertex(losses: dict[float, float]) -> float:
    """The rate of least loss on the parabola, over the rate's logarithm, through the best rate and its neighbours."""
    best = min(losses, key=lambda rate: losses[rate])
    low, middle, high = (losses[rate] for rate in (best / 2, best, best * 2))
    return best * 2 ** ((low - high) / (2 * (low - 2 * middle + high)))


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each rule its best rate and loss by size, and how far the best rates are apart."""
    best: dict[str, dict[Size, dict[float, float]]] = {}
    for row in runs:
        size = row["width"], row["layers"]
        best.setdefault(row["rule"], {}).setdefault(size, {})[row["learning_rate"]] = row["held_out"]
    result = []
    for rule, sweeps in best.items():
        sizes = {size: losses for size, losses in sweeps.items() if next_rate(losses, least=LEAST) is None}
        if not sizes:
            continue
        row: dict[str, Any] = {"rule": rule}
        for kind, fixed in (("width", 1), ("layers", 0)):
            base = min(sizes)[fixed]
            row[kind] = [
                {
                    kind: size[1 - fixed],
                    "learning_rate": vertex(losses),
                    "held_out": min(losses.values()),
                }
                for size, losses in sorted(sizes.items())
                if size[fixed] == base
            ]
            rates = [entry["learning_rate"] for entry in row[kind]]
            row[f"{kind}_factor"] = max(rates) / min(rates)
        result.append(row)
    return result


def draw(book: Book, checks: list[dict[str, Any]], rules: list[str]) -> None:
    """Loss against rate by width and by depth, and the movement of activations against width; a column per rule."""
    figure, panels = plt.subplots(
        3, len(rules), figsize=(3.2 * len(rules), 9), sharey="row", layout="constrained", squeeze=False
    )
    for column, rule in enumerate(rules):
        rows = book.find(rule=rule)
        for panel, kind, fixed in (
            (panels[0, column], "width", "layers"),
            (panels[1, column], "layers", "width"),
        ):
            base = min(row[fixed] for row in rows)
            sizes = sorted({row[kind] for row in rows if row[fixed] == base})
            for i, size in enumerate(sizes):
                mine = sorted(
                    (r["learning_rate"], r["held_out"]) for r in rows if (r[kind], r[fixed]) == (size, base)
                )
                color = plt.colormaps["viridis"](i / max(1, len(sizes)))
                panel.plot(*zip(*mine, strict=True), ".-", color=color, label=f"{kind} {size}")
                panel.plot(*min(mine, key=lambda point: point[1]), "o", color=color)
            panel.set_visible(kind == "width" or len(sizes) > 1)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda rate, _: f"{rate:.2g}")
            panel.tick_params(axis="x", labelsize=7)
            panel.set_xlabel("learning rate")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7, frameon=False)
        panels[0, column].set_title(rule)
        last = [row for row in checks if row["rule"] == rule and row["step"] == max(CHECKED)]
        for name in last[0]["moved"] if last else ():
            points = sorted((row["width"], row["moved"][name]) for row in last)
            panels[2, column].plot(*zip(*points, strict=True), ".-", label=name)
        panels[2, column].set_xscale("log", base=2)
        panels[2, column].set(yscale="log", xlabel="width")
        panels[2, column].xaxis.set_major_formatter(lambda width, _: f"{width:.0f}")
        panels[2, column].grid(alpha=0.3)
    for row in panels[:2]:
        losses = [r["held_out"] for r in book.rows]
        row[0].set(ylabel="held-out loss (nats per byte)", ylim=(min(losses) - 0.03, min(losses) + 0.45))
    panels[2, 0].set_ylabel(f"RMS change of activations, {max(CHECKED)} steps")
    panels[2, 0].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(0, 0.34))
    figure.savefig(IMAGES / "learning_rate_transfer.png", dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__, "transfer", steps=150, batch=8, head_size=16, context=64)
    add = parser.add_argument
    add("--adam-rate", type=float, default=4e-3, help="of embeddings, norms and head")
    add("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    add("--depths", type=int, nargs="+", default=[2, 4, 8], help="at the first width, but the first")
    add("--rules", nargs="+", default=list(FIRST))
    args = parser.parse_args(arguments)
    settings = {key: getattr(args, key) for key in ("steps", "batch", "head_size", "context", "adam_rate")}
    book = Book(args.name, settings, args.minutes)
    best: dict[str, float | None] = dict(FIRST)
    sizes = [(width, args.depths[0]) for width in args.widths]
    sizes += [(args.widths[0], depth) for depth in args.depths[1:]]
    for size in sizes:
        for rule in (
            args.rules if size[1] == args.depths[0] else [rule for rule in args.rules if rule != "adamw"]
        ):
            # From the best rate of the size before, and for the first deeper model from the smallest one's.
            best[rule] = sweep(book, rule, size, best[rule] or FIRST[rule])
    checks, shares = [], []
    rows = summary(book.rows)
    if time.monotonic() < book.until:
        for row in rows:
            smallest = book.find(rule=row["rule"], width=args.widths[0], layers=args.depths[0])
            rate = min(smallest, key=lambda run: run["held_out"])["learning_rate"]
            for size in sizes[: len(args.widths)]:
                checks += coordinate_check(row["rule"], size, rate, settings)
        shares = [
            spectral_share(size, FIRST["adamw"], min(20, args.steps), settings)
            for size in sizes[: len(args.widths)]
        ]
    factors = [{key: row[key] for key in ("rule", "width_factor", "layers_factor")} for row in rows]
    book.write(factors, rules=rows, checks=checks, spectral_norms=shares)
    draw(book, checks, [row["rule"] for row in rows])


if __name__ == "__main__":
    main()
