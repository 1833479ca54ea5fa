"""Flax Linen's attention, with an attention function that also sows each head's largest logit."""

from collections.abc import Callable
from typing import Unpack

import jax
from flax import linen as nn

from muonjax._clipping.attention_fn import MeasuringSettings, reporting
from muonjax._keywords import explains_keywords

SLIP = (
    "muonjax.linen.attention_fn makes an attention function: write attention_fn=muonjax.linen.attention_fn(), with "
    "parentheses."
)


@explains_keywords("muonjax.linen.attention_fn", reporting, slip=SLIP)
def attention_fn(
    base: Callable[..., jax.Array] = nn.dot_product_attention, **settings: Unpack[MeasuringSettings]
) -> Callable[..., jax.Array]:
    """Attention for `nn.MultiHeadDotProductAttention` that also sows each head's largest logit, for QK-Clip.

    Call the attention with `sow_weights=True` and the model with `mutable=["intermediates"]`, and pass what comes
    back to `tx.update(..., max_logits=...)`. Without them nothing is sown. The module sows `max_logits`, `[heads]`,
    and not the attention weights; if it is called several times, the largest of all calls. Beside it stands
    `max_logits_axes`, longer by one: its shape tells `muonclip` which axis of stacked statistics is that of heads.
    Everything that Flax passes (mask, dropout, cache, precision) reaches `base` as it was. Works under `nn.remat`, and
    under `nn.scan` with an entry "intermediates" in its `variable_axes`.

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
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> attention = nn.MultiHeadDotProductAttention(4, attention_fn=muonjax.linen.attention_fn())
      >>> x = jnp.ones((2, 6, 8))
      >>> params = attention.init(jax.random.key(0), x)["params"]
      >>> y, sown = attention.apply({"params": params}, x, sow_weights=True, mutable=["intermediates"])
      >>> sown["intermediates"]["max_logits"].shape
      (4,)
    """

    return reporting(
        "muonjax.linen.attention_fn",
        base,
        nn.dot_product_attention,
        lambda module, *value, **how: module.sow("intermediates", *value, **how),
        **settings,
    )


__test__ = {"attention_fn": attention_fn}  # a doctest is not found behind a decorator
