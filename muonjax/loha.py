"""The product with an adapted kernel, x · (W + ΔW),
whose derivative keeps the factors of ΔW and no large matrix.

ΔW = scale · (w1a·w1b) ∘ (w2a·w2b) has rank up to r² from four thin factors. Its derivative needs
both products, and the derivative of x · (W + ΔW) needs the sum; each is as large as W.
`multiply` computes them again instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._common.arguments import (
    check_precision,
    check_range,
    errors_of,
    whole_number,
)
from muonjax._common.linalg import at_least_float32, common_dtype
from muonjax._common.trees import names

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def hadamard_linear(
    x: Float[Array, "*tokens m"],
    w: Float[Array, "m n"],
    w1a: Float[Array, "m r"],
    w1b: Float[Array, "r n"],
    w2a: Float[Array, "m r"],
    w2b: Float[Array, "r n"],
    *,
    scale: Float[Array, ""] | float = 1.0,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*tokens n"]:
    """A linear map with a low-rank Hadamard adapter:

        y = x · (W + ΔW),  ΔW = scale · (w1a · w1b) ∘ (w2a · w2b)

    The derivative keeps only the arguments: W + ΔW and the two products are computed again in the
    backward pass. Forward mode, reverse mode, `vmap`, `shard_map` and higher orders work.

    Args:
      x: Tokens, [..., m].
      w: The weight, [m, n], usually frozen: its gradient would be an m × n matrix.
      w1a: The first pair's left factor, [m, r].
      w1b: Its right factor, [r, n].
      w2a: The second pair's left factor, [m, r].
      w2b: Its right factor, [r, n].
      scale: Usually alpha / r; differentiable.
      precision: The precision of the products, as in `jax.lax.dot_general`.

    Returns:
      [..., n].

    Raises:
      ValueError: If a shape does not fit, or the scale is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> a, b = jnp.ones((2, 1)), jnp.array([[1.0, 2.0, 3.0]])
      >>> hadamard_linear(jnp.ones((1, 2)), jnp.ones((2, 3)), a, b, a, b)
      Array([[ 4., 10., 20.]], dtype=float32)

    Source: Hyeon-Woo et al., "FedPara: Low-Rank Hadamard Product for Communication-Efficient
    Federated Learning" (2022), proposition 1; Yeh et al., "Navigating Text-To-Image Customization:
    From LyCORIS Fine-Tuning to Model Evaluation" (2024), as LoHa.
    """
    # Layers call `multiply` themselves, and need no checks.
    factors = (w1a, w1b, w2a, w2b)
    with errors_of("hadamard_linear"):
        _check(x, w, factors)
        check_precision(precision)
        check_range("scale", scale, "finite", "; alpha / r is usual.")
    # The product has the precision of x and w: a layer in half precision may hold its factors in
    # float32.
    dtype = common_dtype(x, w)
    # The sums have that of all arguments, as those of a plain layer with a float32 parameter do.
    result_dtype = common_dtype(x, w, *factors)

    return multiply(
        jnp.matmul,
        x.astype(dtype),
        w.astype(dtype),
        factors,
        scale,
        precision=precision,
        preferred_element_type=result_dtype,
    )


def multiply(
    function: Callable[..., jax.Array],
    x: jax.Array,
    kernel: jax.Array,
    factors: Sequence[jax.Array],
    scale: jax.Array | float,
    *args: Any,
    **settings: Any,
) -> jax.Array:
    """`function(x, kernel + ΔW, *args, **settings)`, whose derivative keeps x, kernel and factors.

    The function is `jnp.matmul`, `lax.dot_general` or `lax.conv_general_dilated`, as Flax's layers
    call them, or the user's own in a layer. Its precision is that of ΔW, too.

    kernel + ΔW is as large as the kernel, so it is computed again for the derivative. It depends
    neither on x nor on a cotangent: the compiler might compute it for all layers at the beginning,
    and they would all be in memory. The barrier here lets it begin when x is known, and that of
    `jax.checkpoint` when the cotangent is.
    """
    precision = settings.get("precision")

    @jax.checkpoint
    def call(x, kernel, factors, scale):
        x, factors = lax.optimization_barrier((x, factors))
        adapted = adapted_kernel(kernel, factors, scale, precision)
        return function(x, adapted, *args, **settings)

    return call(x, kernel, factors, scale)


def adapted_kernel(
    kernel: Float[Array, "*kernel"],
    factors: Sequence[jax.Array],
    scale: jax.Array | float,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*kernel"]:
    """kernel + ΔW in the kernel's shape and dtype, computed in float32 at least and rounded once.

    The arguments may be stacks of layers along leading axes;
    then the scale has one number for each layer.
    """
    # [m, r], [r, n], [m, r], [r, n], with m the inputs and n the outputs of the kernel: 54 and 4 of
    # a convolution (3, 3, 6, 4), d and heads · size of an attention's query (d, heads, size)
    w1a, w1b, w2a, w2b = factors
    # A layer in half precision may hold its factors in float32.
    dtype = at_least_float32(kernel, *factors)
    product = functools.partial(
        jnp.matmul, precision=precision, preferred_element_type=dtype
    )
    # ΔW = scale · (w1a · w1b) ∘ (w2a · w2b), [m, n]; of a stack of layers,
    # a scale [layers] times [layers, m, n]
    first = product(w1a, w1b)
    second = product(w2a, w2b)
    delta = jnp.asarray(scale)[..., None, None].astype(dtype) * first * second
    adapted = kernel.astype(dtype) + delta.reshape(kernel.shape)
    return adapted.astype(kernel.dtype)


def _check(x: Any, w: Any, factors: Sequence[Any]) -> None:
    """Raises unless x is [..., m], w is [m, n], and the factors are [m, r], [r, n], [m, r],
    [r, n]."""
    shapes = [array.shape for array in (w, *factors)]
    # Each is a tuple of one number. Another shape than these could broadcast.
    m, n, r = x.shape[-1:], w.shape[-1:], factors[0].shape[-1:]
    if shapes != [m + n, m + r, r + n, m + r, r + n] or 0 in (*w.shape, *r):
        raise ValueError(
            "needs x [..., m], w [m, n], w1a and w2a [m, r], w1b and w2b [r, n], none of them "
            "empty; got x "
            f"{x.shape}, w and factors {shapes}. Are w1a and w1b exchanged? Use jax.vmap for a "
            "stack."
        )


# What the layers of Linen and NNX share.

# The factors w1a, w1b, w2a and w2b as LyCORIS names them, and the standard deviation of each at the
# start: 1 on the inputs' side and 0.1 on the outputs';
# but the second factor on the outputs' side is zero, so that ΔW = 0.
FACTORS = {"hada_w1_a": 1.0, "hada_w1_b": 0.1, "hada_w2_a": 1.0, "hada_w2_b": 0.0}
SCALE = "hada_scale"


def scale_of(rank: int, alpha: float | None) -> float:
    """alpha / rank; None is alpha = rank."""
    rank = whole_number("rank", rank, 1, ", 1 or more.")
    if alpha is None:
        return 1.0
    check_range("alpha", alpha, "positive and finite", "; None is alpha = rank.")
    return alpha / rank


def factor_shapes(
    kernel: Sequence[int], inputs: int, rank: int
) -> dict[str, tuple[int, int]]:
    """The shapes of a kernel's four factors, by name, for a kernel whose first `inputs` axes are
    summed over.

    A convolution (3, 3, 6, 4) has three such axes, so it is a matrix 54 × 4. For rank 2 its factors
    w1a and w2a are [54, 2], and w1b and w2b [2, 4].
    """
    m = math.prod(kernel[:inputs])
    n = math.prod(kernel[inputs:])
    # At this rank w1a · w1b can be any matrix m × n: a larger one would only cost more.
    if rank > min(m, n):
        raise ValueError(
            f"rank={rank} is not possible for a matrix {m} × {n}; choose 1 to {min(m, n)}."
        )
    # FACTORS has w1a, w1b, w2a and w2b in this order.
    pair = ((m, rank), (rank, n))
    return dict(zip(FACTORS, pair * 2, strict=True))


def initial(name: str, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """The random factor with this name, normal, as LyCORIS draws it."""
    return FACTORS[name] * jax.random.normal(key, tuple(shape), dtype)


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
      >>> mask = adapter_mask(params)
      >>> labels = jax.tree.map(lambda trains: "train" if trains else "freeze", mask)
      >>> tx = optax.partition({"train": optax.adam(1e-3), "freeze": optax.set_to_zero()}, labels)
    """
    # A leaf trains if its last name is a factor's; `hada_scale`, the scale of ΔW, is no factor. A
    # tree that is one array or one `nnx.Param` has no name: then `[-1:]` is empty, and it is False.
    return jax.tree_util.tree_map_with_path(
        lambda path, _: bool(FACTORS.keys() & names(path)[-1:]), params
    )
