"""Count the flops of matrix products, the bytes sent and the collectives of a compiled program, per device.

Exact, because it reads the text of the optimized HLO: a loop's body counts as often as it runs (XLA's own
`cost_analysis` counts it once), and of a conditional the most expensive branch.
"""

import collections
import math
import re
from typing import Any, NamedTuple

from benchmarks.common.hlo_text import Instruction, parse, shapes, size

# Bytes that one of g devices sends, in units of its operand's bytes.
_SENT = {
    "all-gather": lambda g: g - 1,
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "ragged-all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
    "collective-broadcast": lambda g: 1,
}


class Counts(NamedTuple):
    """Counts of one device.

    Attributes:
      flops: Of matrix products, two per multiply-add.
      sent: Bytes by kind of collective.
      collectives: Number of collectives by kind.
      loops: Number of loops that contain matrix products.
    """

    flops: float
    sent: dict[str, float]
    collectives: dict[str, int]
    loops: int

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
    """Count a compiled function.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, or its text.
      devices: Number of devices, the size of a replica group that is not written out.
      unknown_trips: Iterations of a loop whose length the compiler does not know; None raises instead.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    computations, entry = parse(text)
    return _Counter(computations, devices, unknown_trips).visit(entry)


def _group(attributes: str, devices: int) -> int:
    if explicit := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(explicit.group(1).split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota.group(1))
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes
    ):
        sizes = {
            axis: int(size)
            for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh.group(1))
        }
        return math.prod(
            sizes[axis] for axis in re.findall(r"'([^']+)'", mesh.group(2))
        )
    return devices


class _Counter:
    def __init__(
        self,
        computations: dict[str, list[Instruction]],
        devices: int,
        unknown_trips: int | None,
    ):
        self.computations, self.devices, self.unknown_trips = (
            computations,
            devices,
            unknown_trips,
        )
        self.seen: dict[str, Counts] = {}

    def visit(self, name: str) -> Counts:
        if name not in self.seen:
            self.seen[name] = self._count(self.computations[name])
        return self.seen[name]

    def _count(self, instructions: list[Instruction]) -> Counts:
        flops, loops = 0.0, 0
        sent: dict[str, float] = collections.defaultdict(float)
        collectives: dict[str, int] = collections.defaultdict(int)
        results = {i.name: i.shape for i in instructions}

        def operand(text: str) -> str:
            """An operand's shape, written out or looked up."""
            return text if shapes(text) else results.get(text.lstrip("%"), "")

        for i in instructions:
            kind = i.op.removesuffix("-start")
            if i.op == "dot":
                flops += _dot(i, operand(i.operands[0]))
            elif kind in _SENT:
                held = sum(size(operand(text)) for text in i.operands)
                sent[kind] += held * _SENT[kind](_group(i.attributes, self.devices))
                collectives[kind] += 1
            for inner, times in self._inner(i):
                flops += inner.flops * times
                loops += inner.loops + (i.op == "while" and inner.flops > 0)
                for table, own in (
                    (sent, inner.sent),
                    (collectives, inner.collectives),
                ):
                    for key, value in own.items():
                        table[key] += value * times
        return Counts(flops, dict(sent), dict(collectives), loops)

    def _inner(self, i: Instruction) -> list[tuple[Counts, int]]:
        if i.op == "while":
            body = re.search(r"body=%?([\w.\-]+)", i.attributes)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', i.attributes)
            inner = self.visit(body.group(1))  # pyright: ignore
            times = int(trips.group(1)) if trips else self.unknown_trips
            if times is None:
                if inner.flops or inner.collectives:
                    raise ValueError(
                        f"count(compiled): the length of the loop {i.name} is not known; give unknown_trips."
                    )
                times = 0
            return [(inner, times)]
        if i.op == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
            names = (
                [name.strip().lstrip("%") for name in listed.group(1).split(",")]
                if listed
                else re.findall(
                    r"(?:true|false)_computation=%?([\w.\-]+)", i.attributes
                )
            )
            return [
                (
                    max(
                        map(self.visit, names),
                        key=lambda c: (c.flops, sum(c.sent.values())),
                    ),
                    1,
                )
            ]
        if i.op in ("fusion", "call", "async-start", "custom-call"):
            called = re.findall(
                r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)", i.attributes
            )
            return [
                (self.visit(name), 1) for name in called if name in self.computations
            ]
        return []


def _dot(i: Instruction, left: str) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    sizes = shapes(left)[0][1]
    dims = [int(d) for d in contracted.group(1).split(",") if d] if contracted else []
    return 2.0 * math.prod(shapes(i.shape)[0][1]) * math.prod(sizes[d] for d in dims)
