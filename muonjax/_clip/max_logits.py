"""The largest attention logit of each head, block by block: the statistic that QK-Clip acts on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muonjax._common.arguments import (
    check_flag,
    check_range,
    errors_of,
    shown,
    whole_number,
)
from muonjax._common.linalg import at_least_float32

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32


def max_logits(
    query: Float[Array, "*batch T heads D"],
    key: Float[Array, "*batch S key_heads D"],
    *,
    mask: jax.Array | None = None,  # broadcastable to [*batch, heads, T, S]
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    scale: float | None = None,
    block: int = 512,
) -> Float[Array, " heads"]:
    r"""Largest scaled, masked attention logit of each head, without an S×S matrix.

    $$S_h = \max_{b,\,(i,j)\ \text{visible}} \mathrm{scale}\; q_{b,i,h} \cdot k_{b,j,h}$$

    The maximum is signed and runs over all leading axes (they are batch) and all visible pairs of
    positions: after the scale and the mask, before an attention bias, a soft-cap and the softmax.
    Logits are made block by block, and a block that `is_causal` or `local_window_size` hides whole
    is never made, so that the memory is that of one block: batch × heads × block × block. No
    gradient flows back. Under `vmap` or `scan` the layers' axis comes first.

    Args:
      query: `[*batch, T, heads, D]`, Flax's and `jax.nn.dot_product_attention`'s layout.
      key: `[*batch, S, key_heads, D]`; `key_heads` divides `heads` (grouped and multi-query
        attention).
      mask: True (or non-zero) where a query sees a key;
        any shape that broadcasts to `[*batch, heads, T, S]`.
      is_causal: Query i sees keys j ≤ i. As in JAX and Flax both count from 0, also where T ≠ S.
      local_window_size: Query i sees keys i − left … i + right; one number means both. As in JAX.
      scale: Factor on the dot products; default 1/√D.
      block: Queries, and keys, in one block, ≥ 1. Need not divide T or S.

    Returns:
      `[heads]`, float32 (float64 for float64 input). −inf for a head whose every pair is masked.

    Raises:
      ValueError: Shapes that do not fit together, or are empty;
        a block or window size that is traced or out of range.
      TypeError: An argument has another type, as a mask that is a list or a boolean.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> # One batch, two positions, one head, depth one.
      >>> query = jnp.array([1.0, 2.0]).reshape(1, 2, 1, 1)
      >>> key = jnp.array([3.0, 5.0]).reshape(1, 2, 1, 1)
      >>> muonjax.max_logits(query, key)
      Array([10.], dtype=float32)
      >>> muonjax.max_logits(query, -key, is_causal=True)  # the pair (0, 1) is hidden
      Array([-3.], dtype=float32)

    Source: Kimi K2 (arXiv 2507.20534), section 2.1.
    """
    with errors_of("max_logits"):
        _check_array("query", query, "of real numbers, [*batch, T, heads, D]")
        _check_array("key", key, "of real numbers, [*batch, S, key_heads, D]")
        _check_heads(query.shape, key.shape)
        *batch, T, heads, depth = query.shape
        S, key_heads = key.shape[-3:-1]
        groups = heads // key_heads
        left, right = _window(local_window_size, T, S)
        check_flag(is_causal=is_causal)
        # A causal query sees no key to its right, whatever the window allows.
        if is_causal:
            right = 0
        block = whole_number("block", block, 1, " of positions, at least 1.")
        block_q, block_k = min(T, block), min(S, block)
        scale = depth**-0.5 if scale is None else scale
        check_range("scale", scale, "finite", "; 1/√D is usual.")
        if mask is not None:
            wanted = "of booleans or numbers that broadcasts to [*batch, heads, T, S]"
            _check_array("mask", mask, wanted)
            mask = _as_booleans(mask, (*batch, heads, T, S))
    dtype = at_least_float32(query.dtype, key.dtype)
    query, key = lax.stop_gradient((query, key))
    # A product takes two operands of one dtype as they are, so that half precision stays fast.
    if query.dtype != key.dtype:
        query, key = query.astype(dtype), key.astype(dtype)
    # The heads as two axes: the queries of a group share a key head, which is not repeated for each
    # of them. The key stays [*batch, S, key_heads, depth].
    query = query.reshape(*batch, T, key_heads, groups, depth)
    # In the dtype of the products: a factor in bfloat16 would be off by up to 0.4 %.
    factor = jnp.asarray(scale, dtype)

    def largest_of_block(
        start: jax.Array | np.ndarray,
    ) -> Float[Array, "*batch heads"]:
        """The largest visible logit of each head in one block of queries and keys;
        -inf where none is visible.

        `start` = (i, j) is the first of `block_q` queries and the first of `block_k` keys. The
        block lies inside: i + block_q <= T and j + block_k <= S. From outside come `query`
        [*batch, T, key_heads, group, depth], `key` [*batch, S, key_heads, depth] and these sizes,
        the `dtype` and the `factor` of all logits, and what is visible: `left`, `right`, `mask`.
        """
        i, j = start
        q = lax.dynamic_slice_in_dim(query, i, block_q, -4)
        k = lax.dynamic_slice_in_dim(key, j, block_k, -3)
        products = jnp.einsum(
            "...tkgd,...skd->...kgts",
            q,
            k,
            preferred_element_type=dtype,
        )
        logits = factor * products.reshape(*batch, heads, block_q, block_k)
        visible: Any = True
        # A window of left = T and right = S hides no pair.
        if left < T or right < S:
            query_positions = i + jnp.arange(block_q)
            key_positions = j + jnp.arange(block_k)
            ahead = key_positions - query_positions[:, None]
            visible = (ahead <= right) & (-ahead <= left)
        if mask is not None:
            # The mask [*batch, heads, T, S] may have axes of size one, which hold for every
            # position: `min` asks for their only entry, and JAX moves a slice that begins at i > 0
            # back into the axis.
            rows, columns = mask.shape[-2:]
            of_queries = lax.dynamic_slice_in_dim(mask, i, min(block_q, rows), -2)
            visible &= lax.dynamic_slice_in_dim(
                of_queries, j, min(block_k, columns), -1
            )
        return logits.max((-2, -1), initial=-jnp.inf, where=visible)

    # The blocks are numbers of NumPy, of which at least one has a visible pair.
    starts = _visible_blocks(T, S, block_q, block_k, left, right)

    # [blocks, *batch, heads]: over the batch last, so that a sharded batch costs one all-reduce and
    # not one per block.
    largest = lax.map(largest_of_block, starts)
    return largest.max(tuple(range(largest.ndim - 1)))


def _visible_blocks(
    T: int, S: int, block_q: int, block_k: int, left: int, right: int
) -> np.ndarray:
    """[blocks, 2]: the first query i and the first key j of each block that has a visible pair.

    Query i sees keys i - left … i + right; neither is negative, so query 0 sees key 0, and there is
    at least one block to take a maximum of. The blocks are known while tracing, so that one without
    a visible pair costs nothing; the caller hides those pairs of a block that are not visible.
    `block_q` <= T and `block_k` <= S.

    >>> # Causal, no limit to the left.
    >>> _visible_blocks(T=4, S=4, block_q=2, block_k=2, left=4, right=0).tolist()
    [[0, 0], [2, 0], [2, 2]]
    """
    # A last block that would end after T starts earlier.
    # Pairs in two blocks do not change a maximum.
    i = np.minimum(np.arange(0, T, block_q), T - block_q)[:, None]
    j = np.minimum(np.arange(0, S, block_k), S - block_k)
    # In a block, key minus query goes from j - last_i to last_j - i.
    # A pair is visible if this meets -left ... right.
    last_i = i + block_q - 1
    last_j = j + block_k - 1
    is_visible = (j - last_i <= right) & (last_j - i >= -left)
    starts = np.stack(np.broadcast_arrays(i, j), -1)
    return starts[is_visible].astype(np.int32)


def max_logits_bound(lse: Float[Array, "*batch T heads"]) -> Float32[Array, " heads"]:
    r"""Upper bound of each head's largest logit, from the log-sum-exp that flash attention has
    anyway.

    $$\max_j s_{ij} \;\le\; \log \sum_j e^{s_{ij}} \;\le\; \max_j s_{ij} + \log S$$

    It costs one pass over `[*batch, T, heads]`. Clipping on a bound is safe, never exact: the
    factor is smaller than needed by a share of at most 1 − τ/(τ + log S), with S keys and the
    threshold τ, and a head within log S below it may be clipped early. A soft-cap or an attention
    bias inside the softmax makes it a bound of something else.

    Args:
      lse: `[*batch, T, heads]`, as `jax.nn.dot_product_attention(..., return_residual=True)`
        returns it, in the queries' dtype: the rounding of this dtype is added.
        Don't cast it to a more precise one before.

    Returns:
      `[heads]`, float32; −inf, +inf and NaN are passed on.

    Raises:
      ValueError: `lse` has fewer than two axes, or is not floating point.
      TypeError: `lse` is no array of real numbers.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 16, 4, 8))
      >>> _, lse = jax.nn.dot_product_attention(q, k, k, return_residual=True)
      >>> bool((muonjax.max_logits(q, k) <= muonjax.max_logits_bound(lse)).all())
      True

    Source: the inequality between maximum and log-sum-exp; Dao et al., "FlashAttention",
    2022, which keeps the latter.
    """
    with errors_of("max_logits_bound"):
        _check_array("lse", lse, "of floats, [*batch, T, heads]")
        if lse.ndim < 2 or not jnp.issubdtype(lse.dtype, jnp.floating):
            raise ValueError(
                f" needs floats [*batch, T, heads], got {lse.dtype}{[*lse.shape]}."
            )
    # lse went through a rounding to its dtype, by at most half a unit in the last place.
    cast = float(jnp.finfo(lse.dtype).eps) / 2
    # An error δ of the sum is an absolute one of its logarithm, log(sum·(1 + δ)) ≈ lse + δ, and the
    # logarithm's own rounding is relative to lse. Each is taken as four float32 epsilons.
    inside = 4 * jnp.finfo(jnp.float32).eps
    lse = lax.stop_gradient(lse).astype(jnp.float32)
    top = lse.max(tuple(range(lse.ndim - 1)))
    # An infinity or NaN is returned as it is: -inf + cast * inf would be NaN.
    size = jnp.where(jnp.isfinite(top), jnp.abs(top), 0)
    return top + cast * size + inside * (1 + size)


def _check_array(name: str, value: Any, wanted: str) -> None:
    """Raise unless it is an array of NumPy or JAX, of real numbers; booleans are for a mask."""
    kinds = [jnp.floating, jnp.integer]
    if name == "mask":
        kinds.append(jnp.bool_)
    # NumPy's and JAX's arrays and tracers have both; a list and a Python number have none.
    is_array = hasattr(value, "ndim") and hasattr(value, "dtype")
    if not is_array or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        raise TypeError(f"({name}={shown(value)}) must be an array {wanted}.")


def _check_heads(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    """Raise unless the shapes are [*batch, T, heads, D] and [*batch, S, key_heads, D],
    key_heads dividing heads."""
    has_entries = len(query) == len(key) >= 3 and 0 not in (*query, *key)
    # Sequences may differ in length, everything else is equal or divides.
    is_same_batch = (*query[:-3], query[-1]) == (*key[:-3], key[-1])
    if not (has_entries and is_same_batch and query[-2] % key[-2] == 0):
        raise ValueError(
            f"(query, key) got {list(query)} and {list(key)}; it needs [*batch, T, heads, D] and "
            "[*batch, S, key_heads, D], none of them 0, where key_heads divides heads; reshape to "
            "heads."
        )


def _window(local_window_size: Any, T: int, S: int) -> tuple[int, int]:
    """How many positions a query sees to its left and to its right: 8 -> (8, 8), None -> (T, S),
    which is all."""
    if local_window_size is None:
        return T, S
    # As in JAX, a single number is the window on either side.
    is_pair = isinstance(local_window_size, Sequence) and len(local_window_size) == 2
    sides = local_window_size if is_pair else (local_window_size, local_window_size)
    for side in sides:
        whole_number(
            "local_window_size", side, 0, " or two, (left, right), none negative."
        )
    return tuple(sides)


def _as_booleans(
    mask: jax.Array, logits: tuple[int, ...]
) -> Bool[Array, "*#batch #heads #T #S"]:
    """The mask as booleans, with as many axes as the logits;
    raises unless it broadcasts to their shape.

    Axes of size one stay, because they broadcast.
    """
    # JAX raises for shapes that don't broadcast to each other;
    # a mask that would enlarge the logits is refused here.
    if jnp.broadcast_shapes(mask.shape, logits) != logits:
        raise ValueError(
            f"(mask={list(mask.shape)}) does not broadcast to [*batch, heads, T, S] = "
            f"{list(logits)}."
        )
    # As NumPy does, axes that the mask lacks are added in front.
    shape = (1,) * (len(logits) - mask.ndim) + mask.shape
    return jnp.asarray(mask).astype(bool).reshape(shape)
