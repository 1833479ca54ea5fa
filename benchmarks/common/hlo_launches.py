"""Count what a compiled program executes: launches, flops, bytes and collectives, loops unrolled.

Counted on the text of the optimized HLO. A launch is an instruction of the schedule that computes, copies or sends: on
a GPU a kernel, on a TPU a step of the one program. An instruction inside of a loop counts as often as the loop runs
(XLA's own `cost_analysis` counts it once), and of a conditional the most expensive branch counts.
"""

import collections
import dataclasses
import math
import re

from benchmarks.common.hlo_text import Instruction, commas, parse, shapes, size

# Names and views cost nothing, nor do the ends of what is asynchronous.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "iota",
    "partition-id",
    "after-all",
    "opt-barrier",
    "async-update",
}

# The bytes that one of g devices sends, in units of its operand's bytes.
_SENT = {
    "all-gather": lambda g: g - 1,
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "ragged-all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
    "collective-broadcast": lambda g: 1,
}

# The type in which a product multiplies whose algorithm is given, by the first word of the algorithm.
_MULTIPLIED_IN = {"bf16": "bf16", "tf32": "f32 default", "f32": "f32 highest"}

_SLICES = ("slice", "dynamic-slice")
_ASYNCHRONOUS = ("copy-start", "slice-start")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One instruction of the schedule.

    Attributes:
      name: In the HLO.
      kind: Its opcode without "-start".
      count: How often it runs.
      flops: Two per multiply-add, of matrix products, by the type in which they are multiplied: "bf16", "f16", "f32
        highest", "f32 default" (TF32 on a GPU, one pass in bfloat16 on a TPU), or "symmetric" for a kernel that
        computes one triangle.
      result: The sizes of the first product's result, or None.
      moved: Bytes read from and written to main memory, each operand once.
      sent: Bytes that a collective sends from one device.
      asynchronous: Whether it is a copy that runs during what follows it.
      cycles: XLA's own estimate, on a TPU.
      kernel: What is compiled for it: equal for launches that can share it.
    """

    name: str
    kind: str
    count: int
    flops: dict[str, float]
    result: tuple[int, ...] | None
    moved: float
    sent: float
    asynchronous: bool
    cycles: int | None
    kernel: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether devices exchange something."""
        return self.kind in _SENT


def launches(
    text: str, devices: int = 1, unknown_trips: int | None = None
) -> list[Launch]:
    """The launches of a program, in the order of the text.

    Args:
      text: The optimized HLO, as `jax.jit(f).lower(...).compile().as_text()` gives it.
      devices: Number of devices, the size of a replica group that is not written out.
      unknown_trips: How often a loop runs if the compiler does not say so; None reads it off the loop's condition.

    Raises:
      ValueError: If the length of a loop with products or collectives can't be read.
    """
    program = _Program(text, devices, unknown_trips)
    return program.visit(program.entry, 1)


