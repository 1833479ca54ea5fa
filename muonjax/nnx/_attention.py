"""Flax NNX's attention, with an attention function that also sows each head's largest logit."""

from collections.abc import Callable
from typing import Unpack

import jax
from flax import nnx

from muonjax._clipping.attention_fn import MeasuringSettings, reporting
from muonjax._keywords import explains_keywords

SLIP = (
    "muonjax.nnx.attention_fn makes an attention function: write attention_fn=muonjax.nnx.attention_fn(), with "
    "parentheses."
)


@explains_keywords("muonjax.nnx.attention_fn", reporting, slip=SLIP)
def attention_fn(
    base: Callable[..., jax.Array] = nnx.dot_product_attention, **settings: Unpack[MeasuringSettings]
) -> Callable[..., jax.Array]:
    """Attention for `nnx.MultiHeadAttention` that also sows each head's largest logit, for QK-Clip.

    Call the attention with `sow_weights=True`, the model through `nnx.capture(model, nnx.Intermediate)`, and pass
    what comes back to `tx.update(..., max_logits=...)`. Without `sow_weights`, or outside of `nnx.capture`, nothing is
    measured. Only an attention whose softmax is hidden, as in a kernel, needs this: `value_and_grad` reads all others.
    The module sows `max_logits`, `[heads]`, and not the attention weights; if it is called several times, the largest
    of all calls. Beside it stands `max_logits_axes`, longer by one: its shape tells `muonclip` which axis of stacked
    statistics is that of heads. Everything that Flax passes (mask, `is_causal`, dropout, cache, precision) reaches
    `base` as it was, except the module, so that NNX keeps its fused attention.

    Args:
      base: The attention function to wrap: softmax(scale · query keyᵀ, masked) value, and nothing else. What its
        own defaults or a `functools.partial` say of `scale`, `local_window_size`, `is_causal`, `mask`,
        `key_value_seq_lengths` and `query_seq_lengths` is measured so.

    Returns:
      A function for Flax's `attention_fn`.

    Raises:
      ValueError: `base` rotates or caps the logits itself, has another scale or window, or hides
        pairs in a way that can't be measured.
      TypeError: When called, if `base` cannot take an argument that Flax passes; or if the parentheses are missing.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> from flax import nnx
      >>> attention = nnx.MultiHeadAttention(
      ...     4, 8, attention_fn=muonjax.nnx.attention_fn(), decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> forward = nnx.capture(lambda attention, x: attention(x, sow_weights=True), nnx.Intermediate)
      >>> y, sown = forward(attention, jnp.ones((2, 6, 8)))
      >>> sown["max_logits"][...].shape
      (4,)
    """

    return reporting(
        "muonjax.nnx.attention_fn",
        base,
        nnx.dot_product_attention,
        lambda module, *value, **how: module.sow(nnx.Intermediate, *value, **how),
        listens=lambda module: hasattr(module, "__captures__"),  # inside of nnx.capture
        **settings,
    )


__test__ = {"attention_fn": attention_fn}  # a doctest is not found behind a decorator
