"""The public function `symmetric_product`: check its arguments, choose an implementation,
define its derivative."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import _hopper_product, _xla_product
from pallas_kernels._platform_of import platform_of
from pallas_kernels._xla_product import Operands

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact

IMPLEMENTATIONS = ("reference", "blocked", "hopper")

_DTYPES = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")


def symmetric_product(
    x: Inexact[Array, "*batch m k"],
    *,
    y: Inexact[Array, "*batch m k"] | None = None,
    c: Inexact[Array, "*batch m m"] | None = None,
    alpha: jax.typing.ArrayLike = 1.0,
    beta: jax.typing.ArrayLike = 0.0,
    implementation: str | None = None,
) -> Inexact[Array, "*batch m m"]:
    """Multiply matrices whose product is known to be symmetric, and return it exactly symmetric.

    ```
    S = alpha·X Yᵀ + beta·C
    ```

    Only the lower triangles of ``X Yᵀ`` and of C are used; the upper triangle of S is the mirror
    image of the lower, so that ``S == S.mT`` holds bit for bit. Products are accumulated in float32
    for half types, C is added before the one rounding to the result's dtype, and float32 is true
    float32 (TF32 and bfloat16 passes are used only where `jax.default_matmul_precision` asks for
    them). Complex arrays give ``X Yᴴ``, Hermitian.

    Differentiable in forward and reverse mode, and under `jax.vmap`. On a mesh, call it inside
    `jax.shard_map`, as a kernel must be.

    Args:
      x: [*batch, m, k], floating or complex.
      y: the same shape and dtype. The caller must know that the product is symmetric, such as A·B
        of commuting symmetric matrices. Default: X itself.
      c: [*batch, m, m], symmetric, in X's dtype. Default: nothing is added.
      alpha: real; a number, or one for each matrix, [*batch]. May be traced.
      beta: as `alpha`; counts only where `c` is given.
      implementation: `None` for the rule in `_choose`; ``"reference"``: one full product of XLA's;
        ``"blocked"``: the lower triangle in blocks, in plain XLA, any platform; ``"hopper"``: a
        Pallas kernel for NVIDIA's H100 and H200. If you name one, it runs or raises an error.

    Returns:
      [*batch, m, m], in X's dtype.

    Raises:
      ValueError: shapes, dtypes or an `implementation` that don't fit.
      NotImplementedError: a named implementation that can't run here, with the reason.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import symmetric_product
      >>> x = jnp.array([[1.0, 2.0], [0.0, 3.0]])
      >>> symmetric_product(x, c=jnp.eye(2), alpha=2.0, beta=1.0)
      Array([[11., 12.],
             [12., 19.]], dtype=float32)
    """
    # As arrays. Y stays None where it is not given, which saves half of the derivative's products.
    operands = _checked(x, y, c, alpha, beta)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"symmetric_product(implementation={implementation!r}): no such implementation; "
            f"choose one of {', '.join(map(repr, IMPLEMENTATIONS))}, or None for the rule."
        )
    # X, and those of Y and C that are given
    arrays = jax.tree.leaves(operands[:3])
    return SymmetricProduct(platform_of(*arrays), implementation)(*operands)


class SymmetricProduct(NamedTuple):
    """`symmetric_product` of operands that need no check, where the platform is known:
    alpha X Y^H + beta C.

    Inside of a loop the arrays don't show where they are.

    Attributes:
      platform: The platform of the devices.
      implementation: As in `symmetric_product`, or what `measured_kernel` returns.
    """

    platform: str
    implementation: str | None = None

    def __call__(
        self,
        x: jax.Array,
        y: jax.Array | None = None,
        c: jax.Array | None = None,
        alpha: float | jax.Array = 1.0,
        beta: float | jax.Array = 0.0,
    ) -> jax.Array:
        """alpha X Y^H + beta C of arrays of one dtype, exactly symmetric; without C nothing is
        added, whatever beta is.

        Y is X by default. X Y^H and C have to be symmetric: only their lower triangles count.
        `alpha` and `beta` are numbers, or [*batch, 1, 1]. By default beta is 0, so that C does not
        count. Nothing is checked.
        """
        # The sums' real dtype: float32 for half types, whose own digits would be too few for these
        # numbers.
        real = jnp.finfo(_xla_product.accumulator(x.dtype)).dtype
        operands = Operands(x, y, c, jnp.asarray(alpha, real), jnp.asarray(beta, real))
        implementation = self.implementation or _choose(self.platform, x)
        # `_product` under `jit`, which traces it once for all products of a shape
        return _jitted_product(operands, implementation, self.platform)


def _choose(platform: str, x: jax.Array) -> str:
    """The rule for `implementation=None`: "blocked" on a CPU for m >= 512, a measured kernel,
    else "reference".

    The CPU's figures are in `benchmarks/results/symmetric_product.json`.
    """
    # Smaller matrices are so fast that putting the blocks together costs what they save.
    if platform == "cpu":
        return "blocked" if x.shape[-2] >= 512 else "reference"
    return measured_kernel(platform, x, x.dtype) or "reference"


# The kernel where the program is compiled for a GPU, and "reference" elsewhere. While tracing this
# is not known: arrays may be committed to the CPU of a machine with a GPU.
_HOPPER_ON_A_GPU = "hopper on a GPU"


def measured_kernel(platform: str, x: jax.Array, dtype: jnp.dtype) -> str | None:
    """The kernel that takes a tenth or more off an update with products of x
    [*batch, m, k] in `dtype`.

    On an H100 "hopper" takes 12 to 15 percent off for m = 4096, measured
    (benchmarks/results/gpu_nvidia_*.json). For m = 2048 it is 4 at most, for m = 768 3 to 5,
    and it has to be compiled.
    """
    if platform != "gpu" or x.size == 0 or x.shape[-2] < 4096:
        return None
    return _HOPPER_ON_A_GPU if _hopper_product.is_chosen(x, dtype) else None


def _checked(x: Any, y: Any, c: Any, alpha: Any, beta: Any) -> Operands:
    """The operands of ``alpha·X Yᴴ + beta·C``, or ValueError where shapes or dtypes don't fit.

    `SymmetricProduct` casts alpha and beta to the real dtype of the product's sums.
    """
    x = jnp.asarray(x)
    # None: Y is X, and no C is added.
    y, c = (None if value is None else jnp.asarray(value) for value in (y, c))
    if x.ndim < 2:
        raise ValueError(
            f"symmetric_product(x) needs a matrix [*batch, m, k], got shape {x.shape}."
        )
    # Integers and 8-bit floats have no accumulator here.
    if x.dtype.name not in _DTYPES:
        raise ValueError(
            f"symmetric_product(x) needs one of {', '.join(_DTYPES)}, got {x.dtype.name}; cast it "
            "first."
        )
    # Batch axes are equal, since a kernel does not broadcast.
    *batch, m, _ = x.shape
    shapes = {"y": x.shape, "c": (*batch, m, m)}
    for name, value in (("y", y), ("c", c)):
        if value is None:
            continue
        if value.shape != shapes[name] or value.dtype != x.dtype:
            raise ValueError(
                f"symmetric_product({name}=...) needs shape {shapes[name]} and dtype "
                f"{x.dtype.name} to go with x of shape {x.shape}, got {value.shape} and "
                f"{value.dtype.name}."
            )
    # α and β, one number or one for each matrix, are real also for complex matrices: the product
    # would not be Hermitian otherwise.
    alpha = _checked_scale("alpha", alpha, batch)
    beta = _checked_scale("beta", beta, batch)
    return Operands(x, y, c, alpha, beta)


def _checked_scale(name: str, value: Any, batch: list[int]) -> jax.Array:
    """A real number as an array [], or one for each matrix, [*batch], as [*batch, 1, 1]."""
    # A boolean or a complex number converts without an error, and would be a mistake. A number of
    # Python's has no dtype, and its type gives one: float gives float64.
    dtype = np.dtype(getattr(value, "dtype", type(value)))
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not is_real:
        raise ValueError(f"symmetric_product({name}={value!r}) needs real numbers.")
    scale = jnp.asarray(value)
    if scale.shape not in ((), tuple(batch)):
        raise ValueError(
            f"symmetric_product({name}=...) needs a scalar or one number for each matrix of the "
            f"batch {tuple(batch)}, got shape {scale.shape}."
        )
    return scale[..., None, None] if scale.ndim else scale


def _run(
    operands: Operands, implementation: str, platform: str
) -> Inexact[Array, "*batch m m"]:
    """alpha X Y^H + beta C by one of `IMPLEMENTATIONS`, or by `_HOPPER_ON_A_GPU`, the rule's own
    name and no user's. The platform says how "blocked" makes its blocks."""
    if implementation == "blocked":
        return _xla_product.blocked_product(operands, platform=platform)
    if implementation == _HOPPER_ON_A_GPU:
        # The arrays may be committed to the CPU of a machine with a GPU, which JAX knows only when
        # it lowers the program. So both are traced, and one is lowered.
        on_a_gpu, elsewhere = (
            _hopper_product.symmetric_product,
            _xla_product.symmetric_product,
        )
        return jax.lax.platform_dependent(operands, cuda=on_a_gpu, default=elsewhere)
    if implementation == "hopper":
        return _hopper_product.symmetric_product(operands)
    # "reference": all other names were refused before.
    return _xla_product.symmetric_product(operands)


