"""What the LoHa layers of Linen and NNX share: the factors of a kernel, the adapted product, the mask."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from muonjax._common.arguments import check_range, is_whole
from muonjax._common.trees import names
from muonjax.loha.hadamard_linear import multiply

FACTORS: tuple[str, str, str, str] = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
SCALE: str = "hada_scale"


def scale_of(call: str, rank: int, alpha: float | None) -> float:
    """alpha / rank; None is alpha = rank."""
    if not is_whole(rank) or rank < 1:
        raise ValueError(f"{call}(rank={rank!r}) needs a whole number, 1 or more.")
    if alpha is None:
        return 1.0
    check_range(call, "alpha", alpha, "positive and finite", "; None is alpha = rank.")
    return alpha / rank


def factor_shapes(call: str, kernel: Sequence[int], inputs: int, rank: int) -> dict[str, tuple[int, int]]:
    """The shapes of a kernel's factors by name; the first `inputs` axes of the kernel are summed over."""
    m, n = math.prod(kernel[:inputs]), math.prod(kernel[inputs:])
    if rank > min(m, n):
        raise ValueError(
            f"{call}: rank={rank} is not possible for a kernel of shape {tuple(kernel)}, a matrix {m} × {n}; "
            f"choose 1 to {min(m, n)}."
        )
    return dict(zip(FACTORS, ((m, rank), (rank, n)) * 2, strict=True))


def initial(name: str, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """LyCORIS's initialization: normal, with standard deviation 1 on the inputs' side and 0.1 on the outputs'; but
    the second factor on the outputs' side is zero, so that ΔW = 0 at the start."""
    deviation = {"hada_w1_a": 1.0, "hada_w1_b": 0.1, "hada_w2_a": 1.0, "hada_w2_b": 0.0}[name]
    return deviation * jax.random.normal(key, tuple(shape), dtype)


def apply_adapter(
    function: Callable[..., jax.Array],
    factors: Sequence[jax.Array],
    scale: jax.Array | float,
    lhs: jax.Array,
    rhs: jax.Array,
    *args: Any,
    **settings: Any,
) -> jax.Array:
    """`function(lhs, rhs + ΔW, …)` for `lax.dot_general` or `lax.conv_general_dilated`, as Flax's layers call them."""
    if function is lax.dot_general:
        (_, summed), (_, batch) = dimension_numbers = args[0] if args else settings["dimension_numbers"]
        if batch or tuple(summed) != tuple(range(len(summed))):
            raise ValueError(
                f"A LoHa adapter needs a kernel [*in, *out] without a batch of matrices, got dimension_numbers="
                f"{dimension_numbers} and a kernel of shape {rhs.shape}."
            )

    precision = settings.get("precision")
    return multiply(lambda x, w: function(x, w, *args, **settings), lhs, rhs, factors, scale, precision)


def adapter_mask(params: Any) -> Any:
    """A tree like `params` of bools: True for what trains in an adapter, False for everything else.

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

    return jax.tree_util.tree_map_with_path(lambda path, _: bool(path) and names(path)[-1] in FACTORS, params)
