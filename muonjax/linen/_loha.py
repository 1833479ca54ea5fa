"""The Linen door's layers with adapters: LoHa on a dense layer or a convolution.

Flax's layers take the function that multiplies, as `dot_general_cls` or `conv_general_dilated_cls`. An adapter
is a module in this function's place, under the layer's scope as "loha": the kernel's path stays what it was, so
the parameters of a trained model fit beside the adapters.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from muonjax._adapters.adapter import Adapter, check_rate, factor_shapes, initial, scale_of
from muonjax._adapters.hadamard import column_norms
from muonjax._adapters.names import FACTORS, MAGNITUDE, SCALE

HOLDER = "loha"


class LoHa(nn.Module):
    """The adapter of one layer, in place of its `dot_general` or `conv_general_dilated`; see `loha`.

    Its parameters lie at "<layer>/loha/": hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b, for the Tucker form
    hada_t1 and hada_t2, for DoRA dora_scale, and hada_scale, the factor of ΔW, which does not train.
    """

    rank: int
    alpha: float | None = None
    rank_stabilized: bool = False
    rank_dropout: float = 0.0
    decompose: bool = False
    tucker: bool = False
    is_convolution: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        """What the function does in whose place this module stands, with rhs + ΔW."""
        check_rate(self.rank_dropout)
        if self.is_convolution:
            inputs, window = rhs.ndim - 1, rhs.ndim - 2
        else:
            inputs, window = len(args[0][0][1]), 0  # how many axes of the kernel are summed over
        shapes = factor_shapes(rhs.shape, inputs, self.rank, self.tucker, window)
        values = {
            name: self.param(name, functools.partial(initial, name), shape, self.param_dtype)
            for name, shape in shapes.items()
        }
        value = scale_of(self.rank, self.alpha, self.rank_stabilized)
        scale = jax.lax.stop_gradient(self.param(SCALE, lambda _: jnp.float32(value)))
        n = shapes[FACTORS[1]][1]
        magnitude = (
            self.param(MAGNITUDE, lambda _: column_norms(rhs.reshape(-1, n))) if self.decompose else None
        )
        adapter = Adapter.of({**values, SCALE: scale, MAGNITUDE: magnitude})
        if self.rank_dropout and self.has_rng("dropout"):
            adapter = adapter.drop_ranks(self.make_rng("dropout"), self.rank_dropout)
        return (adapter.convolution if self.is_convolution else adapter.dot_general)(
            lhs, rhs, *args, **settings
        )


def loha(
    rank: int,
    *,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    rank_dropout: float = 0.0,
    decompose: bool = False,
    param_dtype: Any = jnp.float32,
) -> functools.partial[LoHa]:
    """For `dot_general_cls` of `nn.Dense` and `nn.DenseGeneral`, or `qkv_dot_general_cls` of an attention.

    Args:
      rank: of each of the two products; ΔW has rank up to rank².
      alpha: ΔW is scaled by alpha / rank; None: alpha = rank.
      rank_stabilized: alpha / √rank instead.
      rank_dropout: the probability of leaving out a rank of the first product, wherever `apply` gets a
        "dropout" stream.
      decompose: DoRA: ΔW turns the columns, a magnitude of their own sizes them.
      param_dtype: of the factors.

    Returns:
      A class, so to speak: called without arguments in the layer, it makes the layer's adapter.

    Raises:
      ValueError: when the layer is initialised, a rank that does not fit its kernel, or is below 1.

    Example:
      >>> attention = nn.MultiHeadAttention(num_heads=2, qkv_dot_general_cls=loha(2))
      >>> params = attention.init(jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
      >>> sorted(params["query"]["loha"])
      ['hada_scale', 'hada_w1_a', 'hada_w1_b', 'hada_w2_a', 'hada_w2_b']

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    return functools.partial(
        LoHa,
        rank=rank,
        alpha=alpha,
        rank_stabilized=rank_stabilized,
        rank_dropout=rank_dropout,
        decompose=decompose,
        param_dtype=param_dtype,
        name=HOLDER,
    )


def LoHaDense(
    features: int,
    *,
    rank: int,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    rank_dropout: float = 0.0,
    decompose: bool = False,
    **dense: Any,
) -> nn.Dense:
    """`nn.Dense` with a LoHa adapter: y = x · (W + ΔW) + b, and ΔW = 0 at the start.

    It is an `nn.Dense`, under the name that an `nn.Dense` would get.

    Args:
      features: size of y's last axis.
      rank: as in `loha`.
      alpha: as in `loha`.
      rank_stabilized: as in `loha`.
      rank_dropout: as in `loha`.
      decompose: as in `loha`.
      **dense: `nn.Dense`'s own settings.

    Returns:
      The module.

    Raises:
      ValueError: when called, a rank that does not fit the kernel, or is below 1.

    Example:
      >>> params = LoHaDense(4, rank=2).init(jax.random.key(0), jnp.ones((1, 6)))["params"]
      >>> params["kernel"].shape, params["loha"]["hada_w1_a"].shape, params["loha"]["hada_w1_b"].shape
      ((6, 4), (6, 2), (2, 4))

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    adapter = loha(
        rank,
        alpha=alpha,
        rank_stabilized=rank_stabilized,
        rank_dropout=rank_dropout,
        decompose=decompose,
        param_dtype=dense.get("param_dtype", jnp.float32),
    )
    return nn.Dense(features, dot_general_cls=adapter, **dense)


def LoHaConv(
    features: int,
    kernel_size: Any,
    *,
    rank: int,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    rank_dropout: float = 0.0,
    decompose: bool = False,
    tucker: bool = False,
    **conv: Any,
) -> nn.Conv:
    """`nn.Conv` with a LoHa adapter on its kernel, seen as a matrix (window · in) × out, or in the Tucker form.

    Args:
      features: channels of y.
      kernel_size: the window.
      rank: as in `loha`.
      alpha: as in `loha`.
      rank_stabilized: as in `loha`.
      rank_dropout: as in `loha`.
      decompose: as in `loha`.
      tucker: a core [*window, rank, rank] between factors [in, rank] and [rank, out]: fewer parameters.
      **conv: `nn.Conv`'s own settings.

    Returns:
      The module: an `nn.Conv`, under the name that an `nn.Conv` would get.

    Raises:
      ValueError: when called, a rank that does not fit the kernel, or is below 1.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> conv = muonjax.linen.LoHaConv(4, (3, 3), rank=2)
      >>> params = conv.init(jax.random.key(0), jnp.ones((1, 8, 8, 6)))["params"]
      >>> params["kernel"].shape, params["loha"]["hada_w1_a"].shape
      ((3, 3, 6, 4), (54, 2))

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    if conv.get("mask") is not None:
        raise ValueError(
            "A LoHa adapter of a masked convolution would fill the mask's holes; remove the mask."
        )
    adapter = loha(
        rank,
        alpha=alpha,
        rank_stabilized=rank_stabilized,
        rank_dropout=rank_dropout,
        decompose=decompose,
        param_dtype=conv.get("param_dtype", jnp.float32),
    )
    adapter = functools.partial(adapter, is_convolution=True, tucker=tucker)
    return nn.Conv(features, kernel_size, conv_general_dilated_cls=adapter, **conv)
