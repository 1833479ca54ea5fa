"""Count what a program compiled for an accelerator executes: launches, flops and bytes, loops unrolled.

Counted on the text of the optimized HLO. A launch is an instruction of the schedule that computes or copies: on a
GPU a kernel, on a TPU a step of the one program. An instruction inside of a loop counts as often as the loop runs.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import re

from benchmarks.common.hlo_text import (
    Instruction,
    commas,
    parse,
    shapes,
    size,
    source_frames,
)

# What costs nothing of its own: names, views, the ends of asynchronous copies.
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
    *(
        "after-all",
        "opt-barrier",
        "async-update",
        "async-done",
        "copy-done",
        "slice-done",
    ),
}

# How many products of which type stand behind a product of float32 operands with an algorithm of its own.
_ALGORITHMS = {
    "bf16_bf16_f32": ("bf16", 1),
    "bf16_bf16_f32_x3": ("bf16", 3),
    "bf16_bf16_f32_x6": ("bf16", 6),
    "bf16_bf16_f32_x9": ("bf16", 9),
    "tf32_tf32_f32": ("f32 default", 1),
    "tf32_tf32_f32_x3": ("f32 default", 3),
    "f32_f32_f32": ("f32 highest", 1),
}

# Files of pallas_kernels whose launches compute one triangle of a symmetric product.
_SYMMETRIC_KERNELS = ("_mosaic_gpu",)

# Calls of libraries that factorize or solve: far from a roofline, so the model counts them by name.
_FACTORIZATIONS = re.compile(
    r"potrf|cholesky|triangular|trsm|geqrf|syev|gesvd|getrf", re.I
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One instruction of the schedule.

    Attributes:
      name: In the HLO.
      kind: Its opcode, or the target of a custom call.
      count: How often it runs.
      flops: Two per multiply-add, of matrix products, by the type in which they are multiplied: "bf16", "f16", "f32
        highest", "f32 default" (TF32 on a GPU, one pass in bfloat16 on a TPU), or "symmetric" for a kernel that
        computes one triangle.
      results: The sizes of the products' results.
      moved: Bytes read from and written to main memory, each operand once.
      asynchronous: Whether it runs beside what follows it.
      cycles: XLA's own estimate, on a TPU.
      kernel: What is compiled for it: equal for launches that can share it.
    """

    name: str
    kind: str
    count: int
    flops: dict[str, float]
    results: tuple[tuple[int, ...], ...]
    moved: float
    asynchronous: bool
    cycles: int | None
    kernel: str = ""

    @property
    def factorization(self) -> bool:
        """Whether a library's factorization or solve."""
        return bool(_FACTORIZATIONS.search(self.kind))


def launches(text: str) -> list[Launch]:
    """The launches of a program, in the order of the text.

    Args:
      text: The optimized HLO, as `jax.jit(f).lower(...).compile().as_text()` gives it.

    Raises:
      ValueError: If the length of a loop can't be read.
    """
    walk = _Walk(text)
    return walk.visit(walk.entry, 1)


