"""Sum the flops of matrix products, the bytes sent and the collectives of a compiled program, for each device."""

import collections
from typing import Any, NamedTuple

from benchmarks.common.hlo_launches import launches


class Counts(NamedTuple):
    """Counts of one device.

    Attributes:
      flops: Of matrix products, two per multiply-add.
      sent: Bytes by kind of collective.
      collectives: Number of collectives by kind.
    """

    flops: float
    sent: dict[str, float]
    collectives: dict[str, int]

    @property
    def mebibytes(self) -> float:
        """Bytes of all collectives, in MiB."""
        return sum(self.sent.values()) / 2**20

    @property
    def total_collectives(self) -> int:
        """Number of collectives of all kinds."""
        return sum(self.collectives.values())


def count(
    compiled: Any, *, devices: int = 8, unknown_trips: int | None = None
) -> Counts:
    """Count a compiled function, `jax.jit(f).lower(...).compile()`, or its text; the rest is as in `launches`."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    flops = 0.0
    sent: dict[str, float] = collections.defaultdict(float)
    collectives: dict[str, int] = collections.defaultdict(int)
    for launch in launches(text, devices, unknown_trips):
        flops += launch.count * sum(launch.flops.values())
        if launch.is_collective:
            sent[launch.kind] += launch.count * launch.sent
            collectives[launch.kind] += launch.count
    return Counts(flops, dict(sent), dict(collectives))
