"""Model the seconds of a launch by a roofline: the largest of its arithmetic, its memory traffic and a minimum time.

This is a model, not a measurement. It leaves out caches, overlap of kernels, and the effects of a library's choice of
kernel. It ranks programs that differ in what they launch, multiply and copy.
"""

import dataclasses
import math

from benchmarks.common.hlo_launches import Launch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
      peak: Multiply and add, per second, by the type that is multiplied (the datasheet's dense figures).
      efficiency: Share of the peak that a library's large product reaches.
      memory: Bytes per second of main memory, of the datasheet.
      memory_efficiency: Share of it that a streaming kernel reaches.
      cores: Number of streaming multiprocessors; the tiles of a product run in rounds of this many.
      launch: Least seconds from the start of one kernel to the start of the next.
      gap: Seconds between the end of one kernel and the start of the next.
    """

    peak: dict[str, float]
    efficiency: dict[str, float]
    memory: float
    memory_efficiency: float
    cores: int
    launch: float
    gap: float

    def seconds(self, launch: Launch) -> float:
        """Of one run of the launch."""
        arithmetic = sum(
            flops / (self.peak[kind] * self.efficiency[kind]) for kind, flops in launch.flops.items()
        )
        arithmetic *= self._idle_factor(launch)
        traffic = launch.moved / (self.memory * self.memory_efficiency)
        return max(max(arithmetic, traffic) + self.gap, self.launch)

    def _idle_factor(self, launch: Launch) -> float:
        """How much longer a product takes because its last round of tiles does not fill the machine."""
        if not launch.results:
            return 1.0
        *batch, rows, columns = launch.results[0]
        across, down = math.ceil(columns / 128), math.ceil(rows / 128)
        tiles = math.prod(batch) * (down * (down + 1) // 2 if "symmetric" in launch.flops else down * across)
        # Where there are few tiles, a library splits the contracted axis: no more than two thirds of the GPU are ever
        # idle.
        return min(math.ceil(tiles / self.cores) * self.cores / tiles, 3.0)


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU, one chip.

    Attributes:
      clock: Cycles per second.
      peak: Multiply and add in bfloat16 per second.
      memory: Bytes per second of main memory.
    """

    clock: float
    peak: float
    memory: float

    # The time of a Pallas kernel of ours, relative to its products at the peak: by the bundles in its schedule, it
    # takes 2 to 20 % longer.
    KERNEL_OVERHEAD = 1.10
    # A scalar or a tiny vector operation for which XLA gives no estimate.
    SMALL = 0.2e-6

    def seconds(self, launch: Launch) -> float:
        """Of one run of the launch; 0 for a copy that runs beside others (see `total_seconds`)."""
        if launch.asynchronous:
            return 0.0
        traffic = launch.moved / self.memory
        if "symmetric" in launch.flops:
            return max(launch.flops["symmetric"] / self.peak * self.KERNEL_OVERHEAD, traffic)
        arithmetic = self.SMALL if launch.cycles is None else launch.cycles / self.clock
        return max(arithmetic, traffic)


ROOFLINES: dict[str, Gpu | Tpu] = {
    # NVIDIA's H100 SXM datasheet, without sparsity. cuBLAS reaches about 70 % of the tensor cores' peak under the
    # power limit, 75 % of the plain float32 units'; a copy 85 % of the memory's. Three microseconds is what short
    # kernels take one after the other from a CUDA graph or a stream; the gap is what remains of it between long ones.
    "H100": Gpu(
        peak={
            "bf16": 990e12,
            "f16": 990e12,
            "f32 default": 495e12,
            "f32 highest": 67e12,
            "symmetric": 990e12,
        },
        efficiency={"bf16": 0.70, "f16": 0.70, "f32 default": 0.70, "f32 highest": 0.75, "symmetric": 0.70},
        memory=3.35e12,
        memory_efficiency=0.85,
        cores=132,
        launch=3e-6,
        gap=1e-6,
    ),
    # Google Cloud's TPU documentation: peak and memory of one chip. The clocks follow from the peak and the number of
    # multipliers; XLA's cycles are in units of them.
    "v5e": Tpu(clock=1.5e9, peak=197e12, memory=0.82e12),
    "v5p": Tpu(clock=1.75e9, peak=459e12, memory=2.765e12),
    "v6e": Tpu(clock=1.75e9, peak=918e12, memory=1.64e12),
}


def total_seconds(chip: str, found: list[Launch]) -> float:
    """Seconds of all launches one after the other, or of all traffic if that is more, as with asynchronous copies."""
    model = ROOFLINES[chip]
    one_by_one = sum(launch.count * model.seconds(launch) for launch in found)
    traffic = sum(launch.count * launch.moved for launch in found) / model.memory
    return max(one_by_one, traffic)
