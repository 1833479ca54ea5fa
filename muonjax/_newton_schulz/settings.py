"""The settings of an orthogonalization: which polynomials, in which form and precision."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from muonjax._arguments import is_whole, whole_number
from muonjax._keywords import explains_keywords
from muonjax._newton_schulz.coefficients import Coefficients, checked_rows, polar_express, take_steps
from muonjax._newton_schulz.normalization import Normalization

Form = Literal["auto", "standard", "gram"]

_COMPUTE_DTYPES = ("bfloat16", "float32", "float64")

# The lower ends measured best on recorded momentum whose dominant directions are shrunk.
_FAST = polar_express(3, lower=2e-2)
_BALANCED = polar_express(4, lower=1e-2, degrees=(5, 5, 5, 3))
_ACCURATE = polar_express(12, lower=1e-5)


class _Presets(type):
    """Names the presets where one is asked for that is none."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"NewtonSchulz has no preset {name!r}; there are accurate, balanced, fast.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz(metaclass=_Presets):
    """How to orthogonalize: a value, hashable, never part of an optimizer's state.

    Args:
      coefficients: Rows (a, b, c), one a step: `polar_express(...)`, `JORDAN`, `YOU`, or your own.
      num_steps: Steps to run; None runs each row once. A shorter table repeats its last row, a longer one is
        cut.
      deflation: How many dominant directions to shrink first, at most; never more than m / 8 (m: the matrix's
        shorter side); on accelerators half as many more. 0 turns it off.
      form: "standard", "gram", or "auto", which takes the Gram form for n > 1.5 m. In bfloat16 the Gram form has the
        last steps only, as many as stay accurate.
      restarts: Steps after which the Gram form makes its Gram matrix anew, such as (2,); None: before rounding can
        grow to 1 % (see `gram_restarts` in the source). Not in bfloat16.
      normalization: The bound of the largest singular value: "schatten" (Schatten-8, free), "frobenius" (as
        most implementations; wastes a step or more), "aol" (rescales rows; changes the polar factor),
        "spectral" (exact; an eigenvalue problem).
      compute_dtype: Dtype of the products' operands; None is the input's own precision on a CPU (half types
        are widened to float32) and bfloat16 on accelerators, as the arrays' devices or mesh say. "bfloat16" on a CPU
        computes as a GPU does. float32 means true float32 everywhere, never TF32. float64 and complex inputs keep
        their own.
      implementation: Which symmetric products to run; see `pallas_kernels.symmetric_product`. One that is named
        makes whole products: devices that share a matrix don't share these. "hopper" takes matrices with a short side
        of 8 to 128 by a kernel of their own, one launch for all products on the small side. "tpu_vmem" is all of the
        iteration in one launch, on TPUs, for a matrix that their VMEM holds.

    Raises:
      ValueError, TypeError: On construction, naming the setting.

    Example:
      >>> import muonjax
      >>> six = muonjax.NewtonSchulz(coefficients=muonjax.polar_express(6, lower=3e-3))
      >>> len(six.steps), six.deflation, muonjax.NewtonSchulz() == muonjax.NewtonSchulz.balanced()
      (6, 64, True)
    """

    coefficients: Coefficients = _BALANCED
    num_steps: int | None = None
    deflation: int = 64
    form: Form = "auto"
    restarts: tuple[int, ...] | None = None
    normalization: Normalization = "schatten"
    compute_dtype: jax.typing.DTypeLike | None = None
    implementation: str | None = None

    def __post_init__(self):
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        call = "NewtonSchulz"
        keep("coefficients", checked_rows(call, self.coefficients))
        if self.num_steps is not None:
            steps = whole_number(call, "num_steps", self.num_steps, 1, " of steps, at least 1.")
            keep("num_steps", steps)
        directions = whole_number(call, "deflation", self.deflation, 0, " of directions; 0 turns it off.")
        keep("deflation", directions)
        for name, kind in (("form", Form), ("normalization", Normalization)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{call}({name}={getattr(self, name)!r}) is unknown; choose one of {get_args(kind)}."
                )
        if self.restarts is not None:
            restarts = self.restarts if isinstance(self.restarts, Sequence) else (self.restarts,)
            inside = all(is_whole(r) and 0 < r < len(self.steps) for r in restarts)
            if not inside or sorted(set(restarts)) != list(restarts):
                raise ValueError(
                    f"{call}(restarts={self.restarts!r}) must be ascending whole numbers between the first and "
                    f"the last of {len(self.steps)} steps."
                )
            if self.form == "standard":
                raise ValueError(
                    f"{call}(restarts={self.restarts!r}, form='standard'): the standard form restarts after every "
                    f"step; leave restarts out, or give form='gram'."
                )
            keep("restarts", tuple(map(int, restarts)))
        if self.compute_dtype is not None:
            try:
                dtype = jnp.dtype(self.compute_dtype)
            except TypeError:
                dtype = None
            if dtype is None or dtype.name not in _COMPUTE_DTYPES:
                raise TypeError(
                    f"{call}(compute_dtype={self.compute_dtype!r}) must be one of {', '.join(_COMPUTE_DTYPES)}: others "
                    "lack the range for products of products."
                )
            keep("compute_dtype", dtype)

    @property
    def steps(self) -> Coefficients:
        """The rows that run, one a step."""
        return take_steps(self.coefficients, self.num_steps or len(self.coefficients))

    @classmethod
    def fast(cls) -> "NewtonSchulz":
        """Three steps: the cheapest. On recorded momentum its error is below that of Optax's five steps; on a matrix
        128 × 128 with singular values spread evenly in the logarithm down to 1e-3 it is above (0.41 against 0.36)."""
        return cls(coefficients=_FAST)

    @classmethod
    def balanced(cls) -> "NewtonSchulz":
        """Three steps and a cubic, the default."""
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
