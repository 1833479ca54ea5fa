"""Count the bundles that a TPU v5e, v5p or v6e issues for one matrix of `NewtonSchulz(implementation="tpu_vmem")`.

    python -m benchmarks.tpu.bundles [--chips v5e]

XLA gives no estimate for a Pallas kernel. But its compiler writes down the kernel's schedule, of which each line is a
bundle of instructions, a cycle or more. Needs `pip install "muonjax[tpu]"`; writes benchmarks/results/tpu_bundles.json,
from which benchmarks/tpu/model.py takes the time of the kernel.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import measure
from benchmarks.common.roofline import CORES

SHAPES = [(768, 768), (768, 3072), (1024, 4096)]
PRESETS = ("fast", "balanced")
NAME = "tpu_bundles"

# Cycles after which all matrix units together can start one more product: of 16 rows in bfloat16, or 8 in float32. From
# the chip's peak: 16 x 128 x 128 multiply-adds of a v5e or a core of a v5p, 16 x 256 x 256 of a v6e.
_PRODUCT_CYCLES = {"bf16": 4, "f32": 2}


@dataclasses.dataclass
class Loop:
    """A loop of a schedule, or a part of the grid's loop between others.

    Attributes:
      bundles: Outside of its inner loops.
      products: Instructions that multiply, by their type.
      trips: How often it runs.
      inner: Loops in it.
    """

    bundles: int = 0
    products: dict[str, int] = dataclasses.field(default_factory=dict)
    trips: int = 1
    inner: "list[Loop]" = dataclasses.field(default_factory=list)

    @property
    def once(self) -> int:
        """Cycles of one run: of bundles, or of the matrix units where these are not done before."""
        multiplying = sum(_PRODUCT_CYCLES[kind] * count for kind, count in self.products.items())
        return max(self.bundles, multiplying) + sum(loop.trips * loop.once for loop in self.inner)


def schedule(listing: str) -> Loop:
    """The program of a listing of final bundles; the grid's loop runs once."""
    program = Loop()
    open_loops, steps = [program], {}
    line = re.compile(r"\s*(?:\d+\s*:)?\s*0x[0-9a-f]+\s+([A-Z]{2})?\s*:?\s*(>*)\s*\{(.*)")
    for tag, depth, bundle in (found.groups() for found in map(line.match, listing.splitlines()) if found):
        begins = tag == "LB" and depth
        del open_loops[len(depth) + (0 if begins else 1) :]
        while len(open_loops) <= len(depth):
            # A bundle of an outer loop can stand inside of an inner one, which then goes on.
            if begins or not open_loops[-1].inner:
                open_loops[-1].inner.append(Loop())
            open_loops.append(open_loops[-1].inner[-1])
        loop = open_loops[-1]
        loop.bundles += 1
        for kind in re.findall(r"vmatmul[a-z.]*?\.(bf16|f32)", bundle):
            loop.products[kind] = loop.products.get(kind, 0) + 1
        steps |= {name: int(by) for name, by in re.findall(r"%(s\d+)_s\w+ = sadd\.s32 (\d+), %", bundle)}
        end = re.search(r"scmp\.ge\.s32\.totalorder %(s\d+)_s\w+, (\d+) /\* loop exit test \*/", bundle)
        if end and len(depth) > 1:
            loop.trips = math.ceil(int(end[2]) / steps.get(end[1], 1))
    return program


def count(chip: str, m: int, n: int, preset: str) -> dict[str, Any]:
    """One row, in this process; the compiler must not have been loaded before."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        import jax

        import muonjax
        from benchmarks.common import ahead_of_time

        settings = dataclasses.replace(getattr(muonjax.NewtonSchulz, preset)(), implementation="tpu_vmem")
        f = functools.partial(muonjax.newton_schulz, settings=settings)
        # Two for each core, so that the grid's loop is one.
        x = jax.ShapeDtypeStruct((2 * CORES[chip], m, n), "float32")
        seconds = ahead_of_time.compile_for(ahead_of_time.CHIPS[chip], f, x).seconds
        (listing,) = (
            path
            for path in pathlib.Path(folder).glob("*tpu_vmem*-final_bundles.txt")
            if "analysis" not in path.name
        )
        program = schedule(listing.read_text())
    return {
        "chip": chip,
        "m": m,
        "n": n,
        "preset": preset,
        "cycles": sum(loop.once for loop in program.inner),
        "compile_processor_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", default=",".join(CORES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(count(*json.loads(arguments.one))))
        return
    rows = measure.read(NAME).get("results", [])
    for chip in arguments.chips.split(","):
        for m, n in SHAPES:
            for preset in PRESETS:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.tpu.bundles",
                    "--one",
                    json.dumps([chip, m, n, preset]),
                ]
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                row = json.loads(run.stdout.splitlines()[-1])
                same = {"chip": chip, "m": m, "n": n, "preset": preset}.items()
                rows = [other for other in rows if not same <= other.items()] + [row]
                print(row, flush=True)
                measure.write(
                    NAME,
                    {
                        "question": "how many cycles the kernel that keeps a matrix in VMEM takes",
                        "results": rows,
                    },
                )


if __name__ == "__main__":
    main()
