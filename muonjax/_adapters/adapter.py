"""One LoHa adapter of one layer as plain arrays, and the names of its arrays in parameter trees and files.

An adapter sees a layer's kernel as a matrix [in, out]: a dense kernel [*in, *out] by flattening each side, a
convolution's [*window, in, out] as (window·in) × out, or in the Tucker form by a core in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._adapters.hadamard import column_norms, common_dtype, hadamard_weight
from muonjax._adapters.hadamard_dot import hadamard_linear
from muonjax._linalg import at_least_float32
from muonjax._trees import names

if TYPE_CHECKING:
    from jaxtyping import Array, Float

FACTORS: tuple[str, str, str, str] = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
CORES: tuple[str, str] = ("hada_t1", "hada_t2")
SCALE: str = "hada_scale"
MAGNITUDE: str = "dora_scale"
TRAINED = (*FACTORS, *CORES, MAGNITUDE)

_BLOCKS = 4  # of a convolution's output channels, at most
_LEAST_CHANNELS = 64  # in a block


class Adapter(NamedTuple):
    """What is added to one kernel: ΔW of `hadamard_weight`, and DoRA's magnitude.

    Attributes:
      factors: w1a [m, r], w1b [r, n], w2a [m, r], w2b [r, n].
      scale: alpha / r, or alpha / √r if rank-stabilized.
      cores: None, or the Tucker form's two [*window, r, r].
      magnitude: None, or DoRA's, [n].
    """

    factors: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    scale: jax.Array | float = 1.0
    cores: tuple[jax.Array, jax.Array] | None = None
    magnitude: jax.Array | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Adapter:
        """The adapter of arrays by name, as parameter trees hold them, with the scale under `SCALE`."""
        w1a, w1b, w2a, w2b = (values[name] for name in FACTORS)
        cores = (values[CORES[0]], values[CORES[1]]) if CORES[0] in values else None
        return cls((w1a, w1b, w2a, w2b), values[SCALE], cores, values.get(MAGNITUDE))

    def named(self) -> dict[str, Any]:
        """The arrays that train, by the same names."""
        values = (*self.factors, *(self.cores or (None, None)), self.magnitude)
        return {name: value for name, value in zip(TRAINED, values, strict=True) if value is not None}

    def delta(self, shape: Sequence[int]) -> jax.Array:
        """ΔW in the kernel's shape."""
        self.check(shape)
        return hadamard_weight(*self.factors, scale=self.scale, tucker=self.cores).reshape(shape)

    def check(self, shape: Sequence[int]) -> None:
        """Raises ValueError unless the adapter fits a kernel of this shape."""
        m, n = self.factors[0].shape[-2], self.factors[1].shape[-1]
        made = (*self.cores[0].shape[:-2], m, n) if self.cores else (m, n)
        fits = tuple(shape) == made if self.cores else math.prod(shape) == m * n
        if not fits or (self.magnitude is not None and self.magnitude.shape != (n,)):
            raise ValueError(f"A LoHa adapter of {made} does not fit a kernel of shape {tuple(shape)}.")

    def merge(
        self, kernel: Float[Array, "*kernel"]
    ) -> tuple[Float[Array, "*kernel"], Float[Array, " n"] | None]:
        """The kernel with ΔW and the magnitude in it, and the norms that `unmerge` needs if there is a magnitude."""
        delta = self.delta(kernel.shape)
        dtype = at_least_float32(common_dtype(kernel, delta))
        merged = kernel.astype(dtype) + delta.astype(dtype)
        if self.magnitude is None:
            return merged.astype(kernel.dtype), None
        columns = merged.reshape(-1, self.magnitude.shape[0])
        norms = column_norms(columns)
        columns = columns * self._gain(norms)
        return columns.reshape(kernel.shape).astype(kernel.dtype), norms

    def unmerge(
        self, merged: Float[Array, "*kernel"], norms: Float[Array, " n"] | None = None
    ) -> Float[Array, "*kernel"]:
        """The kernel before `merge`, to rounding."""
        delta = self.delta(merged.shape)
        dtype = at_least_float32(common_dtype(merged, delta))
        kernel = merged.astype(dtype)
        if self.magnitude is not None:
            if norms is None:
                raise ValueError(
                    "unmerge of an adapter with a magnitude needs the norms that merge returned."
                )
            columns = kernel.reshape(-1, self.magnitude.shape[0])
            kernel = (columns / self._gain(norms).astype(dtype)).reshape(kernel.shape)
        return (kernel - delta.astype(dtype)).astype(merged.dtype)

    def _gain(self, norms: Float[Array, " n"]) -> Float[Array, "1 n"]:
        """Magnitude over norm of each column."""
        assert self.magnitude is not None
        return (self.magnitude.astype(norms.dtype) / (norms + jnp.finfo(norms.dtype).eps))[None]

    def drop_ranks(self, key: jax.Array, rate: float) -> Adapter:
        """Zeroes each of the first pair's ranks with probability `rate`; scales up the others to keep ΔW's mean."""
        w1a, w1b, w2a, w2b = self.factors
        kept = jax.random.bernoulli(key, 1.0 - rate, (w1a.shape[-1],))
        return self._replace(factors=(w1a * (kept.astype(w1a.dtype) / (1.0 - rate))[None], w1b, w2a, w2b))

    def dot_general(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: lax.PrecisionLike = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`jax.lax.dot_general(lhs, rhs + ΔW, …)`, with the signature by which Flax's dense layers call it."""
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
        dtype = preferred_element_type or common_dtype(lhs, rhs)
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
            """`count` output channels from `start`, with the kernel of these channels alone."""
            b1, b2, kernel, magnitude = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, start, count, axis=-1), (w1b, w2b, rhs, self.magnitude)
            )
            kernel, _ = self._replace(factors=(w1a, b1, w2a, b2), magnitude=magnitude).merge(kernel)
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


def adapter_mask(params: Any) -> Any:
    """A tree like `params` of bools: True for what trains in an adapter, False for everything else.

    For `optax.masked`, which passes on unchanged what it masks out: set that to zero (see the example). To
    differentiate the adapters alone is cheaper, since frozen kernels then get no gradient
    (`muonjax.linen.split_adapters`; in NNX, `nnx.DiffState(0, LoHaParam)`).

    Args:
      params: A tree of parameters, Linen's or the pure state of an NNX model; leaves of any shape.

    Returns:
      A tree of bools like `params`.

    Example:
      >>> import optax
      >>> params = {"kernel": 1.0, "loha": {"hada_w1_a": 2.0, "hada_scale": 0.5}}
      >>> adapter_mask(params)
      {'kernel': False, 'loha': {'hada_scale': False, 'hada_w1_a': True}}
      >>> labels = jax.tree.map(lambda trains: "train" if trains else "freeze", adapter_mask(params))
      >>> tx = optax.partition({"train": optax.adam(1e-3), "freeze": optax.set_to_zero()}, labels)
    """

    def trains(path: Any, _: Any) -> bool:
        return bool(path) and names(path)[-1] in TRAINED

    return jax.tree_util.tree_map_with_path(trains, params)
