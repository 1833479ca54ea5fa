"""Format the results of the training benchmarks for the README and the docs: tables and sentences."""

import pathlib
import re
import statistics
from typing import Any

from benchmarks.common.blocks import Block, Cell, Row, read

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
    "equinox": ("frameworks", "Equinox"),
}


def _added_lines(row: Row) -> int:
    """The lines that a user adds, by the diffs of the client's page or of its section."""
    page, name = CLIENTS[row["client"]]
    text = (RECIPES / f"{page}.md").read_text()
    sections = text.split("\n## ")
    own = [section for section in sections if section.startswith(f"{name}\n")]
    own = [sections[0], *own] if own else sections
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


def _first_rates(content: Row) -> list[dict[str, Any]]:
    """For each width, what a rate from elsewhere costs: how far its loss is above the least of the same sweep."""
    sweeps: dict[tuple[str, int], dict[float, float]] = {}
    for run in content["runs"]:
        if run["layers"] == content["rules"][0]["layers"][0]["layers"]:
            sweep = sweeps.setdefault((run["rule"], run["width"]), {})
            sweep[run["learning_rate"]] = run["held_out"]

    def best(rule: str, width: int) -> float:
        losses = sweeps[rule, width]
        return min(losses, key=lambda rate: losses[rate])

    def cost(rule: str, width: int, rate: float) -> str:
        losses = sweeps[rule, width]
        at = [loss for tried, loss in losses.items() if abs(tried / rate - 1) < 1e-6]
        return f"{rate:.2g}: {at[0] / min(losses.values()) - 1:+.1%}" if at else f"{rate:.2g}: not tried"

    widths = sorted({width for rule, width in sweeps if rule == "adamw"})
    return [
        {
            "width": width,
            "adamw": f"{best('adamw', width):g}",
            "rms": f"{min(sweeps['rms', width].values()):.3f}",
            "fixed": f"{min(sweeps['width', width].values()):.3f}",
            "twice": cost("rms", width, 2 * best("adamw", width)),
            "four": cost("rms", width, 4 * best("adamw", width)),
            "carried": cost("width", width, best("width", widths[0])),
            "carried_rms": cost("rms", width, best("rms", widths[0])),
        }
        for width in widths
    ]


def _options(content: Row) -> list[Row]:
    """What each option costs and what it bought, from the files of several benchmarks."""
    steps, momentum, ema = read("variant_steps")["optimizers"], read("int8_momentum"), read("ema_nesterov")
    presets, step = (
        {row["preset"]: row for row in read("preset_training")["presets"]},
        read("muon_step")["optimizers"],
    )
    leaderboard = read("leaderboard", folder="data")["steps"]
    variants = {row["variant"]: row for row in _complete_variants(content, "MHA")}
    dtypes = [row for row in momentum["dtypes"] if row["text"] == "documentation"]
    plain = {row["momentum"]: row["held_out"] for row in dtypes}
    recipes = [row for row in ema["recipes"] if row["text"] == "documentation"]
    transfer = {row["rule"]: row["width"] for row in read("transfer")["rules"]}

    def row(option: str, state: str, *, time: float | None, loss: str, steps: str = "") -> Row:
        return {
            "option": option,
            "state": state,
            "time": time and f"{time:.2f}",
            "loss": loss,
            "steps": steps,
        }

    def variant(option: str, name: str, state: str) -> Row:
        found = steps.get(name, {}).get("muon", {}).get("ratio")
        return row(
            option, state, time=found, loss=f"{variants[name]['ratio']:.3f}", steps=leaderboard.get(name, "")
        )

    def dtype(option: str, name: str, size: str) -> Row:
        return row(option, size, time=None, loss=f"{plain[name] / plain['float32']:.3f}")

    at_128 = {rule: next(r for r in rows if r["width"] == 128)["held_out"] for rule, rows in transfer.items()}
    ratios = [r["held_out"] / recipes[0]["held_out"] for r in recipes[1:]]
    fast = presets["fast"]["held_out"] / presets["balanced"]["held_out"]
    return [
        variant("`muon`", "muon", "4"),
        row(
            "`newton_schulz=NewtonSchulz.fast()`",
            "4",
            time=step["fast"]["ratio"] / step["balanced"]["ratio"],
            loss=f"{fast:.3f}",
        ),
        dtype("`mu_dtype=jnp.bfloat16`", "bfloat16", "2"),
        dtype("`mu_dtype=jnp.int8`", "int8", "1.03"),
        row(
            "`rms=None` (spectral norm, not RMS)",
            "4",
            time=None,
            loss=f"{at_128['width'] / at_128['rms']:.3f}",
        ),
        variant('`attention="heads"`', "per head", "4"),
        variant("`normuon`", "NorMuon", "4, and one number per neuron"),
        variant("`muonh`", "Hyperball", "4, and one number per matrix"),
        variant("`muonh` and NorMuon", "Hyperball, NorMuon", "4, and both"),
        variant("`cautious_weight_decay`", "cautious weight decay", "4"),
        row(
            "`ema_nesterov`",
            "8 (of all parameters)",
            time=None,
            loss=f"{min(ratios):.3f} to {max(ratios):.3f}, one seed",
            steps=leaderboard["EMA-Nesterov"],
        ),
        row("`monitor`", "4, and a few numbers", time=steps["monitor"]["muon"]["ratio"], loss="the same"),
        {**variant("AdamW", "AdamW", "8"), "time": None},
    ]


