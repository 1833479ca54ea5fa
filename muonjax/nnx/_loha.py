"""NNX layers with LoHa adapters: dense layers and convolutions.

Flax's layers take the function that multiplies, `dot_general` or `conv_general_dilated`. An adapter is a module
that replaces this function: the layer, its kernel and the kernel's path stay what they were.
"""

from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax import lax

from muonjax._adapters.adapter import SCALE, TRAINED, Adapter
from muonjax._adapters.config import LoHaConfig, Place, check_rate
from muonjax._arguments import errors_of

Layer: TypeAlias = nnx.Linear | nnx.LinearGeneral | nnx.Conv


class LoHaParam(nnx.Param):
    """A parameter of an adapter, so that `wrt=LoHaParam` trains adapters and nothing else.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> len(nnx.to_flat_state(nnx.state(model, muonjax.nnx.LoHaParam)))
      8
    """


class LoHa(nnx.Module):
    """The adapter of one layer, which replaces its `dot_general` or `conv_general_dilated`.

    Attributes:
      hada_w1_a: A factor, [in, rank].
      hada_w1_b: A factor, [rank, out].
      hada_w2_a: A factor, [in, rank].
      hada_w2_b: A factor, [rank, out].
      hada_t1: A core of the Tucker form, [*window, rank, rank], or None.
      hada_t2: The other core, or None.
      dora_scale: DoRA's magnitude, [out], or None.
      scale: alpha / rank, or alpha / √rank.
      merged: Whether the kernel holds ΔW already; the adapter then multiplies by the kernel alone.

    Example:
      >>> import muonjax
      >>> from flax import nnx
      >>> model = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False)
      >>> paths = muonjax.nnx.add_loha(model, "query|value", rank=2, rngs=nnx.Rngs(1))
      >>> muonjax.nnx.adapters(model)["query"].scale
      1.0

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        is_convolution: bool = False,
        rank_dropout: float = 0.0,
        rngs: nnx.Rngs | None = None,
    ):
        check_rate(rank_dropout)
        if rank_dropout and rngs is None:
            raise ValueError(f"rank_dropout={rank_dropout} needs rngs with a stream to draw from.")
        trained = adapter.named()
        for name in TRAINED:
            setattr(self, name, nnx.data(LoHaParam(trained[name]) if name in trained else None))
        magnitude = adapter.magnitude
        self.norms = nnx.data(None if magnitude is None else nnx.Variable(magnitude))
        self.scale = float(adapter.scale)
        self.is_convolution = is_convolution
        self.rank_dropout = rank_dropout
        self.rngs = nnx.data(rngs.fork() if rank_dropout and rngs is not None else None)
        self.deterministic = False
        self.merged = False

    def adapter(self) -> Adapter:
        """The adapter as plain arrays."""
        trained = {name: getattr(self, name) for name in TRAINED}
        values = {name: value[...] for name, value in trained.items() if value is not None}
        return Adapter.of(values | {SCALE: self.scale})

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        """As `lax.dot_general` or `lax.conv_general_dilated`, with rhs + ΔW."""
        if self.merged:
            function = lax.conv_general_dilated if self.is_convolution else lax.dot_general
            return function(lhs, rhs, *args, **settings)
        adapter = self.adapter()
        if self.rank_dropout and not self.deterministic:
            assert self.rngs is not None
            adapter = adapter.drop_ranks(self.rngs.dropout(), self.rank_dropout)
        function = adapter.convolution if self.is_convolution else adapter.dot_general
        return function(lhs, rhs, *args, **settings)


class LoHaLinear(nnx.Linear):
    """`nnx.Linear` with a LoHa adapter: y = x · (W + ΔW) + b, and ΔW = 0 at the start.

    Args:
      in_features: The size of x's last axis.
      out_features: The size of y's.
      rank: The rank of each of the two products; ΔW has rank up to rank².
      alpha: ΔW is scaled by alpha / rank; None: alpha = rank.
      rank_stabilized: Scale by alpha / √rank instead.
      rank_dropout: The probability of leaving out a rank of the first product while training.
      decompose: DoRA: normalize the columns of W + ΔW, and scale each by a trained magnitude.
      rngs: Streams "params" and, for rank dropout, "dropout".
      **linear: `nnx.Linear`'s own settings.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = LoHaLinear(6, 4, rank=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 6))).shape
      (1, 4)
      >>> sorted(nnx.state(layer, LoHaParam)["dot_general"])
      ['hada_w1_a', 'hada_w1_b', 'hada_w2_a', 'hada_w2_b']

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float | None = None,
        rank_stabilized: bool = False,
        rank_dropout: float = 0.0,
        decompose: bool = False,
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        config = LoHaConfig(rank, alpha, rank_stabilized, rank_dropout, decompose)
        super().__init__(in_features, out_features, rngs=rngs, **linear)
        with errors_of("LoHaLinear"):
            self.dot_general = nnx.data(new_adapter(self, config, rngs))


