"""The settings of an orthogonalization: which polynomials, in which form and precision."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from muonjax._common.arguments import (
    WIDE_FLOATS,
    check_choice,
    explains_keywords,
    given_dtype,
    whole_number,
)
from muonjax._newton_schulz.coefficients import (
    Coefficients,
    checked_rows,
    polar_express,
    polar_express_rows,
)
from pallas_kernels._symmetric_product import IMPLEMENTATIONS

Form = Literal["auto", "standard", "gram"]
Normalization = Literal["schatten", "frobenius"]


class Steps(NamedTuple):
    """The polynomials of a preset: which ones depends on the precision and on the size of a matrix.

    Attributes:
      full: In float32 or wider, after the deflation.
      half: In half precision, where there is no deflation.
      small: In place of `full`, and without a deflation, for matrices of at most 64 rows; None: not
        so. The deflation is some four hundred small operations: up to there it takes as long as the
        steps that it saves, and longer to compile for each shape.
    """

    full: Coefficients
    half: Coefficients
    small: Coefficients | None = None


_SMALL_SIDE = 64
_SMALL = polar_express(8, lower=1e-4)

# Lower ends in full precision: the best on recorded momentum whose dominant directions are shrunk.
# In half precision: a smaller one leaves less error on recorded momentum, and lifts more of the
# rounding errors of bfloat16 outside of the space of a matrix of low rank.
FAST = Steps(polar_express(3, lower=2e-2), polar_express(4, lower=4e-3), _SMALL)
# A cubic at the end takes a product less than a fourth quintic: 13 % of a step on a CPU,
# for .026 of polar error.
BALANCED = Steps(
    polar_express_rows((5, 5, 5, 3), lower=1e-2),
    polar_express(5, lower=3e-3),
    _SMALL,
)
_ACCURATE = polar_express(12, lower=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """Says how to orthogonalize; hashable, and never part of an optimizer's state.

    Args:
      coefficients: Rows (a, b, c), one for each step: `polar_express(...)`, `5 * JORDAN`, `YOU`, or
        your own. The presets give `Steps`, which differ between full and half precision.
      deflation: How many dominant directions are shrunk before the steps, at most; never more than
        m / 8 (m: the matrix's shorter side). 0 turns it off. It may move the polar factor by about
        0.05 (root mean square of the singular directions), which no number of steps undoes: give 0
        with coefficients that should converge further. A setting of full precision: in half
        precision there is none, nor up to m = 64 with the steps of `fast` and `balanced`.
      form: "standard", "gram", or "auto", which takes the Gram form for n > 1.5 m. In bfloat16 that
        makes the Gram matrix anew before nearly all steps.
      normalization: The bound of the largest singular value: "schatten" (Schatten-8, free) or
        "frobenius" (as in most implementations; wastes a step or more).
      compute_dtype: Dtype of the products' operands, a float type of 16 bits or more. None is the
        input's own precision on a CPU (half types are widened to float32), float16, which has three
        more bits than bfloat16, on a GPU, and bfloat16 on a TPU, as the arrays' devices or mesh
        say. float32 means true float32 everywhere, never TF32.
        float64 and complex inputs keep their own.
      implementation: Which symmetric products to run; see `pallas_kernels.symmetric_product`.

    Raises:
      ValueError, TypeError: On construction, naming the setting.

    Example:
      >>> import muonjax
      >>> six = muonjax.NewtonSchulz(coefficients=muonjax.polar_express(6, lower=3e-3))
      >>> len(six.coefficients), six.deflation
      (6, 64)
      >>> muonjax.NewtonSchulz() == muonjax.NewtonSchulz.balanced()
      True
    """

    coefficients: Coefficients | Steps = BALANCED
    deflation: int = 64
    form: Form = "auto"
    normalization: Normalization = "schatten"
    compute_dtype: jax.typing.DTypeLike | None = None
    implementation: str | None = None

    def __post_init__(self):
        # Checked values are written back: tuples of floats, an int, a dtype. So settings have a
        # hash, and are equal if they say the same, "float32" and jnp.float32. A frozen dataclass
        # refuses `self.deflation = ...`, so that its dictionary is written.
        fields = vars(self)
        # Only the presets `fast` and `balanced` have `Steps`, which hold rows for each precision:
        # constants of this file that need no check.
        if not isinstance(self.coefficients, Steps):
            fields["coefficients"] = checked_rows(self.coefficients)
        fields["deflation"] = whole_number(
            "deflation", self.deflation, 0, " of directions; 0 turns it off."
        )
        check_choice("form", self.form, get_args(Form))
        check_choice("normalization", self.normalization, get_args(Normalization))
        check_choice("implementation", self.implementation, (None, *IMPLEMENTATIONS))
        if self.compute_dtype is not None:
            fields["compute_dtype"] = given_dtype(
                "compute_dtype",
                self.compute_dtype,
                WIDE_FLOATS,
                "a float type of 16 bits or more",
            )

    @property
    def steps(self) -> Steps:
        """The polynomials for each precision; your own rows serve in full and in half precision."""
        rows = self.coefficients
        return rows if isinstance(rows, Steps) else Steps(rows, rows)

    def in_full_precision(self, m: int) -> tuple[Coefficients, int]:
        """The rows for matrices of the shorter side m,
        and how many directions are shrunk before them."""
        steps = self.steps
        # Your own coefficients have no steps for small matrices.
        if m <= _SMALL_SIDE and steps.small is not None:
            return steps.small, 0
        return steps.full, min(self.deflation, m // 8)

    def takes_gram_form(self, m: int, n: int) -> bool:
        """Whether m x n matrices take the Gram form, as far as rounding allows.

        For each step but the first, that takes three m x m products more and two m x n products
        less: 3 m against 2 n multiply-adds.
        """
        return self.form == "gram" or (self.form == "auto" and n > 1.5 * m)

    @classmethod
    def fast(cls) -> "NewtonSchulz":
        """The cheapest: three quintics after a deflation; in half precision four quintics without.
        On recorded momentum its error is below that of Optax's five steps; in float32, on a matrix
        128 × 128 with singular values spread evenly in the logarithm down to 1e-3,
        it is above (0.40 against 0.36)."""
        return cls(coefficients=FAST)

    @classmethod
    def balanced(cls) -> "NewtonSchulz":
        """The default: three quintics and a cubic after a deflation;
        in half precision five quintics without."""
        return cls()

    @classmethod
    def accurate(cls) -> "NewtonSchulz":
        """The polar factor to float32 precision, for condition numbers up to 1e5; computes in
        float32 everywhere."""
        return cls(
            coefficients=_ACCURATE,
            deflation=0,
            form="standard",
            compute_dtype=jnp.float32,
        )


def settings_of(given: Any, name: str = "newton_schulz") -> NewtonSchulz:
    """The settings that are given, `NewtonSchulz()` for None; raises for all else."""
    if not isinstance(given, NewtonSchulz | None):
        raise TypeError(
            f"({name}={given!r}) must be a NewtonSchulz, such as NewtonSchulz.fast()."
        )
    return NewtonSchulz() if given is None else given


NewtonSchulz.__init__ = explains_keywords("NewtonSchulz")(NewtonSchulz.__init__)
