"""Result blocks of the optimizer benchmarks."""

from benchmarks.common.blocks import Block, Cell, Row, read


def _beside_adamw(content: Row) -> Row:
    ratios = {row["task"]: row["ratio"] for row in read("training")["best"] if row["optimizer"] == "balanced"}
    return {
        "digits": ratios.pop("digits"),
        "texts": " and ".join(f"{ratio:.2f}" for ratio in ratios.values()),
    }


def _chunk_columns(content: Row) -> dict[str, Cell]:
    chunks = {f"{size} at once": f"{{chunks[{size}][ratio]:.2f}}" for size in content["shapes"][0]["chunks"]}
    return {"matrices": "{shape}", **chunks, "the rule takes": "{rule}"}


def _aspect_columns(content: Row) -> dict[str, Cell]:
    cell = "{%s[ratio]:.2f}; {%s[polar_error]:.2f} ({%s[cosine_worst]:.2f})"
    shapes = {
        f"{content['width']} × {int(a) * content['width']}": cell % (a, a, a) for a in content["shapes"]
    }
    return {"time ÷ Optax's; polar error (worst cosine)": "{name}", **shapes}


def _methods(content: Row) -> dict[str, Row]:
    names = next(iter(content["shapes"].values()))
    return {name: {aspect: rows[name] for aspect, rows in content["shapes"].items()} for name in names}


def _rank_columns(content: Row) -> dict[str, Cell]:
    def errors(k: int) -> Cell:
        fast, balanced = f"fast, k = {k}", f"balanced, k = {k}"
        return lambda row: f"{row[fast]:.2f} / {row[balanced]:.2f}" if fast in row else None

    ranks = sorted(
        {int(key.split(" = ")[1]) for row in content["widths"] for key in row if key.startswith("fast")}
    )
    heads = {"width": "{width}", "stable rank": "{stable_rank:.1f}", "median σ ÷ σ₁": "{median:.1e}"}
    return {**heads, **{f"k = {k}": errors(k) for k in ranks}}


def _beside_optax(content: Row) -> list[Row]:
    return [
        {"title": row["title"] if name == "Optax" else "", "name": name, **row[key]}
        for row in content["rows"].values()
        for name, key in (("Optax", "optax"), ("muonjax", "muonjax_auto"))
    ]


def _explicit(content: Row) -> Row:
    rows = content["rows"].values()
    counted = ("mebibytes", "collectives", "flops")
    same = all(row["muonjax_explicit"][key] == row["muonjax_auto"][key] for row in rows for key in counted)
    errors = [row["optax_explicit"] for row in rows if row["optax_explicit"] != "runs"]
    return {
        "equal": "the same numbers" if same else "other numbers (see the JSON)",
        "errors": " and ".join(sorted(set(errors))),
        "failing": len(errors),
        "layouts": len(rows),
    }


def _scale(content: Row) -> list[Row]:
    rows = []
    for row in content["rows"]:
        auto = row["modes"]["auto"]
        same = [mode for mode, cost in row["modes"].items() if mode != "auto" and cost == auto]
        parts = [row.get(f"{part}_seconds") for part in ("trace", "lower", "compile")]
        rows.append(
            {
                "model": row["model"] if row["model"] not in [r["model"] for r in rows] else "",
                "mesh": " × ".join(f"{axis} {size}" for axis, size in row["mesh"].items()),
                "mode": f'"{same[0]}"' if same else "several",
                "share": row["share_mebibytes"] / 2**10,
                "sent": auto["sent_mebibytes"] / 2**10,
                "buffer": auto["buffer_mebibytes"] / 2**10,
                "milliseconds": 1e3 * auto["predicted_seconds"],
                "compile": None if None in parts else f"{sum(parts):.0f}",
                **auto,
                "plan_seconds": row["plan_seconds"],
            }
        )
    return rows


