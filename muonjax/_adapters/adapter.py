"""Beside the way of the gradient: one LoHa adapter at one layer, as plain arrays; the two Flax doors hold it.

An adapter sees a layer's kernel as a matrix [in, out]: a dense kernel [*in, *out] by flattening each side, a
convolution's [*window, in, out] as (window·in) × out, or in the Tucker form by a core in between.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._adapters.hadamard import column_norms, hadamard_weight
from muonjax._adapters.hadamard_dot import hadamard_linear
from muonjax._adapters.names import CORES, FACTORS, MAGNITUDE, SCALE

_LEAST_CHANNELS = 64  # in a block of a convolution's output channels
_BLOCKS = 4


class Adapter(NamedTuple):
    """What is added to one kernel: ΔW of `hadamard_weight`, and DoRA's magnitude.

    Attributes:
      factors: w1a [m, r], w1b [r, n], w2a [m, r], w2b [r, n].
      scale: alpha / r, or alpha / √r if rank-stabilized.
      cores: None, or the Tucker form's two [*window, r, r].
      magnitude: None, or DoRA's [n].
    """

    factors: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    scale: jax.Array | float = 1.0
    cores: tuple[jax.Array, jax.Array] | None = None
    magnitude: jax.Array | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Adapter":
        """From arrays by the names that parameter trees and files give them, and the scale by `SCALE`."""
        w1a, w1b, w2a, w2b = (values[name] for name in FACTORS)
        cores = (values[CORES[0]], values[CORES[1]]) if CORES[0] in values else None
        return cls((w1a, w1b, w2a, w2b), values[SCALE], cores, values.get(MAGNITUDE))

    def named(self) -> dict[str, Any]:
        """What trains, by the same names."""
        values = dict(zip(FACTORS, self.factors, strict=True))
        if self.cores is not None:
            values |= dict(zip(CORES, self.cores, strict=True))
        if self.magnitude is not None:
            values[MAGNITUDE] = self.magnitude
        return values

    def delta(self, shape: Sequence[int]) -> jax.Array:
        """ΔW in the kernel's shape."""
        self.check(shape)
        return hadamard_weight(*self.factors, scale=self.scale, tucker=self.cores).reshape(shape)

    def check(self, shape: Sequence[int]) -> None:
        """Raises ValueError unless the adapter is one for a kernel of this shape."""
        m, n = self.factors[0].shape[-2], self.factors[1].shape[-1]
        made = (*self.cores[0].shape[:-2], m, n) if self.cores else (m, n)
        fits = tuple(shape) == made if self.cores else math.prod(shape) == m * n
        if not fits or (self.magnitude is not None and self.magnitude.shape != (n,)):
            raise ValueError(f"A LoHa adapter of {made} does not fit a kernel of shape {tuple(shape)}.")

    def merge(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The kernel that alone does what both did, and the norms that `unmerge` needs under a magnitude."""
        merged = kernel.astype(_wide(kernel)) + self.delta(kernel.shape)
        if self.magnitude is None:
            return merged.astype(kernel.dtype), None
        columns = merged.reshape(-1, self.magnitude.shape[0])
        norms = column_norms(columns)
        columns = columns * (self.magnitude / (norms + jnp.finfo(norms.dtype).eps))
        return columns.reshape(kernel.shape).astype(kernel.dtype), norms

    def unmerge(self, merged: jax.Array, norms: jax.Array | None = None) -> jax.Array:
        """The kernel before `merge`, to rounding."""
        kernel = merged.astype(_wide(merged))
        if self.magnitude is not None:
            if norms is None:
                raise ValueError("unmerge under a magnitude needs the norms that merge returned.")
            columns = kernel.reshape(-1, self.magnitude.shape[0])
            kernel = (columns * ((norms + jnp.finfo(norms.dtype).eps) / self.magnitude)).reshape(kernel.shape)
        return (kernel - self.delta(merged.shape)).astype(merged.dtype)

    def drop_ranks(self, key: jax.Array, rate: float) -> "Adapter":
        """Each of the first pair's r ranks zeroed with probability `rate`, the others scaled up to keep ΔW's mean."""
        w1a, w1b, w2a, w2b = self.factors
        kept = jax.random.bernoulli(key, 1.0 - rate, (w1a.shape[-1],)) / (1.0 - rate)
        return self._replace(factors=(w1a * kept.astype(w1a.dtype), w1b, w2a, w2b))

    def dot_general(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: lax.PrecisionLike = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`jax.lax.dot_general(lhs, rhs + ΔW, …)`, for the dense layers of Flax, which call it by this signature."""
        (axes, kernel_axes), (batch, kernel_batch) = dimension_numbers
        count = len(kernel_axes)
        if batch or kernel_batch or tuple(kernel_axes) != tuple(range(count)) or out_sharding is not None:
            raise ValueError(
                f"A LoHa adapter needs a kernel [*in, *out] without a batch of matrices and without out_sharding, "
                f"got dimension_numbers={dimension_numbers} and a kernel of shape {rhs.shape}."
            )
        self.check(rhs.shape)
        x = jnp.moveaxis(lhs, axes, range(lhs.ndim - count, lhs.ndim))
        rows, outputs = x.shape[: lhs.ndim - count], rhs.shape[count:]
        m = math.prod(rhs.shape[:count])
        y = hadamard_linear(
            x.reshape(*rows, m),
            rhs.reshape(m, -1),
            *self.factors,
            scale=self.scale,
            magnitude=self.magnitude,
            precision=precision,
        )
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        return y.reshape(*rows, *outputs).astype(dtype)

    def convolution(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        *args: Any,
        feature_group_count: int = 1,
        **settings: Any,
    ) -> jax.Array:
        """`jax.lax.conv_general_dilated(lhs, rhs + ΔK, …)` with channels last, as Flax's convolutions call it."""
        self.check(rhs.shape)
        channels = rhs.shape[-1]
        w1a, w1b, w2a, w2b = self.factors

        def outputs(start: jax.Array | int, count: int) -> jax.Array:
            """The output channels from `start`: a block of the kernel is all that exists at a time."""
            b1, b2 = (lax.dynamic_slice_in_dim(b, start, count, axis=1) for b in (w1b, w2b))
            part = lax.dynamic_slice_in_dim(rhs, start, count, axis=rhs.ndim - 1)
            magnitude = self.magnitude
            if magnitude is not None:
                magnitude = lax.dynamic_slice_in_dim(magnitude, start, count)
            kernel, _ = self._replace(factors=(w1a, b1, w2a, b2), magnitude=magnitude).merge(part)
            return lax.conv_general_dilated(
                lhs, kernel, *args, feature_group_count=feature_group_count, **settings
            )

        outputs = jax.checkpoint(outputs, static_argnums=1)
        most = min(_BLOCKS, max(1, channels // _LEAST_CHANNELS))
        blocks = next(blocks for blocks in range(most, 0, -1) if channels % blocks == 0)
        if feature_group_count > 1 or blocks == 1:
            return outputs(0, channels)
        count = channels // blocks
        y = lax.map(lambda start: outputs(start, count), jnp.arange(blocks) * count)
        return jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], channels)


def scale_of(rank: int, alpha: float | None, rank_stabilized: bool) -> float:
    """alpha / rank, or alpha / √rank (Kalajdzievski, "Rank-Stabilized LoRA", 2023); None: alpha = rank."""
    return (rank if alpha is None else alpha) / (math.sqrt(rank) if rank_stabilized else rank)


def factor_shapes(
    shape: Sequence[int], inputs: int, rank: int, tucker: bool, window: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter for a kernel of `shape`, whose first `inputs` axes are summed over.

    Args:
      window: how many of the first axes are a convolution's window; 0 for a dense kernel.
    """
    m, n = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    cores = {}
    if tucker and window:
        m = math.prod(shape[window:inputs])
        cores = dict.fromkeys(CORES, (*shape[:window], rank, rank))
    if not 0 < rank <= min(m, n):
        raise ValueError(
            f"rank={rank} is not possible for a LoHa adapter of a kernel of shape {tuple(shape)}, a matrix "
            f"{m} × {n}; choose 1 to {min(m, n)}."
        )
    if tucker and not window:
        raise ValueError(
            f"tucker=True is for convolutions; the kernel of shape {tuple(shape)} has no window."
        )
    return dict(zip(FACTORS, ((m, rank), (rank, n)) * 2, strict=True)) | cores


def initial(name: str, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """LyCORIS's initialization: normal, of deviation 1 on the inputs' side and 0.1 on the outputs' and in the
    cores, but zero for the second output factor, so that ΔW = 0 at the start."""
    deviation = {"hada_w1_a": 1.0, "hada_w2_a": 1.0, "hada_w2_b": 0.0}.get(name, 0.1)
    return deviation * jax.random.normal(key, tuple(shape), dtype)


def fresh_adapter(
    kernel: jax.Array,
    key: jax.Array,
    *,
    rank: int,
    alpha: float | None = None,
    rank_stabilized: bool = False,
    decompose: bool = False,
    inputs: int = -1,
    window: int = 0,
    tucker: bool = False,
) -> Adapter:
    """An adapter of `kernel` that changes nothing yet; its factors have the kernel's dtype.

    Args:
      inputs: how many of the kernel's first axes are summed over; negative: all but as many last ones.
    """
    inputs %= kernel.ndim
    shapes = factor_shapes(kernel.shape, inputs, rank, tucker, window)
    values = {
        name: initial(name, one, shape, kernel.dtype)
        for (name, shape), one in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    }
    w1a, w1b, w2a, w2b = (values[name] for name in FACTORS)
    return Adapter(
        (w1a, w1b, w2a, w2b),
        scale_of(rank, alpha, rank_stabilized),
        (values[CORES[0]], values[CORES[1]]) if tucker else None,
        column_norms(kernel.reshape(-1, w1b.shape[1])) if decompose else None,
    )


def check_rate(rate: float) -> None:
    """Raises ValueError unless `rate` is a probability of dropping that leaves something."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"rank_dropout={rate} must be at least 0 and below 1.")


def _wide(kernel: jax.Array) -> Any:
    return jnp.promote_types(kernel.dtype, jnp.float32)
