"""Result blocks of the GPU kernels."""

from typing import Any

from benchmarks.common.blocks import Block, Row
from benchmarks.common.model_blocks import block, headline


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


BLOCKS = {
    "gpu_model": block(chips=False, compile_time=True),
    "gpu_model.headline": headline("H100"),
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
