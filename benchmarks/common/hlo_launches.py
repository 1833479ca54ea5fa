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
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "iota",
        "partition-id",
    ),
    *("after-all", "opt-barrier", "async-update"),
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

# Which products, and how many, a product of float32 operands takes if its algorithm is given.
_ALGORITHMS = {
    "bf16_bf16_f32": ("bf16", 1),
    "bf16_bf16_f32_x3": ("bf16", 3),
    "bf16_bf16_f32_x6": ("bf16", 6),
    "bf16_bf16_f32_x9": ("bf16", 9),
    "tf32_tf32_f32": ("f32 default", 1),
    "tf32_tf32_f32_x3": ("f32 default", 3),
    "f32_f32_f32": ("f32 highest", 1),
}


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
        self.devices, self.unknown_trips = devices, unknown_trips

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
            listed = i.attribute(r"branch_computations=\{([^}]*)\}")
            either = re.findall(
                r"(?:true|false)_computation=%?([\w.\-]+)", i.attributes
            )
            names = re.findall(r"[\w.\-]+", listed) if listed else either
            return max((self.visit(name, times) for name in names), key=_cost)
        if i.op in _FREE or i.op.endswith("-done"):
            return []
        return [self._launch(i, computation, times)]

    def _loop(self, i: Instruction, times: int) -> list[Launch]:
        trips = i.attribute(r'"known_trip_count":\{"n":"(\d+)"') or self.unknown_trips
        if trips is None:
            limits = self._constants(i.called("condition"))
            trips = max(limits, default=None)
        if trips is not None:
            return self.visit(i.called("body"), times * int(trips))
        if any(
            launch.flops or launch.is_collective
            for launch in self.visit(i.called("body"), 1)
        ):
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
            asynchronous=i.op in ("copy-start", "slice-start"),
            cycles=int(cycles) if cycles else None,
            kernel=self._kernel(i, computation),
        )

    def _operand_shapes(self, i: Instruction, computation: str) -> list[str]:
        instructions = self.computations[computation]
        return [
            instructions[name].shape if name in instructions else ""
            for name in i.operands
        ]

    def _kernel(self, i: Instruction, computation: str) -> str:
        """The instruction, and what it calls, without names and origins."""
        attributes = re.sub(
            r"(, )?(metadata=\{[^}]*\}|control-predecessors=\{[^}]*\})",
            "",
            i.attributes,
        )
        shapes_or_values = [
            shape or name
            for shape, name in zip(
                self._operand_shapes(i, computation), i.operands, strict=True
            )
        ]
        inside = []
        for name in re.findall(r"=%([\w.\-]+)", attributes):
            for k in self.computations.get(name, {}).values():
                inside.append(self._kernel(k, name))
        attributes = re.sub(r"=%[\w.\-]+", "", attributes)
        return str((i.op, i.shape, shapes_or_values, attributes, inside))

    def _products(
        self, i: Instruction, computation: str
    ) -> list[tuple[str, float, tuple[int, ...]]]:
        """The matrix products of an instruction, those of a fusion too: type, flops and the result's sizes."""
        if i.op == "fusion":
            inner, products = i.called("calls"), []
            for k in self.computations[inner].values():
                products += self._products(k, inner)
            return products
        operands = [
            array
            for text in self._operand_shapes(i, computation)
            for array in shapes(text)
        ]
        if i.op == "custom-call" and "mosaic_gpu" in (
            i.attribute('target="([^"]*)"') or ""
        ):
            # The first operand with three axes is [batch, m, k]. A kernel that says what it costs is believed.
            batch, m, k = next(sizes for _, sizes, _ in operands if len(sizes) == 3)
            cost = i.attribute(r'"cost_estimate":\{"flops":"?(\d+)')
            return [
                ("symmetric", float(cost or batch * m * (m + 128) * k), (batch, m, m))
            ]
        if not (
            i.op in ("dot", "convolution") or "gemm_backend_config" in i.attributes
        ):
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
        if i.op in ("copy-start", "slice-start"):  # (destination, source, semaphore)
            ends = results[0], operands[0]
            return size(results[0]) * sum(
                bool(size(end, main_memory=True)) for end in ends
            )
        # A library's scratch space is no traffic that every byte of it makes.
        results = [
            r for r in results if not (i.op == "custom-call" and r.startswith("s8["))
        ]
        written = sum(size(result, main_memory=True) for result in results)
        if i.op in ("slice", "dynamic-slice"):
            return written + min(size(i.shape), size(operands[0], main_memory=True))
        if i.op == "dynamic-update-slice":
            return 2 * size(operands[1]) if written else 0
        if i.op == "fusion":
            return self._fusion_moved(
                self.computations[i.called("calls")], operands, results
            )
        return written + sum(size(operand, main_memory=True) for operand in operands)

    def _fusion_moved(
        self, body: dict[str, Instruction], operands: list[str], results: list[str]
    ) -> float:
        """As `_moved`; what a fusion only slices, or updates in place, counts by the slices."""
        moved = 0.0
        users = collections.defaultdict(list)
        for k in body.values():
            for position, name in enumerate(k.operands):
                users[name].append((k, position))
        for k in body.values():
            if k.op != "parameter":
                continue
            read = size(operands[int(k.operands[0])], main_memory=True)
            uses = users[k.name]
            if uses and all(user.op in ("slice", "dynamic-slice") for user, _ in uses):
                read = min(read, sum(size(user.shape) for user, _ in uses))
            elif uses and all(
                (user.op, at) == ("dynamic-update-slice", 0) for user, at in uses
            ):
                read = 0
            moved += read
        root = next(k for k in body.values() if k.root)
        made = [body[name] for name in root.operands] if root.op == "tuple" else [root]
        for shape, k in zip(results, made, strict=False):
            updated = (
                body[k.operands[1]].shape if k.op == "dynamic-update-slice" else shape
            )
            moved += size(updated) if size(shape, main_memory=True) else 0
        return moved


def _cost(branch: list[Launch]) -> tuple[float, float]:
    flops = sum(launch.count * sum(launch.flops.values()) for launch in branch)
    return flops, sum(launch.count * launch.moved for launch in branch)


def _group(i: Instruction, devices: int) -> int:
    """How many devices exchange among each other."""
    if listed := i.numbers(r"replica_groups=\{\{([\d,]+)\}"):
        return len(listed)
    if iota := i.numbers(r"replica_groups=\[\d+,(\d+)\]<="):
        return iota[0]
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", i.attributes
    ):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh[2]))
    return devices


def _multiplied_in(dtype: str, attributes: str) -> tuple[str, int]:
    """The type in which a product multiplies, and how many such products it takes."""
    algorithm = re.search(
        r'algorithm=dot_(\w+)|"algorithm":"ALG_DOT_(\w+)"', attributes
    )
    name = (algorithm[1] or algorithm[2]).lower() if algorithm else ""
    if name in _ALGORITHMS:
        return _ALGORITHMS[name]
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