class _Program:
    def __init__(self, text: str, devices: int, unknown_trips: int | None):
        self.computations, self.entry = parse(text)
        self.devices = devices
        self.unknown_trips = unknown_trips

    def visit(self, name: str, times: int) -> list[Launch]:
        """The launches of a computation that runs so often."""
        result = []
        for i in self.computations[name].values():
            result += self._launches_of(i, name, times)
        return result

    def _launches_of(
        self, i: Instruction, computation: str, times: int
    ) -> list[Launch]:
        if i.op == "while":
            return self._loop(i, times)
        if i.op == "call":
            return self.visit(i.called("to_apply"), times)
        if i.op == "async-start" and i.called("calls"):
            return self.visit(i.called("calls"), times)
        if i.op == "conditional":
            branches = i.attribute(r"branch_computations=\{([^}]*)\}")
            names = re.findall(r"[\w.\-]+", branches or "")
            names = names or [
                i.called("true_computation"),
                i.called("false_computation"),
            ]
            return max((self.visit(name, times) for name in names), key=_cost)
        if i.op in _FREE or i.op.endswith("-done"):
            return []
        return [self._launch(i, computation, times)]

    def _loop(self, i: Instruction, times: int) -> list[Launch]:
        trips = i.attribute(r'"known_trip_count":\{"n":"(\d+)"') or self.unknown_trips
        if trips is None:
            trips = max(self._constants(i.called("condition")), default=None)
        if trips is not None:
            return self.visit(i.called("body"), times * int(trips))
        for launch in self.visit(i.called("body"), 1):
            if launch.flops or launch.is_collective:
                raise ValueError(
                    f"The length of the loop {i.name} is not known; give unknown_trips."
                )
        return []

    def _constants(self, name: str) -> list[int]:
        """The whole numbers that a condition compares with."""
        limits = []
        for i in self.computations[name].values():
            if i.op == "constant" and i.shape.startswith("s32[]"):
                limits.append(int(i.operands[0]))
            if i.called("calls"):
                limits += self._constants(i.called("calls"))
        return limits

    def _launch(self, i: Instruction, computation: str, times: int) -> Launch:
        products = self._products(i, computation)
        flops: dict[str, float] = collections.defaultdict(float)
        for kind, count, _ in products:
            flops[kind] += count
        operands = self._operand_shapes(i, computation)
        kind = i.op.removesuffix("-start")
        share = _SENT[kind](_group(i, self.devices)) if kind in _SENT else 0
        cycles = i.attribute(r'"estimated_cycles":"(\d+)"')
        return Launch(
            name=i.name,
            kind=kind,
            count=times,
            flops=dict(flops),
            result=products[0][2] if products else None,
            moved=self._moved(i, operands),
            sent=share * sum(map(size, operands)),
            asynchronous=i.op in _ASYNCHRONOUS,
            cycles=int(cycles) if cycles else None,
            kernel=self._kernel(i, computation),
        )

    def _operand_shapes(self, i: Instruction, computation: str) -> list[str]:
        """The shape of each operand; "" where it is no instruction, but a number or a value."""
        instructions = self.computations[computation]
        return [
            instructions[name].shape if name in instructions else ""
            for name in i.operands
        ]

    def _kernel(self, i: Instruction, computation: str) -> str:
        """The instruction, and what it calls, without names and origins."""
        origins = r"(, )?(metadata|control-predecessors)=\{[^}]*\}"
        attributes = re.sub(origins, "", i.attributes)
        operands = []
        operand_shapes = self._operand_shapes(i, computation)
        for shape, value in zip(operand_shapes, i.operands, strict=True):
            operands.append(shape or value)
        inside = []
        for name in re.findall(r"=%([\w.\-]+)", attributes):
            for k in self.computations.get(name, {}).values():
                inside.append(self._kernel(k, name))
        attributes = re.sub(r"=%[\w.\-]+", "", attributes)
        return str((i.op, i.shape, operands, attributes, inside))

    def _products(
        self, i: Instruction, computation: str
    ) -> list[tuple[str, float, tuple[int, ...]]]:
        """The matrix products of an instruction, those of a fusion too: type, flops and the result's sizes."""
        if i.op == "fusion":
            inner = i.called("calls")
            products = []
            for k in self.computations[inner].values():
                products += self._products(k, inner)
            return products
        operands = []
        for text in self._operand_shapes(i, computation):
            operands += shapes(text)
        target = i.attribute('custom_call_target="([^"]*)"') or ""
        if "mosaic_gpu" in target:
            # The first operand with three axes is [batch, m, k]. A kernel that says what it costs is believed.
            batch, m, k = next(sizes for _, sizes, _ in operands if len(sizes) == 3)
            cost = i.attribute(r'"cost_estimate":\{"flops":"?(\d+)')
            flops = float(cost or batch * m * (m + 128) * k)
            return [("symmetric", flops, (batch, m, m))]
        is_library = "gemm_backend_config" in i.attributes
        if not (is_library or i.op in ("dot", "convolution")):
            return []
        dtype, left, _ = operands[0]
        result = shapes(i.shape)[0][1]
        if i.op == "convolution":
            depth = _convolution_depth(i, left, result)
        else:
            contracted = i.numbers(r'lhs_contracting_dim(?:s=|ensions":)([{\[][^}\]]*)')
            depth = math.prod(left[axis] for axis in contracted)
        kind, products = _multiplied_in(dtype, i.attributes)
        return [(kind, 2.0 * products * math.prod(result) * depth, result)]

    def _moved(self, i: Instruction, operands: list[str]) -> float:
        """Bytes from and to main memory."""
        results = commas(i.shape.removeprefix("(").removesuffix(")"))
        if i.op in _ASYNCHRONOUS:
            # The result is (destination, source, semaphore), and one end may be on the chip.
            ends = _in_main_memory(results[0]), _in_main_memory(operands[0])
            return size(results[0]) * sum(map(bool, ends))
        if i.op == "custom-call":
            # A library's scratch space is no traffic that every byte of it makes.
            results = [result for result in results if not result.startswith("s8[")]
        written = sum(map(_in_main_memory, results))
        if i.op in _SLICES:
            return written + min(size(i.shape), _in_main_memory(operands[0]))
        if i.op == "dynamic-update-slice":
            return 2 * size(operands[1]) if written else 0
        if i.op == "fusion":
            body = self.computations[i.called("calls")]
            return _fusion_moved(body, operands, results)
        return written + sum(map(_in_main_memory, operands))