_product = jax.custom_jvp(_run, nondiff_argnums=(1, 2))


@jax.custom_jvp
def _gram(x: Inexact[Array, "*batch m k"]) -> Inexact[Array, "*batch m m"]:
    """``X Xᴴ``. Its derivative is ``M + Mᴴ`` with the one product ``M = dX Xᴴ``;
    JAX's own has two."""
    return _xla_product.product(x, x)


@_gram.defjvp
def _gram_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    m = _xla_product.product(dx, x)
    return _gram(x), m + m.mT.conj()


def _product_jvp(implementation, platform, primals, tangents):
    """S = alpha X Y^H + beta C by the implementation,
    and its derivative dS in forward mode (for `jax.custom_jvp`).

    dS is the derivative of the product in plain `jnp`, since a kernel has none. Every term of it is
    linear in a tangent, so JAX transposes it for reverse mode.
    A tangent that is known to be zero has no term.
    """
    (operands,), (tangents_of_operands,) = primals, tangents
    # The operands that have a tangent, by name, and these tangents. Y and C may be None, as their
    # tangents are then.
    values = {}
    directions = {}
    for name, tangent in tangents_of_operands._asdict().items():
        if tangent is not None and not isinstance(tangent, SymbolicZero):
            values[name] = getattr(operands, name)
            directions[name] = tangent

    def plain(values):
        """S in plain `jnp`, as a function of the operands that have a tangent."""
        o = operands._replace(**values)
        # `_gram` has a derivative of its own, of one product, dX X^H, and its adjoint;
        # that of X Y^H takes two products.
        p = _gram(o.x) if o.y is None else _xla_product.product(o.x, o.y)
        # The lower triangle of the product counts, by definition, so that dS is as symmetric as S.
        return _xla_product.scaled_sum(_xla_product.mirror(p), o)

    out = _product(operands, implementation, platform)
    _, tangent = jax.jvp(plain, (values,), (directions,))
    # Inside of `jax.shard_map`, a tangent must vary over the same mesh axes as S.
    return out, jnp.zeros_like(out) + tangent


_product.defjvp(_product_jvp, symbolic_zeros=True)

# One trace for all products of a shape: an iteration makes a dozen of them.
_jitted_product = jax.jit(_product, static_argnums=(1, 2))
