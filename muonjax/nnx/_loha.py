"""The NNX door's layers with adapters: LoHa on a dense layer or a convolution.

Flax's layers take the function that multiplies, `dot_general` or `conv_general_dilated`. An adapter is a module
that takes this function's place: the layer, its kernel and the kernel's path stay what they were.
"""

from typing import Any

import jax
from flax import nnx
from jax import lax

from muonjax._adapters.adapter import Adapter, check_rate, fresh_adapter
from muonjax._adapters.names import CORES, FACTORS


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
    """The adapter of one layer, in place of its `dot_general` or `conv_general_dilated`.

    Attributes:
      hada_w1_a: a factor [in, rank].
      hada_w1_b: a factor [rank, out].
      hada_w2_a: a factor [in, rank].
      hada_w2_b: a factor [rank, out].
      hada_t1: a core [*window, rank, rank] of the Tucker form, or None.
      hada_t2: the other core, or None.
      dora_scale: DoRA's magnitude [out], or None.
      scale: alpha / rank, or alpha / √rank.
      merged: whether the kernel holds ΔW already; the adapter then multiplies plainly.

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
        cores = adapter.cores or (None, None)
        for name, value in zip((*FACTORS, *CORES), (*adapter.factors, *cores), strict=True):
            setattr(self, name, nnx.data(None if value is None else LoHaParam(value)))
        magnitude = adapter.magnitude
        self.dora_scale = nnx.data(None if magnitude is None else LoHaParam(magnitude))
        self.norms = nnx.data(None if magnitude is None else nnx.Variable(magnitude))
        self.scale = float(adapter.scale)
        self.is_convolution = is_convolution
        self.rank_dropout = rank_dropout
        self.rngs = nnx.data(rngs.fork() if rank_dropout and rngs is not None else None)
        self.deterministic = False
        self.merged = False

    def adapter(self) -> Adapter:
        """As plain arrays."""
        w1a, w1b, w2a, w2b = (getattr(self, name)[...] for name in FACTORS)
        t1, t2 = (getattr(self, name) for name in CORES)
        return Adapter(
            (w1a, w1b, w2a, w2b),
            self.scale,
            None if t1 is None else (t1[...], t2[...]),
            None if self.dora_scale is None else self.dora_scale[...],
        )

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        """What the function does in whose place this module stands, with rhs + ΔW."""
        if self.merged:
            return (lax.conv_general_dilated if self.is_convolution else lax.dot_general)(
                lhs, rhs, *args, **settings
            )
        adapter = self.adapter()
        if self.rank_dropout and not self.deterministic:
            assert self.rngs is not None
            adapter = adapter.drop_ranks(self.rngs.dropout(), self.rank_dropout)
        return (adapter.convolution if self.is_convolution else adapter.dot_general)(
            lhs, rhs, *args, **settings
        )


class LoHaLinear(nnx.Linear):
    """`nnx.Linear` with a LoHa adapter: y = x · (W + ΔW) + b, and ΔW = 0 at the start.

    Args:
      in_features: size of x's last axis.
      out_features: size of y's.
      rank: of each of the two products; ΔW has rank up to rank².
      alpha: ΔW is scaled by alpha / rank; None: alpha = rank.
      rank_stabilized: alpha / √rank instead.
      rank_dropout: the probability of leaving out a rank of the first product while training.
      decompose: DoRA: ΔW turns the columns, a magnitude of their own sizes them.
      rngs: streams "params" and, for rank dropout, "dropout".
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
        super().__init__(in_features, out_features, rngs=rngs, **linear)
        check_plain(self, "LoHaLinear")
        adapter = fresh_adapter(
            self.kernel[...],
            rngs.params(),
            rank=rank,
            alpha=alpha,
            rank_stabilized=rank_stabilized,
            decompose=decompose,
        )
        self.dot_general = nnx.data(LoHa(adapter, rank_dropout=rank_dropout, rngs=rngs))


class LoHaConv(nnx.Conv):
    """`nnx.Conv` with a LoHa adapter on its kernel, seen as a matrix (window · in) × out, or in the Tucker form.

    Args:
      in_features: channels of x.
      out_features: channels of y.
      kernel_size: the window.
      rank: of each of the two products.
      alpha: as in `LoHaLinear`.
      rank_stabilized: as in `LoHaLinear`.
      rank_dropout: as in `LoHaLinear`.
      decompose: as in `LoHaLinear`.
      tucker: a core [*window, rank, rank] between factors [in, rank] and [rank, out]: fewer parameters.
      rngs: as in `LoHaLinear`.
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
        super().__init__(in_features, out_features, kernel_size, rngs=rngs, **conv)
        check_plain(self, "LoHaConv")
        adapter = fresh_adapter(
            self.kernel[...],
            rngs.params(),
            rank=rank,
            alpha=alpha,
            rank_stabilized=rank_stabilized,
            decompose=decompose,
            window=self.kernel.ndim - 2,
            tucker=tucker,
        )
        self.conv_general_dilated = nnx.data(
            LoHa(adapter, is_convolution=True, rank_dropout=rank_dropout, rngs=rngs)
        )


def function_of(layer: nnx.Linear | nnx.LinearGeneral | nnx.Conv) -> str:
    """The attribute of a Flax layer that multiplies, in whose place an adapter stands."""
    return "conv_general_dilated" if isinstance(layer, nnx.Conv) else "dot_general"


def plain_function(layer: nnx.Linear | nnx.LinearGeneral | nnx.Conv) -> Any:
    """What Flax puts there."""
    if isinstance(layer, nnx.LinearGeneral):
        return None  # it then takes lax.dot_general when called
    return lax.conv_general_dilated if isinstance(layer, nnx.Conv) else lax.dot_general


def check_plain(layer: nnx.Linear | nnx.LinearGeneral | nnx.Conv, call: str) -> None:
    """Raises ValueError for a layer whose product an adapter can't replace."""
    if isinstance(layer, nnx.Conv) and layer.mask is not None:
        raise ValueError(
            f"{call}: an adapter would fill the holes of the convolution's mask; remove the mask."
        )
    # LinearGeneral's dot_general_cls goes before its dot_general.
    own_class = getattr(layer, "dot_general_cls", None)
    if getattr(layer, function_of(layer)) is not plain_function(layer) or own_class is not None:
        raise ValueError(
            f"{call}: the layer multiplies by a {function_of(layer)} of its own, which an adapter would replace; "
            "leave it out."
        )
