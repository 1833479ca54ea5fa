"""Batch matrices of equal or neighboring shape, so that each group is compiled once.

A group holds arrays [batch, m, n] of one dtype whose matrices have the same m <= n. (`map_leaves`
transposes tall ones.) Several n share a program where the policy says that this costs less than one
more program: the narrower matrices get columns of zeros, which stay zero.

The arrays of a group are stacked, on a CPU all of them, on an accelerator in parts that bound the
memory: a large array stays alone and is never copied. A loop goes over a stack in chunks and writes
each chunk's result over its input. The extra memory is the stack and the iteration of one chunk,
never a second stack.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from muonjax._common.linalg import entry, with_entry
from muonjax._common.platform_policy import Policy
from muonjax._matrices.matrix_view import MatrixView
from pallas_kernels._xla_workarounds import numbers_from_loop

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact


@dataclasses.dataclass(frozen=True)
class Function:
    """A function f of matrices, and which matrices may share a program of it.

    Attributes:
      whole: [*batch, m, n] -> the same shape and dtype.
      form: (m, n) -> the form of f for m x n matrices; only those of one form share a program.
      exchange_dtype: The dtype of a matrix -> the dtype in which a mesh sends it to its owner and
        back.
    """

    whole: Callable[[jax.Array], jax.Array]
    form: Callable[[int, int], Hashable] = lambda m, n: None
    exchange_dtype: Callable[[jnp.dtype], jnp.dtype] = lambda dtype: dtype


def map_leaves(
    f: Function,
    leaves: Sequence[jax.Array],
    views: Sequence[MatrixView],
    policy: Policy,
) -> list[jax.Array]:
    """The leaves with f of each matrix that `views` show in them; f(x.mT) = f(x).mT,
    so tall ones are transposed before f and after it."""
    # The stack of matrices is transposed here, and not the leaf, as by `view.wide`: there XLA for a
    # CPU sums in another order if a tall matrix is alone in its leaf, and the last bits differ from
    # those of the same matrix in a stack.
    matrices = []
    for view, leaf in zip(views, leaves, strict=True):
        x = view.to_matrices(leaf)
        matrices.append(x.mT if view.is_tall else x)
    outputs = []
    results = map_groups(f, matrices, policy)
    for view, y in zip(views, results, strict=True):
        outputs.append(view.to_leaf(y.mT if view.is_tall else y))
    return outputs


def map_groups(
    f: Function, matrices: Sequence[Inexact[Array, "_batch _m _n"]], policy: Policy
) -> list[Inexact[Array, "_batch _m _n"]]:
    """f of each matrix, compiled once for each group.

    A group is the arrays that share a program, and a stack is as much of it as runs at once.

    Args:
      f: Its `whole` maps [*batch, m, n] to the same shape, each matrix by itself;
        columns of zeros stay zero.
      matrices: Arrays of matrices with m <= n.
      policy: The policy for the device.

    Returns:
      One array for each input, of the same shape and dtype.
    """
    results: list[Any] = [None] * len(matrices)
    if not policy.is_cpu:
        # On an accelerator a group may be several stacks (`_stacks`), and `jit` traces f once for
        # all of one shape. On a CPU a group is one stack, and nothing would be traced twice.
        f = dataclasses.replace(f, whole=jax.jit(f.whole))
    # Each stack is a list of indices of `matrices`.
    stacks = []
    for group in _groups(f, matrices, policy):
        stacks += _stacks(group, matrices, policy)
    # The index of the previous stack's last array, whose result the next stack waits for
    previous = None
    for indices in stacks:
        parts = [matrices[i] for i in indices]
        if policy.one_stack_at_a_time and previous is not None:
            # XLA keeps a stack in memory until its results are cut out of it and cast. Its
            # scheduler for GPUs would begin the next stacks before, and keep several. So the arrays
            # of this stack wait for the last result of the previous one, which is cut out together
            # with the others. What uses that result later gets it from the barrier too: else XLA
            # could cut it out there once more, and keep the previous stack until then.
            waiting = parts, results[previous]
            parts, results[previous] = jax.lax.optimization_barrier(waiting)
        outputs = _map_stack(f, parts, policy)
        for i, output in zip(indices, outputs, strict=True):
            results[i] = output
        previous = indices[-1]
    return results


def _map_stack(f: Function, parts: list[jax.Array], policy: Policy) -> list[jax.Array]:
    """f of each of the arrays [count, m, n] that share a program: of one dtype and m, and any n.

    Returns one array for each, of its shape. On the way narrower ones have columns of zeros, which
    stay zero under f.
    """
    # All have one m, so the largest shape has the largest n.
    m, n = max(x.shape[1:] for x in parts)
    # Small matrices run in chunks of `size`, which divides their number;
    # large ones one after the other, with a size of 1.
    counts = list(map(len, parts))
    size = policy.chunk_size(sum(counts), (m, n))
    # All matrices as one array [matrices, m, n], with columns of zeros up to n
    stack = _stacked(parts, n)
    # [chunks, size, m, n], or for a size of 1 [chunks, m, n]:
    # XLA for CPUs multiplies batches of one in a slower way.
    chunks = stack if size == 1 else stack.reshape(-1, size, m, n)

    if len(chunks) == 1:
        # A loop of one step would still be compiled as a loop.
        chunks = f.whole(chunks[0])
    else:

        def body(i, chunks):
            """The chunks with f of chunk i in its place: the results need no second stack."""
            return with_entry(chunks, i, f.whole(entry(chunks, i)))

        chunks = jax.lax.fori_loop(0, len(chunks), body, chunks)
    # The arrays again, `counts` matrices each
    outputs = _unstacked(chunks.reshape(stack.shape), counts, policy.platform)
    results = []
    for x, y in zip(parts, outputs, strict=True):
        # The columns of zeros go.
        results.append(y[..., : x.shape[2]])
    return results


def _groups(
    f: Function, matrices: Sequence[jax.Array], policy: Policy
) -> list[list[int]]:
    """Indices of the arrays that share a program: those of one shape, and their neighbors.

    Neighbors have the same short side, dtype and form of f, and share a program where the columns
    of zeros that the narrower ones need cost less than another program. Matrices [768, 768],
    [768, 3072], [768, 3072] (once a tall one) and [768, 2304] make [[0], [1, 2, 3]],
    if f takes the Gram form for n > 1.5 m.
    """
    # (m, form, dtype) -> n -> the indices of the arrays with these. The last three matrices of the
    # example are {(768, True, "float32"): {3072: [1, 2], 2304: [3]}},
    # where True means the Gram form.
    neighbors: dict[tuple, dict[int, list[int]]] = {}
    for i, x in enumerate(matrices):
        _, m, n = x.shape
        in_common = m, f.form(m, n), x.dtype.name
        by_columns = neighbors.setdefault(in_common, {})
        by_columns.setdefault(n, []).append(i)

    groups = []
    for (m, _, _), by_columns in neighbors.items():
        group = []
        # The fewest columns first. The arrays with n columns join the group before them, if the
        # zeros that fill its matrices up to n columns cost little; else they begin a new one.
        for n, indices in sorted(by_columns.items()):
            columns_of_zeros = 0
            for i in group:
                count, _, columns = matrices[i].shape
                columns_of_zeros += count * (n - columns)
            if group and not policy.pads(m, columns_of_zeros):
                groups.append(group)
                group = []
            group += indices
        groups.append(group)
    # In the order of the arrays again, not in that of columns and forms
    return sorted(map(sorted, groups))


def _stacks(
    group: list[int], matrices: Sequence[jax.Array], policy: Policy
) -> list[list[int]]:
    """The indices of a group in parts, each of a single array or of several within the policy's
    bound of elements; about equal, if the arrays allow it.

    With a bound of three matrices, four arrays of one matrix each make stacks of two and two;
    arrays of four, one and one make stacks of four and two.
    """
    # All have one m, so the largest shape has the largest n. The others get columns of zeros.
    m, n = max(matrices[i].shape[1:] for i in group)
    elements = {i: len(matrices[i]) * m * n for i in group}
    total = sum(elements.values())
    # The bound asks for at least total / bound stacks, and equal ones have this share of the
    # elements each. On a CPU it is infinite: the quotient is 0, and all is one stack.
    bound = policy.stack_elements
    share = total / max(1, math.ceil(total / bound))
    stacks = []
    filled = 0
    for i, size in elements.items():
        if not stacks or filled >= share or filled + size > bound:
            stacks.append([])
            filled = 0
        stacks[-1].append(i)
        filled += size
    return stacks


def _stacked(parts: Sequence[jax.Array], n: int) -> Inexact[Array, "count m n"]:
    """The matrices of several arrays of one m as one array;
    those with fewer than n columns get columns of zeros."""
    padded = []
    for x in parts:
        missing = n - x.shape[2]
        if missing:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)))
        padded.append(x)
    # JAX returns a single array as it is, and does not copy it.
    return jnp.concatenate(padded)


def _unstacked(
    stack: jax.Array, counts: Sequence[int], platform: str
) -> list[jax.Array]:
    """A stack in parts of so many entries: the inverse of a concatenation."""
    if len(counts) == 1:
        return [stack]
    # Part i begins after the parts before it: counts of 12, 12 and 36 begin at 0, 12 and 24. If XLA
    # for a CPU knew these numbers, it would compile a kernel for each slice.
    starts = numbers_from_loop([0, *itertools.accumulate(counts[:-1])], platform)
    parts = []
    for start, count in zip(starts, counts, strict=True):
        parts.append(jax.lax.dynamic_slice_in_dim(stack, start, count))
    return parts
