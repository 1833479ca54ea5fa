"""muonjax for Flax Linen: a train state that passes the largest logits on,
and LoHa adapters of its layers.

Flax's layers take the function that multiplies, as `dot_general_cls` or `conv_general_dilated_cls`.
An adapter is a module that replaces this function, under the layer's scope as "loha". The kernel
keeps its path, so the parameters of a trained model fit next to the adapters.
"""

import functools
from typing import Any

import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from muonjax import loha as shared
from muonjax._common.arguments import errors_of

__all__ = ["TrainState", "loha", "merge"]

_HOLDER = "loha"


class LoHa(nn.Module):
    """The adapter of one layer, which replaces its `dot_general` or `conv_general_dilated`;
    see `loha`.

    Its parameters are at "<layer>/loha/": hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b, and
    hada_scale, the factor of ΔW, which does not train.
    """

    rank: int
    scale: float
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, lhs, rhs, *args, **settings):
        """What the layer calls in place of `lax.dot_general` or `lax.conv_general_dilated`:
        the same with rhs + ΔW, where rhs is its kernel."""
        # The layer that made the adapter, its parent, tells which of the two functions is meant.
        # The shapes of the factors follow from how many of the kernel's first axes are its inputs.
        layer = self.parent
        if isinstance(layer, nn.Conv):
            if layer.mask is not None:
                raise ValueError(
                    "loha in a convolution with a mask: ΔW is not masked; remove the mask."
                )
            function = lax.conv_general_dilated
            # [*window, in, out]
            input_axes = rhs.ndim - 1
        else:
            function = lax.dot_general
            # The dimension numbers, which Linen's layers give as the third argument: the axes that
            # are summed over, of lhs and of rhs, and those that count matrices.
            (_, summed), (_, batch) = args[0]
            input_axes = len(summed)
            if batch or tuple(summed) != tuple(range(input_axes)):
                raise ValueError(
                    "A LoHa adapter needs a kernel [*in, *out] without a batch of matrices, got "
                    f"dimension_numbers={args[0]} and a kernel of shape {rhs.shape}."
                )
        with errors_of("loha"):
            shapes = shared.factor_shapes(rhs.shape, input_axes, self.rank)
        factors = []
        for name, shape in shapes.items():
            # Linen calls it with a random key, the shape and the dtype, where the layer is
            # initialized.
            initializer = functools.partial(shared.initial, name)
            factors.append(self.param(name, initializer, shape, self.param_dtype))
        # A parameter, so that a checkpoint of the adapter is complete; but it does not train.
        scale = lax.stop_gradient(
            self.param(shared.SCALE, lambda _: jnp.float32(self.scale))
        )
        return shared.multiply(function, lhs, rhs, factors, scale, *args, **settings)


def loha(
    rank: int, *, alpha: float | None = None, param_dtype: Any = jnp.float32
) -> functools.partial[LoHa]:
    """Makes LoHa adapters: y = x · (W + ΔW) + b with ΔW = scale · (w1a · w1b) ∘ (w2a · w2b),
    0 at the start.

    It is for `dot_general_cls` of a dense layer, `qkv_dot_general_cls` of an attention, and
    `conv_general_dilated_cls` of a convolution, whose kernel is a matrix (window · in) × out. The
    layer keeps the paths of its parameters.

    Args:
      rank: The rank of each of the two products; ΔW has rank up to rank².
      alpha: ΔW is scaled by alpha / rank, which is kept as `hada_scale` and does not train;
        None: alpha = rank.
      param_dtype: The dtype of the factors.

    Returns:
      A function without arguments, which the layer calls to make its adapter.

    Raises:
      ValueError: If a setting is out of range; when the layer is initialized, if the rank does not
        fit its kernel, for a kernel with a batch of matrices, or for a convolution with a mask.

    Example:
      >>> import jax
      >>> attention = nn.MultiHeadAttention(num_heads=2, qkv_dot_general_cls=loha(2))
      >>> params = attention.init(jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
      >>> sorted(params["query"]["loha"])
      ['hada_scale', 'hada_w1_a', 'hada_w1_b', 'hada_w2_a', 'hada_w2_b']

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    with errors_of("loha"):
        scale = shared.scale_of(rank, alpha)
    # `_HOLDER` is "loha", the adapter's name below its layer.
    return functools.partial(LoHa, rank, scale, param_dtype=param_dtype, name=_HOLDER)


def merge(params: Any) -> Any:
    """Parameters of the plain model with the adapted model's outputs: kernels with ΔW added,
    no adapters.

    Args:
      params: The adapted model's parameters.

    Returns:
      A tree like the plain model's parameters, plain dicts without boxes of metadata.

    Raises:
      ValueError: If `params` has no adapter, as after merging, or an adapter without `hada_scale`.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> from flax import linen as nn
      >>> x = jnp.ones((1, 6))
      >>> layer = nn.Dense(4, dot_general_cls=muonjax.linen.loha(2))
      >>> params = layer.init(jax.random.key(0), x)["params"]
      >>> sorted(muonjax.linen.merge(params))
      ['bias', 'kernel']
    """
    flat: dict[tuple[str, ...], Any] = flatten_dict(nn.unbox(params))
    # Keys are paths: ("dense", "loha", "hada_w1_a") says that the layer "dense" has an adapter.
    first_factor = (_HOLDER, "hada_w1_a")
    layers = sorted(path[:-2] for path in flat if path[-2:] == first_factor)
    if not layers:
        raise ValueError("merge(params): no LoHa adapter in it; was it merged already?")
    for layer in layers:
        # The scale does not train, so it is lost where only trained parameters are kept.
        scale = flat.pop((*layer, _HOLDER, shared.SCALE), None)
        if scale is None:
            raise ValueError(
                f"merge: no {shared.SCALE} at {'/'.join(layer)}; give frozen parameters too."
            )
        # `pop` takes the adapter's parameters out of the tree; the new kernel replaces the old one.
        factors = [flat.pop((*layer, _HOLDER, name)) for name in shared.FACTORS]
        path = (*layer, "kernel")
        with errors_of(f"merge: the adapter at {'/'.join(layer)!r}"):
            # Layers that `nn.scan` stacks along the first axis are merged at once.
            flat[path] = shared.adapted_kernel(flat[path], factors, scale)
    return unflatten_dict(flat)


class TrainState(train_state.TrainState):
    """Flax's `TrainState` whose `apply_gradients` hands the largest logits on to the optimizer.

    Attributes:
      step: The number of updates; this field and the others are as in Flax.
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

    def apply_gradients(
        self, *, grads: Any, max_logits: Any = None, **kwargs: Any
    ) -> Any:
        """Flax's `apply_gradients`, with `max_logits` for `tx.update` if they are given."""
        # An optimizer without QK-Clip takes none.
        if max_logits is None:
            return super().apply_gradients(grads=grads, **kwargs)
        # Flax calls `tx.update` without further arguments, so these logits are bound to it for this
        # one step. An optimizer that does not take them gets none.
        tx = optax.with_extra_args_support(self.tx)
        update = functools.partial(tx.update, max_logits=max_logits)
        bound = self.replace(tx=optax.GradientTransformation(tx.init, update))
        # Flax's method, on `bound` in place of `self`. The result has the optimizer of `bound`:
        # it gets back its own.
        updated = train_state.TrainState.apply_gradients(bound, grads=grads, **kwargs)
        return updated.replace(tx=self.tx)
