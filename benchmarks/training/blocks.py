"""Format the results of the training benchmarks for the README and the docs: tables and sentences."""

import pathlib
import re
from typing import Any

from benchmarks.common.blocks import Block, Cell, Row

NAMES = {"adamw": "AdamW", "muonclip": "MuonClip"}


def _sweep(content: Row) -> list[dict[str, Any]]:
    """A row for each optimizer and length: its losses by rate, the least in bold."""
    keys = sorted({(run["optimizer"], -run["steps"]) for run in content["runs"]})
    rows = []
    for optimizer, steps in keys:
        losses = {
            run["learning_rate"]: run["held_out"]
            for run in content["runs"]
            if (run["optimizer"], run["steps"]) == (optimizer, -steps)
        }
        least = min(losses.values())
        cells = {rate: f"**{loss:.3f}**" if loss == least else f"{loss:.3f}" for rate, loss in losses.items()}
        rows.append({"name": f"{NAMES[optimizer]}, {-steps} steps", "losses": cells})
    return rows


def _rate_columns(content: Row) -> dict[str, Cell]:
    def loss(rate: float) -> Cell:
        return lambda row: row["losses"].get(rate)

    rates = sorted({run["learning_rate"] for run in content["runs"]})
    return {"held-out loss (nats per byte) at rate": "{name}", **{f"{rate:g}": loss(rate) for rate in rates}}


def _steps(content: Row) -> Row:
    """The shortest MuonClip run that reaches AdamW's loss, each at its best rate."""
    adamw = min((b for b in content["best"] if b["optimizer"] == "adamw"), key=lambda b: b["held_out"])
    enough = [
        b for b in content["best"] if b["optimizer"] == "muonclip" and b["held_out"] <= adamw["held_out"]
    ]
    muonclip = min(enough, key=lambda b: b["steps"])
    return {"adamw": adamw, "muonclip": muonclip, "share": muonclip["steps"] / adamw["steps"]}


def _best_rates(content: Row) -> Row:
    cells = [
        f"{NAMES[b['optimizer']]} in {b['steps']} steps: {b['learning_rate']:g}" for b in content["best"]
    ]
    return {"rates": "; ".join(cells)}


def _complete(content: Row, key: str) -> list[Row]:
    """Rows of the tasks where every optimizer's best rate is between two worse ones and has run with several seeds."""
    lacking = {row["task"] for row in content["best"] if not row["bracketed"] or row["seeds"] == 1}
    return [row for row in content[key] if row["task"] not in lacking]


def _answers(content: Row) -> list[Row]:
    return [row for row in _complete(content, "answers") if row["question"] != "rate"]


def _share(key: str) -> Cell:
    """A cell for steps or time: empty where the loss did not get and stay below AdamW's final loss."""
    return lambda row: f"{row[key]:.2f}" if row.get("steps") and row.get(key) is not None else None


def _rates_beside_adamw(content: Row) -> Row:
    rows = [row for row in _complete(content, "answers") if row["question"] == "rate"]
    return {
        "rates": ", ".join(f"{2 ** row['factors_of_two']:g} ({row['task']}, {row['of']})" for row in rows)
    }


def _complete_variants(content: Row, layout: str | None = None) -> list[Row]:
    """The rows of variants that have run with all seeds."""
    rows = [row for row in content["variants"] if layout in (None, row["layout"])]
    seeds = max(row["seeds"] for row in content["variants"])
    return [row for row in rows if row["seeds"] == seeds]


def _by_layout(content: Row) -> list[Row]:
    """A row for each layout of attention: Muon on whole matrices beside Muon per head."""
    found = {(row["layout"], row["variant"]): row for row in _complete_variants(content)}
    return [
        {"layout": layout, "whole": found[layout, "muon"], "heads": row}
        for (layout, variant), row in found.items()
        if variant == "per head" and (layout, "muon") in found
    ]


def _variant_sizes(content: Row) -> Row:
    settings = content["settings"]
    return {
        **settings,
        "heads": settings["width"] // settings["head_size"],
        "seeds": content["variants"][0]["seeds"],
    }


