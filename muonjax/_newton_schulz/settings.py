"""The settings of an orthogonalization: which polynomials, in which form and precision."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from muonjax._common.arguments import check_choice, explains_keywords, given_dtype, whole_number
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows, polar_express
from pallas_kernels._api import IMPLEMENTATIONS

Form = Literal["auto", "standard", "gram"]
Normalization = Literal["schatten", "frobenius"]

_COMPUTE_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float64)

# The lower ends measured best on recorded momentum whose dominant directions are shrunk.
FAST = polar_express(3, lower=2e-2)
BALANCED = polar_express(4, lower=1e-2, degrees=(5, 5, 5, 3))
_ACCURATE = polar_express(12, lower=1e-5)


class _Presets(type):
    """Names the presets if another name is asked for."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"NewtonSchulz has no preset {name!r}; there are accurate, balanced, fast.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz(metaclass=_Presets):
    """Says how to orthogonalize; hashable, and never part of an optimizer's state.

    Args:
      coefficients: Rows (a, b, c), one for each step: `polar_express(...)`, `5 * JORDAN`, `YOU`, or your own. Those of
        `fast` and `balanced` stand for these presets, which take other steps in float32.
      deflation: How many dominant directions to shrink first, at most; never more than m / 8 (m: the matrix's
        shorter side); on accelerators half as many more. 0 turns it off. Up to m = 64, `fast` and `balanced` in float32
        take eight steps and no deflation, which takes no longer and is more accurate.
      form: "standard", "gram", or "auto", which takes the Gram form for n > 1.5 m. In bfloat16 the Gram form has the
        last steps only, as many as stay accurate.
      normalization: The bound of the largest singular value: "schatten" (Schatten-8, free) or "frobenius" (as in most
        implementations; wastes a step or more).
      compute_dtype: Dtype of the products' operands; None is the input's own precision on a CPU (half types
        are widened to float32) and bfloat16 on accelerators, as the arrays' devices or mesh say. "bfloat16" on a CPU
        computes as a GPU does. float32 means true float32 everywhere, never TF32. float64 and complex inputs keep
        their own.
      implementation: Which symmetric products to run; see `pallas_kernels.symmetric_product`. A named one computes
        whole products on each device, also where devices share a matrix.

    Raises:
      ValueError, TypeError: On construction, naming the setting.

    Example:
      >>> import muonjax
      >>> six = muonjax.NewtonSchulz(coefficients=muonjax.polar_express(6, lower=3e-3))
      >>> len(six.coefficients), six.deflation, muonjax.NewtonSchulz() == muonjax.NewtonSchulz.balanced()
      (6, 64, True)
    """

    coefficients: Coefficients = BALANCED
    deflation: int = 64
    form: Form = "auto"
    normalization: Normalization = "schatten"
    compute_dtype: jax.typing.DTypeLike | None = None
    implementation: str | None = None

    def __post_init__(self):
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        call = "NewtonSchulz"
        keep("coefficients", checked_rows(call, self.coefficients))
        directions = whole_number(call, "deflation", self.deflation, 0, " of directions; 0 turns it off.")
        keep("deflation", directions)
        for name, known in (
            ("form", get_args(Form)),
            ("normalization", get_args(Normalization)),
            ("implementation", (None, *IMPLEMENTATIONS)),
        ):
            check_choice(call, name, getattr(self, name), known)
        if self.compute_dtype is not None:
            wanted = "one of bfloat16, float32, float64: others lack the range for products of products"
            keep(
                "compute_dtype",
                given_dtype(call, "compute_dtype", self.compute_dtype, _COMPUTE_DTYPES, wanted),
            )

    @classmethod
    def fast(cls) -> "NewtonSchulz":
        """Three quintics: the cheapest. On recorded momentum its error is below that of Optax's five steps; on a matrix
        128 × 128 with singular values spread evenly in the logarithm down to 1e-3 it is above (0.40 against 0.36)."""
        return cls(coefficients=FAST)

    @classmethod
    def balanced(cls) -> "NewtonSchulz":
        """The default: three quintics and a cubic. In float32, two polynomials of degree nine and a quintic, which are
        more accurate and, from 512 rows on, take less time; in half precision they would lose their digits."""
        return cls()

    @classmethod
    def accurate(cls) -> "NewtonSchulz":
        """The polar factor to float32 precision, for condition numbers up to 1e5; computes in float32
        everywhere."""
        return cls(coefficients=_ACCURATE, deflation=0, form="standard", compute_dtype=jnp.float32)


def settings_of(given: Any, call: str, name: str = "newton_schulz") -> NewtonSchulz:
    """The settings that are given, `NewtonSchulz()` for None; for all else an error in the name of `call`."""
    if not isinstance(given, NewtonSchulz | None):
        raise TypeError(f"{call}({name}={given!r}) must be a NewtonSchulz, such as NewtonSchulz.fast().")
    return NewtonSchulz() if given is None else given


NewtonSchulz.__init__ = explains_keywords("NewtonSchulz")(NewtonSchulz.__init__)