def _in_main_memory(shape: str) -> int:
    return size(shape, main_memory=True)


def _fusion_moved(
    body: dict[str, Instruction], operands: list[str], results: list[str]
) -> float:
    """Bytes from and to main memory; what a fusion only slices, or updates in place, counts by the slices."""
    moved = 0.0
    users = collections.defaultdict(list)
    for k in body.values():
        for position, name in enumerate(k.operands):
            users[name].append((k, position))
    for k in body.values():
        if k.op != "parameter":
            continue
        read = _in_main_memory(operands[int(k.operands[0])])
        uses = users[k.name]
        if uses and all(user.op in _SLICES for user, _ in uses):
            read = min(read, sum(size(user.shape) for user, _ in uses))
        elif uses and all(
            (user.op, position) == ("dynamic-update-slice", 0)
            for user, position in uses
        ):
            read = 0
        moved += read
    root = next(k for k in body.values() if k.root)
    made = [body[name] for name in root.operands] if root.op == "tuple" else [root]
    for shape, k in zip(results, made, strict=False):
        in_place = k.op == "dynamic-update-slice"
        written = body[k.operands[1]].shape if in_place else shape
        if _in_main_memory(shape):
            moved += size(written)
    return moved


def _cost(branch: list[Launch]) -> tuple[float, float]:
    """Flops and bytes, to compare branches."""
    flops = sum(launch.count * sum(launch.flops.values()) for launch in branch)
    return flops, sum(launch.count * launch.moved for launch in branch)


def _group(i: Instruction, devices: int) -> int:
    """How many devices exchange among each other."""
    if listed := i.numbers(r"replica_groups=\{\{([\d,]+)\}"):
        return len(listed)
    if iota := i.numbers(r"replica_groups=\[\d+,(\d+)\]<="):
        return iota[0]
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", i.attributes)
    if mesh is None:
        return devices
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh[2]))


def _multiplied_in(dtype: str, attributes: str) -> tuple[str, int]:
    """The type in which a product multiplies, and how many such products it takes."""
    algorithm = re.search(
        r"(?:algorithm=dot|ALG_DOT)_([a-z\d]+)\w*?(?:_x(\d))?\b", attributes, re.I
    )
    if algorithm and algorithm[1].lower() in _MULTIPLIED_IN:
        return _MULTIPLIED_IN[algorithm[1].lower()], int(algorithm[2] or 1)
    if dtype != "f32":
        return dtype, 1
    highest = "highest" in attributes or '"HIGHEST"' in attributes
    return ("f32 highest" if highest else "f32 default"), 1


def _convolution_depth(
    i: Instruction, left: tuple[int, ...], result: tuple[int, ...]
) -> int:
    """Multiply-adds for each entry of the result, of a product that the TPU's compiler wrote as a convolution."""
    of_left = i.attribute(r"dim_labels=(\w+)_\w+->") or ""
    of_result = i.attribute(r"dim_labels=\w+->(\w+)") or ""
    depth = left[of_left.index("f")]
    # A spatial axis that the result has as well is a batch axis of the product; one that it lacks is contracted.
    for axis in filter(str.isdigit, of_left):
        if result[of_result.index(axis)] == 1:
            depth *= left[of_left.index(axis)]
    return depth