class LoHaConv(nnx.Conv):
    """`nnx.Conv` with a LoHa adapter of its kernel as a matrix (window · in) × out, or in the Tucker form.

    Args:
      in_features: The number of channels of x.
      out_features: The number of channels of y.
      kernel_size: The window.
      rank: As in `LoHaLinear`.
      alpha: As in `LoHaLinear`.
      rank_stabilized: As in `LoHaLinear`.
      rank_dropout: As in `LoHaLinear`.
      decompose: As in `LoHaLinear`.
      tucker: A core [*window, rank, rank] between factors [in, rank] and [rank, out]: fewer parameters.
      rngs: As in `LoHaLinear`.
      **conv: `nnx.Conv`'s own settings.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> from flax import nnx
      >>> layer = muonjax.nnx.LoHaConv(6, 4, (3, 3), rank=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 8, 8, 6))).shape
      (1, 8, 8, 4)

    Source: Hyeon-Woo et al., "FedPara", 2022; Yeh et al., "LyCORIS", 2024.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Any,
        *,
        rank: int,
        alpha: float | None = None,
        rank_stabilized: bool = False,
        rank_dropout: float = 0.0,
        decompose: bool = False,
        tucker: bool = False,
        rngs: nnx.Rngs,
        **conv: Any,
    ):
        config = LoHaConfig(rank, alpha, rank_stabilized, rank_dropout, decompose, tucker)
        super().__init__(in_features, out_features, kernel_size, rngs=rngs, **conv)
        with errors_of("LoHaConv"):
            self.conv_general_dilated = nnx.data(new_adapter(self, config, rngs))


def place_of(layer: Layer) -> Place:
    """The kernel's shape and the division of its axes."""
    shape = tuple(layer.kernel.shape)
    if isinstance(layer, nnx.Conv):
        window = len(layer.kernel_size)
        return Place(shape, window + 1, window)
    return Place(shape, np.size(layer.in_features))


def function_of(layer: Layer) -> str:
    """The attribute that holds the layer's product, which an adapter replaces."""
    return "conv_general_dilated" if isinstance(layer, nnx.Conv) else "dot_general"


def plain_function(layer: Layer) -> Any:
    """Flax's own value of this attribute; an `nnx.LinearGeneral` takes lax.dot_general when it is called."""
    return None if isinstance(layer, nnx.LinearGeneral) else getattr(lax, function_of(layer))


def new_adapter(layer: Layer, config: LoHaConfig, rngs: nnx.Rngs) -> LoHa:
    """An adapter of a layer, with ΔW = 0."""
    check_layer(layer)
    adapter = config.new_adapter(layer.kernel[...], rngs.params(), place_of(layer))
    is_convolution = isinstance(layer, nnx.Conv)
    return LoHa(adapter, is_convolution=is_convolution, rank_dropout=config.rank_dropout, rngs=rngs)


def adapter_of(layer: Layer) -> LoHa | None:
    """The layer's adapter, if it has one."""
    value = getattr(layer, function_of(layer))
    return value if isinstance(value, LoHa) else None


def check_layer(layer: Layer) -> None:
    """Raises ValueError for a layer without an adapter that can't have one, and for a stack of layers."""
    if isinstance(layer, nnx.Conv) and layer.mask is not None:
        raise ValueError("the convolution has a mask, and ΔW is not masked; remove the mask.")
    own_class = getattr(layer, "dot_general_cls", None)  # LinearGeneral prefers it to its dot_general
    is_plain = getattr(layer, function_of(layer)) is plain_function(layer) and own_class is None
    if not is_plain and adapter_of(layer) is None:
        raise ValueError(
            f"the layer multiplies by a {function_of(layer)} of its own, which an adapter would replace; leave it out."
        )
    if getattr(layer, "batch_axis", None):
        raise ValueError("the layer multiplies a batch of matrices; leave it out.")
    if layer.kernel.ndim != place_of(layer).inputs + np.size(layer.out_features):
        raise ValueError(
            f"this is a stack of layers, its kernel of shape {layer.kernel.shape}; make the stack of LoHaLinear, or "
            "adapt inside nnx.vmap."
        )
