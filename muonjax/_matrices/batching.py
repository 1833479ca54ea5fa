"""Batch matrices of equal or neighboring shape, so that each group is compiled once.

A group is a list of arrays [batch_i, m, n_i] of one dtype whose matrices have the same m <= n_i (tall ones are
transposed). Where the policy says that it costs less than one more program, several n share one: on a CPU by blocks of
columns (`columns`); on a GPU those with fewer columns get columns of zeros, which stay zero. Arrays of a group are
stacked, on a CPU all of them, on an accelerator in parts that bound the memory: a large one stays alone and is never
copied. A loop goes over a stack in chunks and writes each chunk's result over its input: the extra memory is the stack
and one chunk's iteration, never a second stack.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._common.linalg import at_least_float32
from muonjax._common.platform import Policy
from muonjax._matrices.columns import Blocks, block_size
from muonjax._matrices.matrix_view import MatrixView
from pallas_kernels._platform import numbers_from_loop

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact

Function = Callable[..., jax.Array]
"""[*batch, m, n], and the mesh axes that shard the columns (default: none) -> the same shape and dtype."""


@dataclasses.dataclass(frozen=True)
class MatrixFunction:
    """A function of matrices f that can also go by blocks of columns, so that matrices of any widths are one stack.

    Attributes:
      whole: f, also with the mesh axes that shard the columns.
      in_blocks: f of a matrix by its transposed blocks; None: not so.
    """

    whole: Function
    in_blocks: Callable[[Blocks], Blocks] | None = None

    def __call__(self, x: jax.Array, axis_name: tuple[str, ...] = ()) -> jax.Array:
        """f(x), alone."""
        return self.whole(x, axis_name)


def map_leaves(
    f: Function | MatrixFunction,
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView],
    policy: Policy,
) -> list[jax.Array]:
    """f on each matrix that `views` show in these leaves, as `map_groups`."""
    matrices = [view.to_matrices(x) for view, x in zip(views, leaves, strict=True)]
    return [view.to_leaf(y) for view, y in zip(views, map_groups(f, matrices, policy), strict=True)]


def map_groups(
    f: Function | MatrixFunction, matrices: Sequence[Inexact[Array, "_batch _m _n"]], policy: Policy
) -> list[Inexact[Array, "_batch _m _n"]]:
    """f on each matrix, compiled once for each group.

    Args:
      f: [*batch, m, n] -> [*batch, m, n], each matrix on its own; f(x.mT) = f(x).mT, and columns of zeros stay zero.
      matrices: Matrices of any sizes.

    Returns:
      One array for each input, of the same shape and dtype.
    """
    results: list[jax.Array | None] = [None] * len(matrices)
    in_blocks = f.in_blocks if isinstance(f, MatrixFunction) else None
    groups = _with_neighbors(group_by_shape(matrices), matrices, policy, in_blocks is not None)
    stacks = [s for group in groups for s in _stacks(group, matrices, policy)]
    whole: Any = f.whole if isinstance(f, MatrixFunction) else f
    whole = whole if policy.is_cpu else jax.jit(whole)  # one trace for all stacks of a shape
    last: int | None = None
    for indices in stacks:
        parts = [matrices[i] for i in indices]
        if in_blocks and len({max(x.shape[-2:]) for x in parts}) > 1:
            tall = [x if _is_tall(x) else x.mT for x in parts]
            blocked = _map_in_blocks(in_blocks, whole, tall, policy.platform)
            found = [y if _is_tall(x) else y.mT for x, y in zip(parts, blocked, strict=True)]
        elif policy.is_cpu and any(map(_is_tall, parts)) and _chunk_size(parts, policy) == 1:
            found = _map_some_tall(whole, parts, policy.platform)
        else:
            if policy.one_stack_at_a_time and last is not None:
                # XLA keeps the previous stack in memory until its result is sliced and cast: do that before.
                parts, results[last] = jax.lax.optimization_barrier((parts, results[last]))
            stack, last = _map_stack(whole, _stacked(parts, policy), policy), indices[-1]
            wide = _unstacked(stack, [len(x) for x in parts], policy.platform)
            cut = [(x, y[..., : max(x.shape[-2:])]) for x, y in zip(parts, wide, strict=True)]
            found = [y.mT if _is_tall(x) else y for x, y in cut]
        for i, y in zip(indices, found, strict=True):
            results[i] = y
    return results  # pyright: ignore[reportReturnType]  # every index is in one group


def group_by_shape(matrices: Sequence[Inexact[Array, "_batch _m _n"]]) -> list[list[int]]:
    """Indices of the arrays that can share a loop: same (short side, long side, dtype), in first-seen order."""
    groups: dict[tuple, list[int]] = {}
    for index, x in enumerate(matrices):
        groups.setdefault((*sorted(x.shape[-2:]), x.dtype), []).append(index)
    return list(groups.values())


def _with_neighbors(
    groups: list[list[int]], matrices: Sequence[jax.Array], policy: Policy, in_blocks: bool
) -> list[list[int]]:
    """The groups, but one for several shapes of the same short side in blocks, or where columns of zeros cost little.

    Not for shapes on both sides of n = 1.5 m, where the Gram form begins: no matrix changes its form for its neighbors.
    """
    longer = [max(x.shape[-2:]) for x in matrices]
    sides: dict[tuple, list[list[int]]] = {}
    for group in sorted(groups, key=lambda group: longer[group[0]]):
        m, dtype = min(matrices[group[0]].shape[-2:]), matrices[group[0]].dtype
        sides.setdefault((m, longer[group[0]] > 1.5 * m, dtype), []).append(group)
    merged: list[list[int]] = []
    for (m, *_), side in sides.items():
        small = [i for i in itertools.chain(*side) if policy.chunk_size(2, (m, longer[i])) > 1]
        together = in_blocks and policy.goes_in_blocks(
            m, len(side), sum(len(matrices[i]) for i in small)
        )
        merged.append(side[0])
        for group in side[1:]:
            zeros = sum(len(matrices[i]) * (longer[group[0]] - longer[i]) for i in merged[-1])
            if together or policy.pads(m, zeros):
                merged[-1] = sorted(merged[-1] + group)
            else:
                merged.append(group)
    return sorted(merged)


def _stacks(group: list[int], matrices: Sequence[jax.Array], policy: Policy) -> list[list[int]]:
    """A group in parts, each one array or within the policy's bound; about equal ones, if unequal arrays allow it."""
    m, n = max(sorted(matrices[i].shape[-2:]) for i in group)
    sizes, bound, filled = {i: len(matrices[i]) * m * n for i in group}, policy.stack_elements, 0
    full: list[list[int]] = []
    for i, size in sizes.items():
        if not full or filled + size > bound:
            full.append([])
            filled = 0
        full[-1].append(i)
        filled += size
    even: list[list[int]] = [[] for _ in full]
    for i, end in zip(group, itertools.accumulate(sizes.values()), strict=True):
        even[(end - 1) * len(full) // sum(sizes.values())].append(i)
    fits = all(len(stack) == 1 or sum(sizes[i] for i in stack) <= bound for stack in even)
    return [stack for stack in even if stack] if fits else full


def _stacked(parts: Sequence[jax.Array], policy: Policy) -> Inexact[Array, "count m n"]:
    """Some of the matrices, wide, as one array; columns of zeros where they have fewer than others."""
    longest = max(max(part.shape[-2:]) for part in parts)

    def padded(part: jax.Array, axis: int) -> jax.Array:
        zeros = longest - part.shape[axis]
        return jnp.pad(part, [(0, zeros * (i == axis)) for i in range(3)]) if zeros else part

    if policy.platform == "gpu" and all(map(_is_tall, parts)):
        # As one: XLA reads a stack either way, and writes each transposed part. 10 % of 2 leaves of 64 x 512 x 128.
        return jnp.concatenate([padded(part, 1) for part in parts]).mT
    parts = [padded(part.mT if _is_tall(part) else part, 2) for part in parts]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _map_some_tall(f: Function, parts: Sequence[jax.Array], platform: str) -> list[jax.Array]:
    """f of each matrix of one shape or its transpose, transposed one after the other; tall ones come first.

    A transpose alone has a fast kernel, and a branch leaves it alone. XLA would make it a part of what makes the stack,
    entry by entry, if it knew the first wide number; and that of a plain matrix, without an axis before it, a layout.
    """
    m, n = sorted(parts[0].shape[1:])
    order = sorted(range(len(parts)), key=lambda i: not _is_tall(parts[i]))
    counts, tall = [len(parts[i]) for i in order], sum(len(x) for x in parts if _is_tall(x))
    _, first_wide = numbers_from_loop((0, tall), platform)

    def one(x, step):
        wide = [lambda x: x.reshape(1, n, m).mT.reshape(m, n), lambda x: x.reshape(m, n)]
        back = [lambda y: y.mT.reshape(-1), lambda y: y.reshape(-1)]
        return jax.lax.cond(step < first_wide, *back, f(jax.lax.cond(step < first_wide, *wide, x)))

    stack = _map_chunks(one, jnp.concatenate([parts[i].reshape(-1, m * n) for i in order]))
    found = dict(zip(order, _unstacked(stack, counts, platform), strict=True))
    return [found[i].reshape(x.shape) for i, x in enumerate(parts)]


def _map_in_blocks(
    f: Callable[[Blocks], Blocks],
    alone: Function,
    tall: Sequence[Inexact[Array, "_batch _n m"]],
    platform: str,
) -> list[Inexact[Array, "_batch _n m"]]:
    """A function of each of these matrices, in float32 or wider.

    Args:
      f: The function, of blocks [n, m] as the matrices'.
      alone: The function of an array of matrices, for derivatives: a loop of any length has none in reverse mode.
      tall: Matrices [batch, n, m] of one dtype.
      platform: The platform of the device.
    """
    m, lengths = tall[0].shape[-1], [x.shape[1] for x in tall]
    size = block_size([(len(x), x.shape[1]) for x in tall], m)
    numbers = [-(-n // size) for n in lengths]
    each = np.repeat(numbers, [len(x) for x in tall]).astype(np.int32)
    stops = np.cumsum(each, dtype=np.int32)

    def together(*tall: jax.Array) -> list[jax.Array]:
        zeros = [[(0, 0), (0, -n % size), (0, 0)] for n in lengths]
        parts = [jnp.pad(x, z).reshape(-1, size * m) for x, z in zip(tall, zeros, strict=True)]

        def body(i, blocks):
            stop = jnp.asarray(stops)[i]
            return f(
                Blocks(blocks, (size, m), max(lengths), stop - jnp.asarray(each)[i], stop)
            ).blocks

        blocks = jnp.concatenate(parts).astype(at_least_float32(parts[0].dtype))
        blocks = jax.lax.fori_loop(0, len(each), body, blocks)
        results = zip(
            tall, _unstacked(blocks, [len(part) for part in parts], platform), strict=True
        )
        return [y.reshape(len(x), -1, m)[:, : x.shape[1]].astype(x.dtype) for x, y in results]

    function = jax.custom_jvp(together)
    function.defjvp(lambda x, dx: jax.jvp(lambda *tall: [alone(x) for x in tall], x, dx))
    return function(*tall)


def _map_stack(
    f, stack: Inexact[Array, "count m n"], policy: Policy
) -> Inexact[Array, "count m n"]:
    chunks = _chunks(stack, policy)
    one = len(chunks) == 1
    return (f(chunks[0]) if one else _map_chunks(lambda x, _: f(x), chunks)).reshape(stack.shape)


def _map_chunks(f: Callable[[jax.Array, Any], jax.Array], chunks: jax.Array) -> jax.Array:
    """f of each chunk and its number, in the chunk's place."""

    def body(step, chunks):
        chunk = jax.lax.dynamic_index_in_dim(
            chunks, step, keepdims=False, allow_negative_indices=False
        )
        y = f(chunk, step)
        return jax.lax.dynamic_update_index_in_dim(chunks, y, step, 0, allow_negative_indices=False)

    return jax.lax.fori_loop(0, len(chunks), body, chunks)


def _chunks(
    stack: Inexact[Array, "count m n"], policy: Policy
) -> Inexact[Array, "number *chunk m n"]:
    size = _chunk_size([stack], policy)
    # One matrix goes without a batch axis: products of batches of one take a slower way through XLA on a CPU.
    return stack if size == 1 else stack.reshape(-1, size, *stack.shape[1:])


def _chunk_size(parts: Sequence[jax.Array], policy: Policy) -> int:
    m, n = sorted(parts[0].shape[1:])
    return policy.chunk_size(sum(map(len, parts)), (m, n))


def _unstacked(stack: jax.Array, counts: Sequence[int], platform: str) -> list[jax.Array]:
    """A stack in parts, so many entries each."""
    starts = numbers_from_loop([0, *itertools.accumulate(counts[:-1])], platform)
    parts = zip(starts, counts, strict=True)
    return [jax.lax.dynamic_slice_in_dim(stack, *p) for p in parts] if len(counts) > 1 else [stack]


def _is_tall(x: Inexact[Array, "*batch m n"]) -> bool:
    return x.shape[-2] > x.shape[-1]
