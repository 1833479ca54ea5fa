"""Flax's `TrainState`, whose `apply_gradients` hands the largest logits to the optimizer."""

import functools
from typing import Any

import optax
from flax.training import train_state


class TrainState(train_state.TrainState):
    """Flax's `TrainState` whose `apply_gradients` hands the largest logits on to the optimizer.

    Attributes:
      step: As in Flax, as all others.
      apply_fn: The model's `apply`.
      params: The parameters.
      tx: The optimizer, such as `muonclip(1e-2, program)`.
      opt_state: Its state; `TrainState.create(apply_fn=..., params=..., tx=...)` makes it.

    Raises:
      ValueError: From `apply_gradients` without `max_logits`, if `tx` is a QK-Clip.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> model, x = nn.MultiHeadDotProductAttention(4), jnp.ones((2, 6, 8))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> def loss_fn(params):
      ...     return (model.apply({"params": params}, x) ** 2).mean()
      >>> tx = muonjax.muonclip(1e-2, muonjax.inspect(loss_fn, params))
      >>> state = muonjax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
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
