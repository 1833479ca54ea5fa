"""Model the seconds of a launch by a roofline: the largest of its arithmetic, its memory traffic and a minimum time.

This is a model, not a measurement. It leaves out caches, overlap of kernels, and the effects of a library's choice of
kernel. The H100's constants were fitted to public measurements, which disagree: there are two ends, and every time is
an interval. No public time of such a program on a TPU is known, and its ends are the same.
"""

import dataclasses
import math
from typing import NamedTuple

from benchmarks.common.hlo_launches import Launch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
      peak: Multiply and add, per second, by the type that is multiplied (the datasheet's dense figures).
      efficiency: Share of the peak that a library's product reaches while all multiprocessors multiply.
      memory: Bytes per second of main memory, of the datasheet.
      memory_efficiency: Share of it that a streaming kernel reaches.
      cores: Number of streaming multiprocessors; the tiles of a product run in rounds of this many.
      round: Seconds of each round of tiles beside its arithmetic: the pipeline fills, the tiles are stored.
      launch: Least seconds from the start of one kernel to the start of the next.
      gap: Seconds between the end of one kernel and the start of the next.
      factorization: Seconds of a library's batched factorization or triangular solve.
    """

    peak: dict[str, float]
    efficiency: dict[str, float]
    memory: float
    memory_efficiency: float
    cores: int
    round: float
    launch: float
    gap: float
    factorization: float

    def seconds(self, launch: Launch) -> float:
        """Of one run of the launch."""
        if launch.factorization:
            return self.factorization
        arithmetic = sum(
            flops / (self.peak[kind] * self.efficiency[kind])
            for kind, flops in launch.flops.items()
        )
        if launch.results:
            *batch, rows, columns = launch.results[0]
            across, down = math.ceil(columns / 128), math.ceil(rows / 128)
            tiles = math.prod(batch) * (
                down * (down + 1) // 2 if "symmetric" in launch.flops else down * across
            )
            # Beyond the first round a library's choice of tiles fills the last one, on average: measured times grow
            # with tiles / cores. Where there are few tiles, it splits the contracted axis: no more than two thirds of
            # the GPU are ever idle. That is assumed, for no public time is of a product with a long contracted axis
            # alone; on one multiprocessor those of the deflation would take a tenth of a Llama's update.
            rounds = max(1.0, tiles / self.cores)
            arithmetic = (
                arithmetic * min(rounds * self.cores / tiles, 3.0) + rounds * self.round
            )
        traffic = launch.moved / (self.memory * self.memory_efficiency)
        return max(max(arithmetic, traffic) + self.gap, self.launch)


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
            return max(
                launch.flops["symmetric"] / self.peak * self.KERNEL_OVERHEAD, traffic
            )
        arithmetic = self.SMALL if launch.cycles is None else launch.cycles / self.clock
        return max(arithmetic, traffic)


class Ends(NamedTuple):
    """The two ends of every modeled time."""

    optimistic: Gpu | Tpu
    pessimistic: Gpu | Tpu


def gpu(
    chip: str,
    *,
    efficiency: float,
    round: float,
    gap: float,
    launch: float,
    factorization: float,
    symmetric: float = 1.0,
) -> Gpu:
    """A `Gpu` with fitted constants.

    Args:
      chip: "H100".
      efficiency: Of products on tensor cores.
      symmetric: The efficiency of symmetric products' kernels, in units of that.

    The rest is as in `Gpu`, and from the datasheets: a copy reaches 85 % of the memory's bandwidth (measured: Marin),
    plain float32 units 75 % of their peak.
    """
    half, tf32, f32, memory, cores = _DATASHEETS[chip]
    shares = dict.fromkeys(("bf16", "f16", "f32 default"), efficiency)
    return Gpu(
        peak={
            "bf16": half,
            "f16": half,
            "symmetric": half,
            "f32 default": tf32,
            "f32 highest": f32,
        },
        efficiency={
            **shares,
            "symmetric": efficiency * symmetric,
            "f32 highest": 0.75,
        },
        memory=memory,
        memory_efficiency=0.85,
        cores=cores,
        round=round,
        launch=launch,
        gap=gap,
        factorization=factorization,
    )


# NVIDIA's datasheets of the SXM parts, without sparsity: multiply and add in half types, TF32 and float32, bytes of
# main memory per second, multiprocessors.
_DATASHEETS = {
    "H100": (990e12, 495e12, 67e12, 3.35e12, 132),
}

# The least rms of log(measured / modeled), 0.05: the pessimistic end over 65 shapes of five compiled standard steps in
# PyTorch (tyler-romero/greyhound, commit 5ae93d6), the optimistic one over products in JAX (marin-community/marin,
# commit 00fd4b5). The fit and its data are in benchmarks/gpu/calibration.py at commit cd868b0.
_FITTED = {
    "H100": {
        "optimistic": {
            "efficiency": 0.7711,
            "round": 0.0,
            "gap": 1e-6,
            "launch": 3e-6,
            "factorization": 58e-6,
        },
        "pessimistic": {
            "efficiency": 0.7002,
            "round": 4.923e-6,
            "gap": 0.0,
            "launch": 4.923e-6,
            "factorization": 134e-6,
            "symmetric": 0.962,
        },
    }
}


def _tpu(**constants: float) -> Ends:
    return Ends(Tpu(**constants), Tpu(**constants))


ROOFLINES: dict[str, Ends] = {
    chip: Ends(gpu(chip, **ends["optimistic"]), gpu(chip, **ends["pessimistic"]))
    for chip, ends in _FITTED.items()
} | {
    # Google Cloud's TPU documentation: peak and memory of one chip. The clocks follow from the peak and the number of
    # multipliers; XLA's cycles are in units of them.
    "v5e": _tpu(clock=1.5e9, peak=197e12, memory=0.82e12),
    "v5p": _tpu(clock=1.75e9, peak=459e12, memory=2.765e12),
    "v6e": _tpu(clock=1.75e9, peak=918e12, memory=1.64e12),
}


def total_seconds(chip: str, found: list[Launch]) -> list[float]:
    """Seconds at both ends: all launches in turn, or all traffic if that is more, as with asynchronous copies."""
    return [
        max(
            sum(launch.count * model.seconds(launch) for launch in found),
            sum(launch.count * launch.moved for launch in found) / model.memory,
        )
        for model in ROOFLINES[chip]
    ]