def _traffic(content: Row) -> list[Row]:
    """Layouts and devices, the optimizers side by side."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for row in content["rows"]:
        cell = f"{row['mebibytes']:.0f}; {row['gigaflops']:.0f}"
        found.setdefault((row["layout"], row["devices"]), {})[row["optimizer"]] = cell
    return [
        {"layout": layout, "devices": devices, **cells}
        for (layout, devices), cells in sorted(found.items())
        if devices in (8, 32, 128, 256)
    ]


def _overlap(content: Row) -> list[Row]:
    rows = content["rows"]
    return [
        {
            **row,
            "mesh": "" if number and rows[number - 1]["mesh"] == row["mesh"] else row["mesh"],
            "option": "on" if row["option"] else "off",
            "hidden": f"{row['hidden_share']:.2f}",
            "asynchronous": f"{row['asynchronous']} of {row['all_to_alls']}",
        }
        for number, row in enumerate(rows)
    ]


def _modes(content: Row) -> list[Row]:
    return [
        {"title": "" if number else row["title"], "mode": f'"{mode}"{" (auto)" * cost["auto"]}', **cost}
        for row in content["modes"]
        for number, (mode, cost) in enumerate(row["modes"].items())
    ]


def _joined(content: Row) -> list[Row]:
    """The fused steps' figures over all shapes, for each kind of spectra and method."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in content["joined"]:
        groups.setdefault((row["kind"], row["method"]), []).append(row)
    shown = []
    for (kind, method), rows in groups.items():
        count = sum(row["count"] for row in rows)
        means = {key: sum(row[key] * row["count"] for row in rows) / count for key in ("joined", "standard")}
        most = {key: max(row[key] for row in rows) for key in ("worst_excess", "largest", "largest_standard")}
        worse = sum(row["worse_by_0.02"] for row in rows)
        shown.append(
            {"kind": kind, "method": method, "count": count, "worse_by_0.02": worse, **means, **most}
        )
    return shown


def _shapes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(f"{row['shape'][0]} × {row['shape'][1]}" for row in rows))