def _rates_by_size(content: Row) -> dict[str, Cell]:
    def cell(kind: str, size: int) -> Cell:
        def text(row: Row) -> str | None:
            found = [entry for entry in row[kind] if entry[kind] == size]
            return f"{found[0]['learning_rate']:.2g} ({found[0]['held_out']:.2f})" if found else None

        return text

    def factor(kind: str) -> Cell:
        return lambda row: f"{row[f'{kind}_factor']:.2g}" if len(row[kind]) > 1 else None

    columns: dict[str, Cell] = {"rule": "{rule}"}
    for kind, title in (("width", "width"), ("layers", "layers")):
        sizes = sorted({entry[kind] for row in content["rules"] for entry in row[kind]})
        first = sizes[:1] if kind == "layers" else []  # the smallest model again
        columns |= {f"{title} {size}": cell(kind, size) for size in sizes if size not in first}
        columns[f"largest ÷ smallest, {title}s".replace("layerss", "layers")] = factor(kind)
    return columns


RECIPES = pathlib.Path(__file__).parents[2] / "docs" / "recipes"
CLIENTS = {  # its page and its name there
    "maxtext": ("maxtext", "MaxText"),
    "levanter": ("trainers", "Levanter"),
    "tunix": ("trainers", "Tunix"),
    "keras": ("trainers", "Keras"),
    "haiku": ("trainers", "Haiku"),
    "equinox": ("equinox", "Equinox"),
}


def _added_lines(row: Row) -> int:
    """The lines that a user adds, by the diffs of the client's page or of its section."""
    page, name = CLIENTS[row["client"]]
    text = (RECIPES / f"{page}.md").read_text()
    sections = text.split("\n## ")
    own = [section for section in sections if section.startswith(f"{name}\n")] or sections
    diffs = re.findall(r"```diff\n(.*?)```", "\n## ".join(own), flags=re.DOTALL)
    return sum(bool(re.match(r"\+\s*[^+\s]", line)) for diff in diffs for line in diff.splitlines())


def _measured_clients(content: Row) -> list[Row]:
    """The rows whose optimizers have all run at three rates."""
    rows = content["rows"]
    return [row for row in rows if all(len(found["losses"]) >= 3 for found in row["optimizers"].values())]


def _client_loss(optimizer: str) -> Cell:
    def cell(row: Row) -> str:
        best = row["optimizers"][optimizer]
        return f"{best['loss']:.3f} (rate {best['learning_rate']:g})"

    return cell


def _transfer_sizes(content: Row) -> Row:
    smallest = content["rules"][0]["layers"][0]["layers"]
    norms = "; ".join(
        f"{row['mean']:.1f} ({row['low']:.1f} to {row['high']:.1f}) at width {row['width']}"
        for row in content["spectral_norms"]
    )
    base = min(entry["width"] for entry in content["rules"][0]["width"])
    return {**content["settings"], "layers": smallest, "norms": norms, "base": base}


STEPS = (
    "MuonClip reaches a held-out loss of {muonclip[held_out]:.3f} nats per byte in {muonclip[steps]} steps; AdamW has "
    "{adamw[held_out]:.3f} after {adamw[steps]}: MuonClip needs {share:.0%} of AdamW's steps (one seed, each optimizer "
    "at the best learning rate of those in the table)."
)
GAP = "{gap[mean]:+.4f} ({gap[low]:+.4f} to {gap[high]:+.4f})"

