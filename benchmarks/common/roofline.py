"""Model the seconds of a launch by a roofline: the largest of its arithmetic, its memory traffic and a minimum time.

This is a model, not a measurement. It leaves out caches, overlap of kernels, and the effects of a library's choice of
kernel. The H100's constants were fitted to public measurements, which disagree: there are two ends, and every time is
an interval. No public time of such a program on a TPU is known, and its ends are the same.
"""

import dataclasses
import math
from typing import NamedTuple

from benchmarks.common.hlo_launches import Launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU; by default an H100 SXM, without sparsity, from its datasheet.

    Attributes:
      efficiency: Share of the peak that a library's product reaches while all multiprocessors multiply.
      symmetric: The share that a kernel for symmetric products reaches, in units of that.
      round: Seconds of each round of tiles beside its arithmetic: the pipeline fills, the tiles are stored.
      launch: Least seconds from the start of one kernel to the start of the next.
      gap: Seconds between the end of one kernel and the start of the next.
      half, tf32, float32: Multiplications and additions per second.
      memory: Bytes per second of main memory.
      cores: Number of streaming multiprocessors; the tiles of a product run in rounds of this many.
    """

    efficiency: float
    symmetric: float = 1.0
    round: float
    launch: float
    gap: float
    half: float = 990e12
    tf32: float = 495e12
    float32: float = 67e12
    memory: float = 3.35e12
    cores: int = 132

    # A copy reaches 85 % of the memory's bandwidth (measured: Marin), plain float32 units 75 % of their peak.
    COPY = 0.85
    PLAIN = 0.75

    def flops_a_second(self, kind: str) -> float:
        """What a large product reaches in this type."""
        reached = {
            "symmetric": self.half * self.efficiency * self.symmetric,
            "f32 default": self.tf32 * self.efficiency,
            "f32 highest": self.float32 * self.PLAIN,
        }
        return reached.get(kind, self.half * self.efficiency)

    def seconds(self, launch: Launch) -> float:
        """Seconds of one run of the launch."""
        arithmetic = sum(
            flops / self.flops_a_second(kind) for kind, flops in launch.flops.items()
        )
        if launch.result:
            *batch, rows, columns = launch.result
            across = math.ceil(columns / 128)
            down = math.ceil(rows / 128)
            if "symmetric" in launch.flops:
                across = (down + 1) / 2
            tiles = math.prod(batch) * down * across
            # Beyond the first round a library's choice of tiles fills the last one, on average: measured times grow
            # with tiles / cores. Where there are few tiles, it splits the contracted axis: no more than two thirds of
            # the GPU are ever idle. That is assumed, for no public time is of a product with a long contracted axis
            # alone.
            rounds = max(1.0, tiles / self.cores)
            arithmetic = (
                arithmetic * min(rounds * self.cores / tiles, 3.0) + rounds * self.round
            )
        traffic = launch.moved / (self.memory * self.COPY)
        return max(max(arithmetic, traffic) + self.gap, self.launch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A TPU, one chip.

    Attributes:
      clock: Cycles per second.
      memory: Bytes per second of main memory.
    """

    clock: float
    memory: float

    # A scalar or a tiny vector operation for which XLA gives no estimate.
    SMALL = 0.2e-6

    def seconds(self, launch: Launch) -> float:
        """Seconds of one run of the launch; 0 for a copy that runs beside others (see `total_seconds`)."""
        if launch.asynchronous:
            return 0.0
        arithmetic = self.SMALL if launch.cycles is None else launch.cycles / self.clock
        return max(arithmetic, launch.moved / self.memory)


class Ends(NamedTuple):
    """The two ends of every modeled time."""

    optimistic: Gpu | Tpu
    pessimistic: Gpu | Tpu


# Google Cloud's TPU documentation has the memory of one chip. The clocks follow from the peak and the number of
# multipliers; XLA's cycles are in units of them.
_TPUS = {
    "v5e": Tpu(clock=1.5e9, memory=0.82e12),
    "v5p": Tpu(clock=1.75e9, memory=2.765e12),
    "v6e": Tpu(clock=1.75e9, memory=1.64e12),
}
# The least rms of log(measured / modeled), 0.05: the pessimistic end over 65 shapes of five compiled standard steps in
# PyTorch (tyler-romero/greyhound, commit 5ae93d6), the optimistic one over products in JAX (marin-community/marin,
# commit 00fd4b5). The fit and its data are in benchmarks/gpu/calibration.py at commit cd868b0.
_FAST = Gpu(efficiency=0.7711, round=0.0, gap=1e-6, launch=3e-6)
_SLOW = Gpu(
    efficiency=0.7002, symmetric=0.962, round=4.923e-6, gap=0.0, launch=4.923e-6
)
ROOFLINES = {"H100": Ends(_FAST, _SLOW)} | {
    name: Ends(tpu, tpu) for name, tpu in _TPUS.items()
}


def total_seconds(chip: str, launches: list[Launch]) -> list[float]:
    """Seconds at both ends: all launches in turn, or all traffic if that is more, as with asynchronous copies."""
    moved = sum(launch.count * launch.moved for launch in launches)
    return [
        max(
            sum(launch.count * end.seconds(launch) for launch in launches),
            moved / end.memory,
        )
        for end in ROOFLINES[chip]
    ]