class _Walk:
    def __init__(self, text: str):
        self.computations, self.entry = parse(text)
        self.frames = source_frames(text)
        self.by_name = {
            name: {i.name: i for i in instructions}
            for name, instructions in self.computations.items()
        }

    def visit(self, name: str, times: int) -> list[Launch]:
        """Of a computation that runs so often."""
        return [
            launch
            for i in self.computations[name]
            for launch in self._launches_of(i, name, times)
        ]

    def _launches_of(
        self, i: Instruction, computation: str, times: int
    ) -> list[Launch]:
        if i.op == "while":
            return self.visit(_required(i, "body"), times * self._trips(i))
        if i.op == "call" or (i.op == "async-start" and i.called("calls")):
            return self.visit(
                _required(i, "to_apply" if i.op == "call" else "calls"), times
            )
        if i.op == "conditional":
            branches = [self.visit(branch, times) for branch in _branches(i)]
            return max(
                branches,
                key=lambda branch: sum(
                    launch.moved * launch.count for launch in branch
                ),
            )
        return [] if i.op in _FREE else [self._launch(i, computation, times)]

    def _trips(self, i: Instruction) -> int:
        """How often a loop runs: as XLA knows it, else the largest constant that its condition compares with."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes):
            return int(known.group(1))
        pending, limits = [_required(i, "condition")], []
        while pending:
            for inner in self.computations[pending.pop()]:
                if inner.op == "constant" and inner.shape.startswith("s32[]"):
                    limits.append(int(inner.operands[0]))
                if called := inner.called("calls"):
                    pending.append(called)
        if not limits:
            raise ValueError(
                f"The loop {i.name} has no length that can be read off its condition."
            )
        return max(limits)

    def _launch(self, i: Instruction, computation: str, times: int) -> Launch:
        flops: collections.Counter[str] = collections.Counter()
        results: list[tuple[int, ...]] = []
        self._products(i, computation, flops, results)
        cycles = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
        target = re.search(r'custom_call_target="([^"]+)"', i.attributes)
        return Launch(
            name=i.name,
            kind=target.group(1) if target else i.op,
            count=times,
            flops=dict(flops),
            results=tuple(results),
            moved=self._moved(i, computation),
            asynchronous=i.op in ("copy-start", "slice-start"),
            cycles=int(cycles.group(1)) if cycles else None,
            kernel=self._kernel(i, computation),
        )

    def _kernel(self, i: Instruction, computation: str) -> str:
        """The instruction, and what it calls, without names and origins."""
        attributes = re.sub(
            r"(, )?(metadata=\{[^}]*\}|control-predecessors=\{[^}]*\})",
            "",
            i.attributes,
        )
        operands = [
            self._shape(computation, operand) or operand for operand in i.operands
        ]
        called = [
            name
            for name in re.findall(r"=%([\w.\-]+)", attributes)
            if name in self.computations
        ]
        inside = [
            self._kernel(k, name) for name in called for k in self.computations[name]
        ]
        return str(
            (i.op, i.shape, operands, re.sub(r"=%[\w.\-]+", "", attributes), inside)
        )

    def _products(self, i: Instruction, computation: str, flops, results) -> None:
        """Adds the matrix products of an instruction, those of a fusion too."""
        if i.op == "fusion":
            inner = _required(i, "calls")
            for k in self.computations[inner]:
                self._products(k, inner, flops, results)
            return
        left = functools.partial(self._shape, computation)
        if i.op == "dot":
            operand = shapes(left(i.operands[0]))[0]
            dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
            depth = (
                math.prod(operand[1][int(d)] for d in dims.group(1).split(",") if d)
                if dims
                else 1
            )
        elif i.op == "convolution":
            operand = shapes(left(i.operands[0]))[0]
            depth = _convolution_depth(i, operand[1], shapes(i.shape)[0][1])
        elif i.op == "custom-call" and "gemm_backend_config" in i.attributes:
            operand = shapes(left(i.operands[0]))[0]
            dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
            depth = (
                math.prod(operand[1][int(d)] for d in re.findall(r"\d+", dims.group(1)))
                if dims
                else 1
            )
        elif i.op == "custom-call" and self._is_symmetric_kernel(i):
            # [batch, m, k], the first operand with three axes. A kernel that says what it costs is believed.
            operand = next(
                s for o in i.operands for s in shapes(left(o)) if len(s[1]) == 3
            )
            batch, m, k = operand[1]
            said = re.search(r'"cost_estimate":\{"flops":"?(\d+)', i.attributes)
            results.append((batch, m, m))
            flops["symmetric"] += (
                float(said.group(1)) if said else batch * m * (m + 128.0) * k
            )
            return
        else:
            return
        result = shapes(i.shape)[0][1]
        kind, products = _multiplied_in(operand[0], i.attributes)
        flops[kind] += 2.0 * products * math.prod(result) * depth
        results.append(result)

    def _is_symmetric_kernel(self, i: Instruction) -> bool:
        return any(
            pathlib.PurePath(file).stem in _SYMMETRIC_KERNELS
            for file, _ in self.frames(i.attributes)
        )

    def _shape(self, computation: str, operand: str) -> str:
        found = self.by_name[computation].get(operand.split(" ")[-1].lstrip("%"))
        return found.shape if found else ""

    def _moved(self, i: Instruction, computation: str) -> float:
        """Bytes from and to main memory."""
        bytes_of = functools.partial(size, main_memory=True)
        results = (
            commas(i.shape) if not i.shape.startswith("(") else commas(i.shape[1:-1])
        )
        # A library's scratch space is no traffic that every byte of it makes.
        results = [
            r for r in results if not (i.op == "custom-call" and r.startswith("s8["))
        ]
        if i.op in ("copy-start", "slice-start"):  # (destination, source, semaphore)
            source = self._shape(computation, i.operands[0])
            length = size(results[0])
            return sum(length for end in (results[0], source) if bytes_of(end))
        written = sum(map(bytes_of, results))
        operands = [self._shape(computation, operand) for operand in i.operands]
        if i.op in ("slice", "dynamic-slice"):
            return written + min(size(i.shape), bytes_of(operands[0]))
        if i.op == "dynamic-update-slice":
            return 2 * size(operands[1]) if bytes_of(i.shape) else 0
        if i.op != "fusion":
            return written + sum(map(bytes_of, operands))
        return self._fusion_moved(i, operands, results)

    def _fusion_moved(
        self, i: Instruction, operands: list[str], results: list[str]
    ) -> float:
        """As `_moved`; what a fusion only slices, or updates in place, counts by the slices."""
        body = self.computations[_required(i, "calls")]
        names = self.by_name[_required(i, "calls")]
        moved = 0.0
        users = collections.defaultdict(list)
        for k in body:
            for position, operand in enumerate(k.operands):
                users[operand.lstrip("%")].append((k, position))
        for parameter in (k for k in body if k.op == "parameter"):
            shape = operands[int(parameter.operands[0])]
            read = size(shape, main_memory=True)
            own = users[parameter.name]
            if own and all(k.op in ("slice", "dynamic-slice") for k, _ in own):
                read = min(read, sum(size(k.shape) for k, _ in own))
            elif own and all(
                k.op == "dynamic-update-slice" and position == 0 for k, position in own
            ):
                read = 0
            moved += read
        root = next(k for k in body if k.root)
        made = (
            [names.get(operand.lstrip("%")) for operand in root.operands]
            if root.op == "tuple"
            else [root]
        )
        for shape, k in zip(results, made, strict=False):
            if size(shape, main_memory=True):
                updated = k is not None and k.op == "dynamic-update-slice"
                moved += (
                    size(names[k.operands[1].lstrip("%")].shape)
                    if updated
                    else size(shape)
                )
        return moved


def _required(i: Instruction, key: str) -> str:
    name = i.called(key)
    if name is None:
        raise ValueError(f"{i.op} {i.name} names no {key}.")
    return name


def _branches(i: Instruction) -> list[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", i.attributes):
        return [name.strip().lstrip("%") for name in listed.group(1).split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", i.attributes)


def _multiplied_in(dtype: str, attributes: str) -> tuple[str, int]:
    """The type in which a product multiplies, and how many such products it takes."""
    if named := re.search(
        r'algorithm=dot_(\w+)|"algorithm":"ALG_DOT_(\w+)"', attributes
    ):
        algorithm = (named.group(1) or named.group(2)).lower()
        if algorithm in _ALGORITHMS:
            return _ALGORITHMS[algorithm]
    if dtype != "f32":
        return dtype, 1
    highest = "highest" in attributes or '"HIGHEST"' in attributes
    return ("f32 highest" if highest else "f32 default"), 1


def _convolution_depth(
    i: Instruction, left: tuple[int, ...], result: tuple[int, ...]
) -> int:
    """Multiply-adds for each entry of the result, of a product that the TPU's compiler wrote as a convolution."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        raise ValueError(f"convolution {i.name} has no dim_labels.")
    of_left, _, of_result = labels.groups()
    depth = left[of_left.index("f")]
    # A spatial axis that the result has as well is a batch axis of the product; one that it lacks is contracted.
    for axis in filter(str.isdigit, of_left):
        if result[of_result.index(axis)] == 1:
            depth *= left[of_left.index(axis)]
    return depth


def repeated(launch: Launch, times: int) -> Launch:
    """The launch of a program that runs so often."""
    return dataclasses.replace(launch, count=launch.count * times)
