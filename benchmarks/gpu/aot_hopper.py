"""Does the Hopper kernel compile to machine code without spills, for every choice of tiles?

    python -m benchmarks.gpu.aot_hopper

No GPU is needed, but `pip install "muonjax[cuda13]"` on Python 3.12. Reports, for each case, the registers and
spilled bytes that ptxas prints.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import jax.numpy as jnp

from benchmarks.common import ahead_of_time, measure
from benchmarks.gpu.tiles import candidates
from pallas_kernels import _mosaic_gpu_sm90
from pallas_kernels._tiles import Tiles, pick

H100 = ahead_of_time.CHIPS["H100"]
SHAPES = [(1, 4096, 4096), (8, 2048, 2048)]
OTHER_SHAPES = [
    (1, 256, 64),
    (8, 1024, 1024),
    (1, 8192, 8192),
    (1, 1088, 1152),
    (1, 4096, 16384),
]


@contextlib.contextmanager
def captured(lines: list[str]) -> Iterator[None]:
    """Adds what the compiler, which is C++, prints."""
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as file:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            lines += file


def compile_case(
    shape: tuple[int, int, int], tiles: Tiles, addend: bool, dtype: Any
) -> dict:
    """Registers and spills of one kernel."""
    batch, m, _ = shape

    def run(x: Any, c: Any, scale: Any) -> Any:
        return _mosaic_gpu_sm90.launch(x, None, c, scale, tiles=tiles, cores=H100.cores)

    c = jax.ShapeDtypeStruct((batch, m, m), dtype) if addend else None
    scale = jax.ShapeDtypeStruct((batch, 2), jnp.float32)
    lines: list[str] = []
    with captured(lines):
        ahead_of_time.compile_for(
            H100, run, jax.ShapeDtypeStruct(shape, dtype), c, scale
        )
    text = "".join(lines)
    (registers,) = re.findall(r"Used (\d+) registers", text)
    ((stores, loads),) = re.findall(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    return {
        "shape": shape,
        "dtype": jnp.dtype(dtype).name,
        "tiles": vars(tiles.with_addend() if addend else tiles),
        "addend": addend,
        "registers": int(registers),
        "spilled_bytes": int(stores) + int(loads),
    }


def main() -> None:
    cases = []
    for shape in SHAPES:
        cases += [(shape, tiles) for tiles in candidates() if tiles.group == 8]
    for shape in OTHER_SHAPES:
        cases.append((shape, pick(shape[1], shape[0])))
    rows = []
    for shape, tiles in cases:
        for addend in (False, True):
            for dtype in (
                (jnp.bfloat16, jnp.float16) if shape == SHAPES[0] else (jnp.bfloat16,)
            ):
                rows.append(compile_case(shape, tiles, addend, dtype))
                print(measure.table(rows[-1:]), flush=True)
    done = subprocess.run(
        ["ptxas", "--version"], capture_output=True, text=True, check=True
    )
    measure.write(
        "aot_hopper",
        {"results": rows},
        device=f"compiled ahead of time for {H100.kind}; not run",
        ptxas=re.findall(r"V[\d.]+", done.stdout)[0],
    )


if __name__ == "__main__":
    main()
