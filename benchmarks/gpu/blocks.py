"""Result blocks of the GPU kernels."""

from typing import Any

from benchmarks.common.blocks import Block, Row
from benchmarks.common.model_blocks import block, headline, interval


def _tiles(content: Row) -> list[dict[str, Any]]:
    """The worst of all shapes and types of each choice of tiles."""
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in content["results"]:
        tiles = row["tiles"]
        key = (tiles["rows"] * tiles["block"], tiles["block"], tiles["stages"], tiles["slots"], row["addend"])
        cases.setdefault(key, []).append(row)
    return [
        {
            "tile": f"{height}×{width}",
            "stages": stages,
            "slots": slots,
            "addend": addend,
            "accumulators": height // 2 * width // 128,
            "registers": max(row["registers"] for row in same),
            "spilled": max(row["spilled_bytes"] for row in same),
        }
        for (height, width, stages, slots, addend), same in sorted(cases.items())
    ]


def _mesh(content: Row) -> Row:
    mesh = content["mesh"]
    return {
        "launched": ", ".join(mesh["launched_on_each"]),
        "sent": ", ".join(mesh["collectives"]) or "no collective",
    }


def _ends(content: Row) -> Row:
    """The H100's constants at both ends, times in microseconds."""

    def scaled(constants):
        return {name: value if name == "efficiency" else 1e6 * value for name, value in constants.items()}

    ends = content["constants"]["H100"]
    return {"0": scaled(ends["optimistic"]), "1": scaled(ends["pessimistic"])}


# What is compared with which preset.
_PRESET = {"5 steps, no deflation": "fast", "fast, steps not fused": "fast"}
_PRESET |= dict.fromkeys(
    (
        "6 steps, no deflation",
        "balanced, steps not fused",
        "balanced, stacks of 16 Mi",
        "balanced, stacks of 64 Mi",
    ),
    "balanced",
)


def _choices(content: Row) -> list[Row]:
    """One row for each tree: each choice's time in units of its preset's, at both ends."""
    trees: dict[str, dict[str, list[float]]] = {}
    for row in content["rows"]:
        trees.setdefault(row["tree"], {})[row["choice"]] = row["milliseconds"]
    return [
        {"tree": tree}
        | {
            choice: interval([a / b for a, b in zip(times[choice], times[preset], strict=True)], ".2f")
            for choice, preset in _PRESET.items()
            if choice in times
        }
        for tree, times in trees.items()
    ]


BLOCKS = {
    "gpu_choices": Block(
        rows=_choices,
        columns={"matrices": "{tree}"}
        | {
            f"{choice}, ÷ {preset}": lambda row, c=choice: row.get(c, "")
            for choice, preset in _PRESET.items()
        },
        text="{table}\n\nTimes of an update on an H100, at the optimistic and the pessimistic end of the model; jax "
        "{provenance[versions][jax]}.",
    ),
    "calibration": Block(
        rows="summaries",
        columns={
            "measured by others": "{name}",
            "rows": "{rows}",
            "rms of log(measured ÷ modelled)": "{rms:.3f}",
            "where not fitted": lambda row: (
                format(row["predicted_rms"], ".3f") if "predicted_rms" in row else ""
            ),
            "least": "{least:.2f}",
            "most": "{most:.2f}",
        },
        text='{table}\n\n"Where not fitted" is the rms over each half of the shapes with constants fitted to the other '
        "half. The H100's constants, optimistic to pessimistic: {0[efficiency]:.3f} to {1[efficiency]:.3f} of the peak "
        "in bfloat16, {0[round]:.1f} to {1[round]:.1f} µs for each round of tiles, "
        "{0[launch]:.1f} to {1[launch]:.1f} µs at least "
        "for a kernel, {0[factorization]:.0f} to {1[factorization]:.0f} µs for a library's batched factorization.",
        values=_ends,
    ),
    "gpu_model": block(chips=False, compile_time=True),
    "gpu_model.headline": headline(),
    "aot_hopper": Block(
        rows=_tiles,
        columns={
            "tile": "{tile}",
            "stages": "{stages}",
            "squares waiting": "{slots}",
            "with C": "{addend}",
            "accumulators per thread": "{accumulators}",
            "registers per thread": "{registers}",
            "bytes spilled": "{spilled}",
        },
        text="{table}\n\n{cases} cases, {provenance[device]}; jax {provenance[versions][jax]}, ptxas "
        "{provenance[versions][ptxas]}. A thread keeps its accumulators in the registers that `setmaxnreg` adds to "
        "those that ptxas counts for the launch.",
        values=lambda content: {"cases": len(content["results"])},
    ),
    "aot_hopper.mesh": Block(
        text="Compiled ahead of time for {mesh[devices]} GPUs with the batch of {mesh[shape]} sharded over them, under "
        "a bare `jit`: each launches {launched}, with {sent}.",
        values=_mesh,
    ),
    "small_matrices": block(chips=False, compile_time=False),
}
