"""The signal of QK-Clip: each head's largest attention logit, block by block, never an S x S matrix."""

import math

import jax
import jax.numpy as jnp


def max_logits(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    block_q: int = 512,
    block_k: int = 512,
) -> jax.Array:
    r"""The largest pre-softmax logit of each head, over batch and positions: max_{b,t,s} scale <q_t, k_s>.

    Signed, after the scale and the mask, before any bias; no gradient flows through it.

    Args:
      query: [*batch, T, H, D], Flax's layout.
      key: [*batch, S, K, D], H a multiple of K: query head h reads key head h // (H / K).
      mask: Boolean (nonzero: attend), broadcastable to [*batch, H, T, S].
      is_causal: Position t attends to s <= t + S - T only; blocks that are masked altogether are skipped.
      scale: Multiplies the dot product; 1 / sqrt(D) if None.
      block_q: Query positions that are held at a time; at least 1.
      block_k: Key positions that are held at a time; at least 1.

    Returns:
      float32 [H]; -inf for a head that is masked everywhere.

    Raises:
      ValueError: If the shapes do not fit, or a block size is not positive.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> q = jnp.ones((1, 4, 2, 16)) * jnp.array([1.0, -1.0])[:, None]
      >>> muonjax.max_logits(q, jnp.ones((1, 4, 2, 16)))
      Array([ 4., -4.], dtype=float32)

    Source: Kimi Team, "Kimi K2", 2025, section 2.1 (S_max); J. Su, kexue.fm/archives/11126.
    """
    *lead, length, heads, size = query.shape
    *key_lead, key_length, key_heads, key_size = key.shape
    if lead != key_lead or size != key_size or heads % key_heads:
        raise ValueError(
            f"max_logits(query, key) got shapes {query.shape} and {key.shape}; they must share batch and head "
            "size, and the query's heads must be a multiple of the key's."
        )
    if block_q < 1 or block_k < 1:
        raise ValueError(f"max_logits(block_q={block_q}, block_k={block_k}) needs positive block sizes.")
    scale = size**-0.5 if scale is None else scale
    group = heads // key_heads
    query, key = jax.lax.stop_gradient((query, key))
    block_q, block_k = min(block_q, length), min(block_k, key_length)
    batch = math.prod(lead)
    q = _pad(query.reshape(batch, length, key_heads, group, size), 1, block_q)
    k = _pad(key.reshape(batch, key_length, key_heads, size), 1, block_k)
    if mask is not None:
        full = jnp.broadcast_shapes(mask.shape, (*[1] * len(lead), 1, 1, 1))
        if len(full) != len(lead) + 3:
            raise ValueError(
                f"max_logits(mask=...) of shape {mask.shape} has too many axes for {query.shape}."
            )
        mask = mask.reshape((1,) * (len(full) - mask.ndim) + mask.shape).astype(bool)
        mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-3:])).reshape(batch, *mask.shape[-3:])

    def block(i, j):
        qs = jax.lax.dynamic_slice_in_dim(q, i * block_q, block_q, 1)
        ks = jax.lax.dynamic_slice_in_dim(k, j * block_k, block_k, 1)
        logits = jnp.einsum("btkgd,bskd->bkgts", qs, ks, preferred_element_type=jnp.float32)
        t = i * block_q + jnp.arange(block_q)[:, None]
        s = j * block_k + jnp.arange(block_k)
        keep = (t < length) & (s < key_length)
        if is_causal:
            keep &= s <= t + key_length - length
        if mask is not None:
            keep = keep & _mask_block(mask, i * block_q, block_q, j * block_k, block_k, group)
        return jnp.max(logits, axis=(0, 3, 4), initial=-jnp.inf, where=jnp.broadcast_to(keep, logits.shape))

    def row(i, largest):
        stop = k.shape[1] // block_k
        if is_causal:
            last = (i + 1) * block_q - 1 + key_length - length  # the last key that this block of queries sees
            stop = jnp.clip((last + block_k) // block_k, 0, stop)
        return jax.lax.fori_loop(0, stop, lambda j, best: jnp.maximum(best, block(i, j)), largest)

    start = jnp.full((key_heads, group), -jnp.inf, jnp.float32) + 0 * q[0, 0, :, :, 0].astype(jnp.float32)
    largest = jax.lax.fori_loop(0, q.shape[1] // block_q, row, start)
    return jax.lax.stop_gradient(scale * largest).reshape(heads)


def _pad(x: jax.Array, axis: int, block: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths)


def _mask_block(mask, start_q, block_q, start_k, block_k, group):
    """[batch, K or 1, group or 1, block_q or 1, block_k or 1] of a mask [batch, H or 1, T or 1, S or 1]."""
    for axis, start, block in ((2, start_q, block_q), (3, start_k, block_k)):
        if mask.shape[axis] > 1:
            mask = jax.lax.dynamic_slice_in_dim(_pad(mask, axis, block), start, block, axis)
    if mask.shape[1] == 1:
        return mask[:, :, None]
    return mask.reshape(mask.shape[0], -1, group, *mask.shape[2:])
