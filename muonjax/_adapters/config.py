"""The settings of a LoHa adapter, its shapes and its initial values for a given kernel."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from muonjax._adapters.adapter import CORES, FACTORS, SCALE, Adapter
from muonjax._adapters.hadamard import column_norms


class Place(NamedTuple):
    """The kernel that an adapter belongs to: its shape, and how its axes divide.

    Attributes:
      shape: The kernel's shape, [*in, *out] or [*window, in, out].
      inputs: The number of its first axes that are summed over, the window's among them.
      window: The number of its first axes that are a convolution's window; 0 for a dense kernel.
    """

    shape: tuple[int, ...]
    inputs: int
    window: int = 0

    @property
    def window_size(self) -> int:
        """The number of positions in the window."""
        return math.prod(self.shape[: self.window])

    @property
    def rows(self) -> int:
        """The number of input features, at all positions of the window."""
        return math.prod(self.shape[: self.inputs])

    @property
    def outputs(self) -> int:
        """The number of output features."""
        return math.prod(self.shape[self.inputs :])


@dataclasses.dataclass(frozen=True)
class LoHaConfig:
    """The settings that all layers with LoHa adapters share; see `muonjax.linen.loha` for their meaning."""

    rank: int
    alpha: float | None = None
    rank_stabilized: bool = False
    rank_dropout: float = 0.0
    decompose: bool = False
    tucker: bool = False

    def __post_init__(self):
        check_rate(self.rank_dropout)
        if self.alpha is not None and not math.isfinite(self.alpha):
            raise ValueError(f"alpha={self.alpha} must be finite; None is alpha = rank.")

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / √rank (Kalajdzievski, "Rank-Stabilized LoRA", 2023); None: alpha = rank."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def shapes(self, place: Place) -> dict[str, tuple[int, ...]]:
        """The shapes of an adapter's factors and cores by name.

        Raises:
          ValueError: If the rank or the Tucker form does not fit the kernel.
        """
        m, n = place.rows, place.outputs
        cores = {}
        if self.tucker and place.window:
            m //= place.window_size
            cores = dict.fromkeys(CORES, (*place.shape[: place.window], self.rank, self.rank))
        if not 0 < self.rank <= min(m, n):
            raise ValueError(
                f"rank={self.rank} is not possible for a LoHa adapter of a kernel of shape {place.shape}, a "
                f"matrix {m} × {n}; choose 1 to {min(m, n)}."
            )
        if self.tucker and not place.window:
            raise ValueError(
                f"tucker=True is for convolutions; the kernel of shape {place.shape} has no window."
            )
        return dict(zip(FACTORS, ((m, self.rank), (self.rank, n)) * 2, strict=True)) | cores

    def new_adapter(self, kernel: jax.Array, key: jax.Array, place: Place) -> Adapter:
        """An adapter of `kernel` with ΔW = 0; its factors have the kernel's dtype. See `shapes`."""
        shapes = self.shapes(place)
        keys = jax.random.split(key, len(shapes))
        values: dict[str, Any] = {
            name: initial(name, one, shape, kernel.dtype)
            for (name, shape), one in zip(shapes.items(), keys, strict=True)
        }
        magnitude = column_norms(kernel.reshape(-1, place.outputs)) if self.decompose else None
        return Adapter.of(values | {SCALE: self.scale})._replace(magnitude=magnitude)


def check_rate(rank_dropout: float) -> None:
    """Raises ValueError unless `rank_dropout` is a probability below 1."""
    if not 0.0 <= rank_dropout < 1.0:
        raise ValueError(f"rank_dropout={rank_dropout} must be at least 0 and below 1.")


def initial(name: str, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """LyCORIS's initialization: normal, with standard deviation 1 on the inputs' side, 0.1 on the outputs' and in
    the cores; but the second factor on the outputs' side is zero, so that ΔW = 0 at the start."""
    deviation = {"hada_w1_a": 1.0, "hada_w2_a": 1.0, "hada_w2_b": 0.0}.get(name, 0.1)
    return deviation * jax.random.normal(key, tuple(shape), dtype)