BLOCKS = {
    "ema_nesterov": Block(
        rows="recipes",
        columns={
            "text": "{text}",
            "recipe": "{recipe}",
            "best rate": "{learning_rate:.2g}",
            "held-out loss": "{held_out:.3f} ± {spread:.3f}",
            "seeds": "{seeds}",
        },
        text="{table}\n\n{settings[steps]} steps; the model of the table of variants. {machine}",
    ),
    "int8_momentum": Block(
        rows="dtypes",
        columns={
            "text": "{text}",
            "momentum": "{momentum}",
            "held-out loss": "{held_out:.3f} ± {spread:.3f}",
            "minus float32's (over the seeds)": "{difference:+.4f} ({difference_low:+.4f} to {difference_high:+.4f})",
        },
        text="{table}\n\nMean and standard deviation of {dtypes[0][seeds]} seeds; the model and the rates of plain "
        "Muon in the table of variants. {machine}",
    ),
    "int8_momentum.rounding": Block(
        rows="rounding",
        columns={
            "momentum": "{momentum}",
            "norm of one rounding ÷ norm": "{noise:.4f}",
            "added to the polar error": "{added:.3f}",
            "at worst": "{worst:.2f}",
        },
        text="{table}\n\nMatrices 192 × 768 with recorded spectra of momentum, whose polar error is "
        "{rounding[0][error]:.3f} without a rounding. {machine}",
    ),
    "variants": Block(
        rows=lambda content: _complete_variants(content, "MHA"),
        columns={
            "variant": "{variant}",
            "best rate": "{learning_rate:.2g}",
            "held-out loss": "{held_out:.3f} ± {spread:.3f}",
            "÷ muon's": "{ratio:.3f}",
            "over the seeds": "{ratio_low:.3f} to {ratio_high:.3f}",
        },
        text="{table}\n\nMean and standard deviation of {seeds} seeds; {steps} steps of {batch} windows of {context} "
        "bytes, {layers} layers, {width} wide, {heads} heads. {machine}",
        values=_variant_sizes,
    ),
    "variants.layouts": Block(
        rows=_by_layout,
        columns={
            "attention": "{layout}",
            "whole: best rate": "{whole[learning_rate]:.2g}",
            "held-out loss": "{whole[held_out]:.3f} ± {whole[spread]:.3f}",
            "per head: best rate": "{heads[learning_rate]:.2g}",
            "held-out loss ": "{heads[held_out]:.3f} ± {heads[spread]:.3f}",
            "per head ÷ whole": "{heads[ratio]:.3f} ({heads[ratio_low]:.3f} to {heads[ratio_high]:.3f})",
        },
        text="{table}\n\nMean and standard deviation of {seeds} seeds; {heads} heads of size {head_size}. {machine}",
        values=_variant_sizes,
    ),
    "transfer": Block(
        rows="rules",
        columns=_rates_by_size,
        text="{table}\n\nBest rate (its held-out loss). Widths with {layers} layers, layers at width {base}; {steps} "
        "steps of {batch} windows of {context} bytes, one seed. {machine}",
        values=_transfer_sizes,
    ),
    "transfer.norms": Block(
        text="The spectral norm of AdamW's updates, in units of that of an orthogonal matrix with the same RMS: "
        "{norms} (mean and range over the matrices of a block, after 20 steps).",
        values=_transfer_sizes,
    ),
    "clients": Block(
        rows=_measured_clients,
        columns={
            "client": lambda row: "[{1}]({0}.md)".format(*CLIENTS[row["client"]]),
            "package": "{package} {version}",
            "jax, optax": "{provenance[versions][jax]}, {provenance[versions][optax]}",
            "lines added": _added_lines,
            "steps": "{steps}",
            "AdamW": _client_loss("AdamW"),
            "optax.contrib.muon": _client_loss("Optax's Muon"),
            "muonjax": _client_loss("muonjax"),
        },
        text="{table}\n\nMean training loss, in nats, of the last tenth of the steps, at the best of "
        "three or more rates, the best between two worse ones. MaxText trains on the one "
        "random batch that it has as synthetic data, the others on text that is new in each step. One seed, on a CPU.",
    ),
    "training_sweep": Block(
        rows=_sweep, columns=_rate_columns, text=STEPS + "\n\n{table}\n\n{machine}", values=_steps
    ),
    "training_sweep.steps": Block(
        text=STEPS.replace(" of those in the table", " that was tried"), values=_steps
    ),
    "training_sweep.rates": Block(
        text="Learning rate with the least held-out loss. {rates} (one seed).", values=_best_rates
    ),
    "preset_training": Block(
        rows="presets",
        columns={
            "iteration": "{preset}",
            "best learning rate": "{learning_rate:g}",
            "held-out loss, mean": "{held_out:.3f}",
            "÷ Optax's": "{ratio:.3f}",
            "over the seeds": "{ratio_low:.3f} to {ratio_high:.3f}",
        },
        text="{table}\n\n{steps} steps, {presets[0][seeds]} seeds. {machine}",
    ),
    "training": Block(
        rows=lambda content: _complete(content, "best"),
        columns={
            "task": "{task}",
            "optimizer": "{optimizer}",
            "best rate": "{learning_rate:.2g}",
            "held-out loss": "{held_out:.3f} ± {spread:.3f}",
            "accuracy": "{accuracy:.3f}",
            "a step ÷ AdamW's": "{ratio:.2f}",
        },
        text="{table}\n\n{steps} steps; mean and standard deviation of {seeds} seeds. {machine}",
        values=lambda content: {"seeds": min(row["seeds"] for row in _complete(content, "best"))},
    ),
    "training.answers": Block(
        rows=_answers,
        columns={
            "task": "{task}",
            "optimizer": "{of}",
            "compared with": "{against}",
            "difference of held-out loss, nats (over the seeds)": GAP,
            "steps": _share("steps"),
            "time": _share("time"),
        },
        text="{table}\n\nThe difference is the first optimizer's loss minus the other's: negative is better. Steps and "
        "time: what the first needs to stay below AdamW's final loss, in units of AdamW's. Best learning rates, in "
        "units of AdamW's: {rates}.",
        values=_rates_beside_adamw,
    ),
}
