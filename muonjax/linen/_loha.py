"""Linen layers with LoHa adapters: dense layers, convolutions, and the projections of Flax's attention.

Flax's layers take the function that multiplies, as `dot_general_cls` or `conv_general_dilated_cls`. An adapter
is a module that replaces this function, under the layer's scope as "loha". The kernel keeps its path, so the
parameters of a trained model fit beside the adapters.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from muonjax._adapters.adapter import MAGNITUDE, SCALE, Adapter
from muonjax._adapters.config import LoHaConfig, Place, initial
from muonjax._adapters.hadamard import column_norms

HOLDER = "loha"


class LoHa(nn.Module):
    """The adapter of one layer, which replaces its `dot_general` or `conv_general_dilated`; see `loha`.

    Its parameters are at "<layer>/loha/": hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b, for the Tucker form
    hada_t1 and hada_t2, for DoRA dora_scale, and hada_scale, the factor of ΔW, which does not train.
    """

    config: LoHaConfig
    is_convolution: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        """As `lax.dot_general` or `lax.conv_general_dilated`, with rhs + ΔW."""
        config = self.config
        inputs = rhs.ndim - 1 if self.is_convolution else len(args[0][0][1])  # axes that are summed over
        place = Place(rhs.shape, inputs, rhs.ndim - 2 if self.is_convolution else 0)
        values = {
            name: self.param(name, functools.partial(initial, name), shape, self.param_dtype)
            for name, shape in config.shapes(place).items()
        }
        scale = jax.lax.stop_gradient(self.param(SCALE, lambda _: jnp.float32(config.scale)))
        adapter = Adapter.of(values | {SCALE: scale})
        if config.decompose:
            columns = rhs.reshape(-1, place.outputs)
            adapter = adapter._replace(magnitude=self.param(MAGNITUDE, lambda _: column_norms(columns)))
        if config.rank_dropout and self.has_rng("dropout"):
            adapter = adapter.drop_ranks(self.make_rng("dropout"), config.rank_dropout)
        function = adapter.convolution if self.is_convolution else adapter.dot_general
        return function(lhs, rhs, *args, **settings)


def loha(
    rank: int,
    *,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    rank_dropout: float = 0.0,
    decompose: bool = False,
    param_dtype: Any = jnp.float32,
) -> functools.partial[LoHa]:
    """Makes LoHa adapters: `dot_general_cls` of `nn.Dense`, `nn.DenseGeneral`; `qkv_dot_general_cls` of an attention.

    Args:
      rank: The rank of each of the two products; ΔW has rank up to rank².
      alpha: ΔW is scaled by alpha / rank; None: alpha = rank.
      rank_stabilized: Scale by alpha / √rank instead.
      rank_dropout: The probability of leaving out a rank of the first product, wherever `apply` gets a
        "dropout" stream.
      decompose: DoRA: normalize the columns of W + ΔW, and scale each by a trained magnitude.
      param_dtype: The dtype of the factors.

    Returns:
      A function without arguments, which the layer calls to make its adapter.

    Raises:
      ValueError: If a setting is out of range; when the layer is initialised, if the rank does not fit its kernel.

    Example:
      >>> attention = nn.MultiHeadAttention(num_heads=2, qkv_dot_general_cls=loha(2))
      >>> params = attention.init(jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
      >>> sorted(params["query"]["loha"])
      ['hada_scale', 'hada_w1_a', 'hada_w1_b', 'hada_w2_a', 'hada_w2_b']

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    config = LoHaConfig(rank, alpha, rank_stabilized, rank_dropout, decompose)
    return functools.partial(LoHa, config, param_dtype=param_dtype, name=HOLDER)


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

    It is an `nn.Dense`, with the name that an `nn.Dense` would get.

    Args:
      features: The size of y's last axis.
      rank: As in `loha`.
      alpha: As in `loha`.
      rank_stabilized: As in `loha`.
      rank_dropout: As in `loha`.
      decompose: As in `loha`.
      **dense: `nn.Dense`'s own settings.

    Returns:
      The module.

    Raises:
      ValueError: As in `loha`.

    Example:
      >>> params = LoHaDense(4, rank=2).init(jax.random.key(0), jnp.ones((1, 6)))["params"]
      >>> params["kernel"].shape, params["loha"]["hada_w1_a"].shape, params["loha"]["hada_w1_b"].shape
      ((6, 4), (6, 2), (2, 4))

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    config = LoHaConfig(rank, alpha, rank_stabilized, rank_dropout, decompose)
    param_dtype = dense.get("param_dtype", jnp.float32)
    adapter = functools.partial(LoHa, config, param_dtype=param_dtype, name=HOLDER)
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
    """`nn.Conv` with a LoHa adapter of its kernel as a matrix (window · in) × out, or in the Tucker form.

    Args:
      features: The number of channels of y.
      kernel_size: The window.
      rank: As in `loha`.
      alpha: As in `loha`.
      rank_stabilized: As in `loha`.
      rank_dropout: As in `loha`.
      decompose: As in `loha`.
      tucker: A core [*window, rank, rank] between factors [in, rank] and [rank, out]: fewer parameters.
      **conv: `nn.Conv`'s own settings.

    Returns:
      The module: an `nn.Conv`, with the name that an `nn.Conv` would get.

    Raises:
      ValueError: As in `loha`, and for a convolution with a mask.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> conv = muonjax.linen.LoHaConv(4, (3, 3), rank=2)
      >>> params = conv.init(jax.random.key(0), jnp.ones((1, 8, 8, 6)))["params"]
      >>> params["kernel"].shape, params["loha"]["hada_w1_a"].shape
      ((3, 3, 6, 4), (54, 2))

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """
    if conv.get("mask") is not None:
        raise ValueError("LoHaConv(mask=…): ΔW is not masked; remove the mask.")
    config = LoHaConfig(rank, alpha, rank_stabilized, rank_dropout, decompose, tucker)
    param_dtype = conv.get("param_dtype", jnp.float32)
    adapter = functools.partial(LoHa, config, is_convolution=True, param_dtype=param_dtype, name=HOLDER)
    return nn.Conv(features, kernel_size, conv_general_dilated_cls=adapter, **conv)