def _tuned(content: Row) -> list[Row]:
    """A row for each method of fine-tuning: its rates, and what it forgets at the same gain as the others."""
    equal = {row["method"]: row for row in content["equal_gain"]}
    return [
        {"method": name, "equal": equal[name], "at": {r["share"]: r for r in rows}}
        for name, rows in (
            (name, [r for r in content["methods"] if r["method"] == name]) for name in dict.fromkeys(equal)
        )
    ]


def _tuning_columns(content: Row) -> dict[str, Cell]:
    def at(share: float) -> Cell:
        def cell(row: Row) -> str | None:
            found = row["at"].get(share)
            return found and "{gained:.2f} / {forgotten:.2f}".format(**found)

        return cell

    def equal(row: Row) -> str | None:
        forgotten, share = row["equal"]["forgotten"], row["equal"]["share"]
        return None if forgotten is None else f"{forgotten:.2f} at {share:.2g}"

    shares = sorted({row["share"] for row in content["methods"]}, reverse=True)
    goal = content["equal_gain"][0]["goal"]
    return {
        "trained by AdamW, then": "{method}",
        **{f"rate × {share:g}": at(share) for share in shares},
        f"forgotten where {goal:.2f} is gained": equal,
    }


def _tuning_sizes(content: Row) -> Row:
    def of(method: str, share: float, text: str) -> dict[int, float]:
        keys = (method, share)
        return {r["seed"]: r[text] for r in content["runs"] if (r["method"], r["share"]) == keys}

    adamw, muon = of("AdamW", 1.0, "source"), of("Muon", 1.0, "source")
    differences = sorted(adamw[seed] - muon[seed] for seed in adamw.keys() & muon.keys())
    before = "; ".join(
        f"{name} {statistics.mean(of(name, 0, 'documentation').values()):.2f} and "
        f"{statistics.mean(of(name, 0, 'source').values()):.2f}"
        for name in ("AdamW", "Muon")
    )
    spread = max(max(r["gained_spread"], r["forgotten_spread"]) for r in content["methods"])
    return {
        "seeds": max(r["seeds"] for r in content["methods"]),
        "spread": spread,
        "before_tuning": before,
        "low": differences[0],
        "high": differences[-1],
    }


def _clip_costs(content: Row) -> list[Row]:
    """The mean over the seeds, for each optimizer, of what a first clip adds to the loss."""
    rows = []
    for name in dict.fromkeys(row["method"] for row in content["before"]):
        clips = [row["clip"] for row in content["before"] if row["method"] == name]
        added = {
            share: sum(clip["added"][share] for clip in clips) / len(clips) for share in clips[0]["added"]
        }
        rows.append(
            {"method": name, "largest": sum(c["largest"] for c in clips) / len(clips), "added": added}
        )
    return rows


def _clip_columns(content: Row) -> dict[str, Cell]:
    def at(share: str) -> Cell:
        return lambda row: f"{row['added'][share]:+.3f}"

    shares = content["before"][0]["clip"]["added"]
    columns: dict[str, Cell] = {"trained by": "{method}", "largest logit": "{largest:.0f}"}
    return columns | {f"clip at {float(share):.2f} of it": at(share) for share in shares}


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
    "fine_tuning": Block(
        rows=_tuned,
        columns=_tuning_columns,
        text="{table}\n\nNats per byte of held-out text, gained on the second text / forgotten of the first; {seeds} "
        "seeds, with standard deviations up to {spread:.2f}; at rate × 1 Muon gains {low:.2f} to {high:.2f} more than "
        "AdamW from the same model. Losses before, on the first and second text: {before_tuning}. "
        "{settings[first_steps]} steps on the first text, {settings[steps]} on the second, of {settings[batch]} "
        "windows of {settings[context]} bytes; {settings[layers]} layers, {settings[width]} wide. Rates in units of "
        "the first training's: {settings[adam_rate]:g} for AdamW, {settings[muon_rate]:.3g} for Muon. {machine}",
        values=_tuning_sizes,
    ),
    "fine_tuning.clip": Block(
        rows=_clip_costs,
        columns=_clip_columns,
        text="{table}\n\nWhat one clip adds to the held-out loss of the first text, nats per byte. {machine}",
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
    "transfer.first_rate": Block(
        rows=_first_rates,
        columns={
            "width": "{width}",
            "AdamW's best rate": "{adamw}",
            "`rms=0.2`: least loss": "{rms}",
            "at twice AdamW's": "{twice}",
            "at four times AdamW's": "{four}",
            "at its best rate of the smallest": "{carried_rms}",
            "`rms=None`: least loss": "{fixed}",
            "at its best rate of the smallest ": "{carried}",
        },
        text="{table}\n\nRate: loss above the least of the same sweep, whose rates are factors of two. {machine}",
    ),
    "variants.options": Block(
        rows=_options,
        columns={
            "option": "{option}",
            "state, bytes per parameter of a matrix": "{state}",
            "time of an update ÷ `muon`'s": "{time}",
            "held-out loss ÷ `muon`'s, 300 short steps or fewer": "{loss}",
            "steps on the leaderboard": "{steps}",
        },
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
            "difference of held-out loss, nats (of a text: per byte; over the seeds)": GAP,
            "steps": _share("steps"),
            "time": _share("time"),
        },
        text="{table}\n\nThe difference is the first optimizer's loss minus the other's: negative is better. Steps and "
        "time: what the first needs to stay below AdamW's final loss, in units of AdamW's. Best learning rates, in "
        "units of AdamW's: {rates}.",
        values=_rates_beside_adamw,
    ),
}
