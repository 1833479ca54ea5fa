"""Flax Linen's attention, which also sows each head's largest logit, and hands them to the optimizer."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Unpack

import jax
import optax
from flax import linen as nn
from flax.training import train_state

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


def watch() -> AbstractContextManager[None]:
    """Makes every `nn.MultiHeadDotProductAttention` that runs inside report its largest logits, for QK-Clip.

    Each runs with `attention_fn(...)` around the attention function that it has, and with `sow_weights=True`: nothing
    in the model changes. Apply the model with `mutable=["intermediates"]`. One that normalizes its queries and keys
    runs as it is. Where the gradients come from `muonjax.value_and_grad`, which reads the logits from the program,
    nothing has to report them.

    Returns:
      A context manager.

    Raises:
      ValueError: When the model runs: an attention function whose logits can't be measured.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> attention, x = nn.MultiHeadDotProductAttention(4), jnp.ones((2, 6, 8))
      >>> variables = attention.init(jax.random.key(0), x)
      >>> with muonjax.linen.watch():
      ...     y, sown = attention.apply(variables, x, mutable=["intermediates"])
      >>> sown["intermediates"]["max_logits"].shape
      (4,)
    """
    return nn.intercept_methods(_reporting)


def _reporting(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    module = context.module
    attends = isinstance(module, nn.MultiHeadDotProductAttention) and context.method_name == "__call__"
    if not attends or module.normalize_qk:
        return call(*args, **kwargs)
    function = module.attention_fn
    reporting = function if hasattr(function, "reports") else attention_fn(function)
    # A bound module is frozen; for the time of this call it has another attention function.
    object.__setattr__(module, "attention_fn", reporting)
    try:
        return call(*args, **kwargs | {"sow_weights": True})
    finally:
        object.__setattr__(module, "attention_fn", function)


class TrainState(train_state.TrainState):
    """Flax's `TrainState` whose `apply_gradients` hands the largest logits on to the optimizer.

    Attributes:
      step: As in Flax, as all others.
      apply_fn: The model's `apply`.
      params: The parameters.
      tx: The optimizer, such as `muonclip(1e-2)`.
      opt_state: Its state; `TrainState.create(apply_fn=..., params=..., tx=...)` makes it.

    Raises:
      ValueError: From `apply_gradients` without `max_logits`, if `tx` is a QK-Clip.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> model, x = nn.MultiHeadDotProductAttention(4), jnp.ones((2, 6, 8))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> state = muonjax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=muonjax.muonclip(1e-2))
      >>> def loss_fn(params):
      ...     return (state.apply_fn({"params": params}, x) ** 2).mean()
      >>> (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(state.params)
      >>> state = state.apply_gradients(grads=grads, max_logits=max_logits)
      >>> int(state.step), muonjax.metrics(state.opt_state)["qk_clip/num_clipped"]
      (1, 0.0)
    """

    def apply_gradients(self, *, grads: Any, max_logits: Any = None, **kwargs: Any) -> Any:
        """Flax's `apply_gradients`, with `max_logits` for `tx.update` if they are given."""
        if max_logits is None:
            return super().apply_gradients(grads=grads, **kwargs)
        update = functools.partial(optax.with_extra_args_support(self.tx).update, max_logits=max_logits)
        bound = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
        return train_state.TrainState.apply_gradients(bound, grads=grads, **kwargs).replace(tx=self.tx)


__test__ = {"attention_fn": attention_fn}  # a doctest is not found behind a decorator