BLOCKS = {
    "muon_step": Block(
        rows="optimizers",
        columns={
            "": "{name}",
            "time of a step": "{row:quartiles}",
            "temporary memory": "{temporary_ratio:.2f}",
            "trace and compile": "{compile_ratio:.2f}",
            "polar error, mean": "{polar_error_mean:.2f}",
            "cosine to the polar factor, worst": "{cosine_worst:.2f}",
        },
        text="{table}\n\n{machine} Times and memory in units of Optax's. A whole training step with `balanced`, in "
        "units of AdamW's: {digits:.2f} (a small convolutional network), {texts} "
        "(the example's transformer, on two texts).",
        values=_beside_adamw,
    ),
    "variant_steps": Block(
        rows="optimizers",
        columns={"": "{name}", "time ÷ Optax's": "{optax:quartiles}", "÷ muon's": "{muon:quartiles}"},
        text="{table}\n\nGPT-2-small, {layers} layers, {width} wide; medians and quartiles of {rounds} rounds in one "
        "process. With `every_k={every_k}`; a step that `monitor` measures takes {measuring[ratio]:.2f} times one "
        "that it does not. {machine}",
    ),
    "batching": Block(
        rows="shapes",
        columns=_chunk_columns,
        text="{table}\n\n{shapes[0][count]} matrices; times in units of one after the other. {machine}",
    ),
    "batching.compile": Block(
        text="Orthogonalizing {compile[leaves]} leaves of {compile[width]} × {compile[width]}, to trace and compile, "
        "in units of Optax's {compile[optimizers][optax][seconds]:.1f} s: fast {compile[optimizers][fast]:quartiles}, "
        "balanced {compile[optimizers][balanced]:quartiles}. {machine}"
    ),
    "newton_schulz": Block(rows=_methods, columns=_aspect_columns),
    "newton_schulz.log_spaced": Block(
        rows="log_spaced",
        columns={
            "polar error of a matrix": "{name} × {name}",
            "Optax": "{optax:.2f}",
            "fast": "{fast:.2f}",
            "balanced": "{balanced:.2f}",
            "Polar Express, 5 steps": "{5 steps:.3f}",
            "6 steps": "{6 steps:.3f}",
            "accurate": "{accurate:.1e}",
        },
    ),
    "newton_schulz.exact": Block(
        rows="exact",
        columns={"": "{name}", "polar error": "{polar_error:.1e}", "time": "{row:quartiles}"},
        text="{table}\n\n{width} × {width}, condition number 1000; times in units of the faster factorization's. "
        "{machine}",
    ),
    "schedules": Block(
        rows="schedules",
        columns={
            "schedule, without deflation": "{name}",
            "steps": "{steps}",
            "polar error, mean": "{polar_error:.3f}",
            "worst": "{worst:.2f}",
        },
        text="{table}",
    ),
    "spectra": Block(rows="widths", columns=_rank_columns),
    "sharding": Block(
        rows=_beside_optax,
        columns={
            "24 matrices 512 × 2048, 8 devices": "{title}",
            "": "{name}",
            "MiB sent": "{mebibytes:.1f}",
            "collectives": "{collectives}",
            "flops ÷ an even share": "{redundancy:.2f}",
        },
        text="{table}\n\nPer device and step, counted in the compiled program; an even share is the same optimizer's "
        "work on one device, divided by eight. {machine}",
    ),
    "sharding.explicit": Block(
        text="With explicit axis types and no Distribution: {equal}. Optax's raises {errors} in {failing} of the "
        "{layouts} layouts.",
        values=_explicit,
    ),
    "sharding.modes": Block(
        rows=_modes,
        columns={
            "matrices and mesh": "{title}",
            "mode": "{mode}",
            "flops ÷ an even share": "{redundancy:.2f}",
            "MiB sent": "{mebibytes:.0f}",
            "collectives": "{collectives}",
        },
        text="{table}\n\nOf the busiest device, as `plan` says, in float32. {machine}",
    ),
    "mesh_scale": Block(
        rows=_scale,
        columns={
            "model": "{model}",
            "mesh": "{mesh}",
            '"auto" takes': "{mode}",
            "busiest device ÷ mean": "{imbalance:.2f}",
            "flops ÷ an even share": "{redundancy:.2f}",
            "momentum per device, GiB": "{share:.1f}",
            "sent, GiB": "{sent:.1f}",
            "largest buffer, GiB": "{buffer:.1f}",
            "collectives": "{collectives}",
            "predicted ms": "{milliseconds:.0f}",
            "seconds to plan": "{plan_seconds:.1f}",
            "seconds to trace and compile": "{compile}",
        },
        text="{table}\n\nPlanned, not measured: per device and update, in bfloat16, momentum in float32. Milliseconds "
        "of the products and then of the exchange, at the speeds that auto assumes. XLA compiled for CPUs. "
        "{machine}",
    ),
    "mesh_traffic": Block(
        rows=_traffic,
        columns={
            "MiB sent; GFLOP of products": "{layout}",
            "devices": "{devices}",
            "muonjax": "{muonjax}",
            "MaxText": "{MaxText}",
            "Optax": "{Optax}",
        },
        text="{table}\n\nPer device and step, counted in the compiled program: 24 scanned layers of 512 × 2048 and "
        "2048 × 512, in float32. {machine}",
    ),
    "exchange_overlap": Block(
        rows=_overlap,
        columns={
            "devices": "{mesh}",
            "rounds (`chunks`)": "{rounds}",
            "XLA's option": "{option}",
            "asynchronous all-to-alls": "{asynchronous}",
            "share of the bytes that is hidden": "{hidden}",
            "launches": "{launches:,}",
            "temporary MiB": "{temporary_mebibytes:.0f}",
        },
        text="{table}\n\nPer device and step, counted in the schedules that XLA compiles for these devices, not "
        "measured. {machine}",
    ),
    "sharding.llama": Block(
        rows="llama",
        columns={
            "224 matrices": "{title}",
            "busiest device ÷ mean": "{imbalance:.2f}",
            "seconds to plan": "{plan_seconds:.1f}",
            "seconds to compile": "{compile_seconds:.0f}",
        },
    ),
    "sharding.memory": Block(
        rows="memory",
        columns={
            "per device": "{title}",
            "temporary MiB": "{temporary_mebibytes:.1f}",
            "its share of the momentum + its largest group, MiB": "{share_and_group_mebibytes:.1f}",
            "ratio": lambda row: f"{row['temporary_mebibytes'] / row['share_and_group_mebibytes']:.2f}",
        },
    ),
    "symmetric_product": Block(
        rows="results",
        columns={
            "X": "{shape}, {dtype}",
            "XLA's X Xᵀ, not mirrored": lambda row: f"{1e3 * row['variants']['plain']['seconds']:.2f} ms",
            '"reference"': "{variants[reference]:quartiles}",
            '"blocked"': "{variants[blocked]:quartiles}",
            "`None` takes": '"{rule}"',
        },
        text="{table}\n\nMedians, and quartiles, of the ratios to XLA's own product in the same round. {machine}",
    ),
    "half_precision": Block(
        columns={
            "matrices": "{shape}",
            "method": "{method}",
            "polar error, mean": "{mean:.3f}",
            "worst": "{worst:.3f}",
            "largest singular value": "{largest:.2f}",
        },
        text="{table}\n\nEmulated: products of rounded operands with float32 sums. {machine}",
    ),
    "half_precision.hostile": Block(
        rows="hostile",
        columns={
            "method": "{method}",
            "matrices": "{count:,}",
            "finite": "{finite:,}",
            "largest singular value": "{largest:.2f}",
        },
        text="{table}\n\n{kinds} matrices of each shape. Emulated: products of rounded operands with float32 sums. "
        "{machine}",
        values=lambda content: {"kinds": content["hostile"][0]["kinds"]},
    ),
    "half_precision.joined": Block(
        rows=_joined,
        columns={
            "spectra": "{count:,} {kind}",
            "method": "{method}",
            "polar error, joined (standard)": "{joined:.3f} ({standard:.3f})",
            "worse, at most, by": "{worst_excess:.3f}",
            "worse by more than 0.02": "{worse_by_0.02}",
            "largest singular value, joined (standard)": "{largest:.2f} ({largest_standard:.2f})",
        },
        text="{table}\n\n{shapes}. Emulated: products of rounded operands with float32 sums. {machine}",
        values=lambda content: {"shapes": ", ".join(_shapes(content["joined"]))},
    ),
    "state_memory": Block(
        rows="cases",
        columns={
            "compiled for": "{chip}",
            "update": "{optimizer}",
            "matrices": "{count} of {size} × {size}",
            "state on the device, MiB": lambda row: (
                "does not fit" if row["state_mib"] is None else f"{row['state_mib']:.0f}"
            ),
            "with host memory, bytes": "{state_on_device}",
            "on the host, MiB": "{state_on_host_mib:.0f}",
            "temporary memory added, MiB": "{added_mib:.0f}",
            "÷ one matrix": lambda row: f"{row['added_mib'] / (4 * row['size'] ** 2 / 2**20):.1f}",
            "÷ what is orthogonalized at once": "{added_groups:.1f}",
            "copies, asynchronous": "{asynchronous}",
            "synchronous": "{synchronous}",
        },
        text="{table}\n\nCompiled and counted, not run. {machine}",
    ),
    "state_memory.passes": Block(
        rows="passes",
        columns={
            "gradients": "{gradients}",
            "Nesterov": "{nesterov}",
            "float32": "{float32:.1f}",
            "int8": "{int8:.1f}",
            "int8 ÷ float32": "{ratio:.2f}",
        },
        text="{table}\n\nBytes that the update of momentum reads and writes for each parameter; compiled for an H100 "
        "and counted, not run. {machine}",
    ),
}
