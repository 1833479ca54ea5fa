"""`optax.contrib.muon` with its arguments, its results and its state,
on muonjax's batching and meshes.

    from muonjax.optax_contrib import muon  # was: from optax.contrib import muon

Equal matrices share one loop, and on a mesh each matrix is orthogonalized once. Where Optax's
result is finite, this is the same up to rounding; for the rest see docs/coming_from.md.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from muonjax._common.arguments import (
    check_choice,
    check_flag,
    check_range,
    check_rates,
    errors_of,
    fitted_mask,
    given_dtype,
)
from muonjax._common.linalg import (
    MatrixProduct,
    SymmetricProduct,
    at_least_float32,
    scaled,
    square_norm,
)
from muonjax._common.platform_policy import Policy
from muonjax._common.power_of_two_scale import power_of_two_scale
from muonjax._matrices.batching import Function
from muonjax._matrices.matrix_view import DimensionNumbersTree
from muonjax._mesh.distribution import Distribution, check_distribution
from muonjax._newton_schulz.coefficients import JORDAN, YOU
from muonjax._optimizers.partition import check_program, partition_by_route
from muonjax._transforms.match_rms import match_rms
from muonjax._transforms.orthogonalize import map_matrices

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Inexact

_Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]

_PRESETS = {"standard": JORDAN[0], "dion": YOU}


@errors_of("optax_contrib.muon")
def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = JORDAN[0],
    ns_steps: Any = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: _Preconditioning = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimensionNumbersTree | None = None,
    consistent_rms: float | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon`: the same arguments, updates and state;
    a checkpoint of either continues with the other.

    Args:
      distribution: How the parameters are sharded, as in `muonjax.muon`;
        the one argument that Optax lacks.

    All other arguments are as in `optax.contrib.muon`.

    None for the dimension numbers makes a matrix of every leaf with two axes, also of embeddings,
    output heads and biases of several heads. `muonjax.muon` reads paths and shapes instead.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: An unknown preset or preconditioning, coefficients of another shape than (3,) or
        (n, 3), more rows than steps; while tracing, a leaf that can't be viewed as matrices,
        or a state of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from muonjax.optax_contrib import muon
      >>> params = {"kernel": jnp.arange(8.0).reshape(2, 4), "bias": jnp.ones(4)}
      >>> ours, theirs = muon(1e-3), optax.contrib.muon(1e-3)
      >>> updates, state = ours.update(params, ours.init(params), params)
      >>> expected, _ = theirs.update(params, theirs.init(params), params)
      >>> bool(jnp.allclose(updates["kernel"], expected["kernel"], rtol=1e-5))
      True

    Source: `optax.contrib.muon`, Optax 0.2.8.
    """
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    check_rates(
        learning_rate=learning_rate,
        adam_learning_rate=adam_rate,
        weight_decay=weight_decay,
        adam_weight_decay=adam_weight_decay,
        adam_eps_root=adam_eps_root,
    )
    check_range("adam_b1", adam_b1, "in [0, 1)", ".")
    check_range("adam_b2", adam_b2, "in [0, 1)", ".")
    weight_decay_mask = fitted_mask("weight_decay_mask", weight_decay_mask)
    # A program, dimension numbers, or a function of the parameters
    check_program("muon_weight_dimension_numbers", muon_weight_dimension_numbers)
    if consistent_rms is not None:
        # `match_rms` would call it `rms`.
        check_range(
            "consistent_rms", consistent_rms, "positive and finite", "; 0.2 is usual."
        )
    if isinstance(ns_coeffs, str):
        check_choice("ns_coeffs", ns_coeffs, tuple(_PRESETS))
        ns_coeffs = _PRESETS[ns_coeffs]

    def matrices(numbers: DimensionNumbersTree) -> optax.GradientTransformation:
        """The chain of `optax.contrib.muon` for the leaves that have dimension numbers,
        in Optax's order, so that its state is Optax's."""
        return optax.chain(
            scale_by_muon(
                ns_coeffs,
                ns_steps,
                beta,
                eps,
                mu_dtype,
                nesterov=nesterov,
                adaptive=adaptive,
                preconditioning=preconditioning,
                weight_dimension_numbers=numbers,
                distribution=distribution,
            ),
            # `consistent_rms=None` multiplies by sqrt(max(1, fan_out / fan_in)), as in Optax.
            match_rms(consistent_rms, dimension_numbers=numbers),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )

    # The chain is made here for the checks of its members alone,
    # so that a mistake shows before `init`.
    matrices(None)
    # All leaves without dimension numbers are AdamW's.
    adam = optax.adamw(
        adam_rate,
        adam_b1,
        adam_b2,
        eps,
        adam_eps_root,
        mu_dtype,
        adam_weight_decay,
        nesterov=nesterov,
    )
    # Optax's own choice makes a matrix of every leaf with two axes; None would let names decide.
    if muon_weight_dimension_numbers is None:
        muon_weight_dimension_numbers = _two_axes
    return partition_by_route(
        "optax_contrib.muon", matrices, adam, muon_weight_dimension_numbers
    )


@errors_of("scale_by_muon")
def scale_by_muon(
    ns_coeffs: Any = JORDAN[0],
    ns_steps: Any = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: _Preconditioning = "frobenius",
    weight_dimension_numbers: DimensionNumbersTree | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon`: the same arguments, updates and state.

    Args:
      distribution: As in `muon`.

    All other arguments are as in `optax.contrib.scale_by_muon`.

    None for the dimension numbers says that every leaf is a matrix [fan_in, fan_out]; in a tree of
    them it leaves its leaf as it is.

    Returns:
      An `optax.GradientTransformation` whose state is Optax's own `MuonState`. `init` puts
      `ns_coeffs` into it, and `update` takes them from it, as in Optax:
      a restored checkpoint keeps its coefficients.

    Raises:
      ValueError: As `muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> from muonjax.optax_contrib import scale_by_muon
      >>> tx = scale_by_muon()
      >>> updates, state = tx.update({"w": jnp.eye(4)}, tx.init({"w": jnp.eye(4)}))
      >>> type(state).__name__, state.ns_coeffs.shape
      ('MuonState', (3,))

    Source: `optax.contrib.scale_by_muon`, Optax 0.2.8.
    """
    check_range("beta", beta, "in [0, 1)", "; 0.95 is usual.")
    check_rates(eps=eps)
    if mu_dtype is not None:
        given_dtype(
            "mu_dtype", mu_dtype, (jnp.inexact,), "a float type, such as jnp.bfloat16"
        )
    check_flag(nesterov=nesterov, adaptive=adaptive)
    check_choice("preconditioning", preconditioning, get_args(_Preconditioning))
    check_distribution(distribution)
    check_range("ns_steps", ns_steps, "positive and finite", "; it counts steps.")

    # Only `init` is taken: it makes Optax's own state, and refuses coefficients of another shape
    # than (3,) or (n, 3), and more rows than steps.
    theirs = optax.contrib.scale_by_muon(ns_coeffs, ns_steps, mu_dtype=mu_dtype)

    @errors_of("scale_by_muon")
    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        # mu <- beta mu + (1 - beta) G
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        if nesterov:
            # At step t, counted from 1, beta mu / (1 - beta^(t + 1)) + (1 - beta) G / (1 - beta^t),
            # as in Nadam and in Optax: a mean that began at zero is too small by the factor
            # 1 - beta^t, and beta mu is a part of the next step's mean.
            unbiased_mu = optax.tree.bias_correction(
                mu, beta, optax.safe_increment(count)
            )
            gradient = optax.tree.bias_correction(updates, beta, count)
            direction = optax.tree.update_moment(gradient, unbiased_mu, beta, 1)
        else:
            direction = optax.tree.bias_correction(mu, beta, count)
        # The coefficients come from the state, for a restored checkpoint may hold others than
        # `ns_coeffs`. `map_matrices` adds the last argument, the policy.
        iteration = functools.partial(
            _iteration, state.ns_coeffs, ns_steps, preconditioning, eps
        )
        polar_factors = map_matrices(
            iteration, direction, weight_dimension_numbers, distribution
        )
        if adaptive:
            # <X, Y> Y with one number <X, Y> for all matrices of a leaf together, as in Optax
            polar_factors = jax.tree.map(
                lambda x, y: jnp.sum(x.conj() * y) * y, direction, polar_factors
            )
        # `update_moment` promoted the mean to the gradient's dtype.
        mu = optax.tree.cast_like(mu, state.mu)
        return polar_factors, MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(errors_of("scale_by_muon")(theirs.init), update)


def _two_axes(params: Any) -> Any:
    """Optax's own choice: every leaf with two axes is a matrix."""
    return jax.tree.map(
        lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params
    )


def _iteration(
    coefficients: jax.Array,
    ns_steps: Any,
    preconditioning: _Preconditioning,
    eps: jax.typing.ArrayLike,
    policy: Policy,
) -> Function:
    """Optax's Newton-Schulz iteration, as a function for `map_matrices`.

    Args:
      coefficients: A polynomial a, b, c for all steps [3], or one for each step [steps, 3];
        an array of the state.
      ns_steps: The number of steps, which `optax.inject_hyperparams` traces;
        not used where each step has a row.
      preconditioning: Which bound of the largest singular value the rows are divided by before the
        first step (see `_row_factors`).
      eps: As in `_row_factors`.
      policy: Says whether the matrices are on a CPU.
    """

    def iterate(x: Inexact[Array, "*batch m n"]) -> Inexact[Array, "*batch m n"]:
        """The nearly orthogonal matrix that Optax computes from X.

        `map_matrices` transposes tall matrices, so m <= n, and Y Y^H is the smaller Gram matrix.
        """
        # Y is in `wide` from step to step, and so are the sums of a product. `product` rounds its
        # factors to the leaf's dtype, as in Optax, but not on a CPU,
        # which has no units for half types.
        wide = at_least_float32(x.dtype)
        factors_dtype = wide if policy.is_cpu else x.dtype
        # `precision=None` is JAX's default precision, as in Optax.
        product = MatrixProduct(factors_dtype.name, precision=None)
        symmetric_product = SymmetricProduct(policy.platform)

        def square(a: jax.Array) -> jax.Array:
            """A A^H: at half the work on a CPU, elsewhere by a plain product,
            with Optax's rounding."""
            return symmetric_product(a) if policy.is_cpu else product.with_adjoint(a)

        # Y = scale X: squares of a large X would overflow, as they do in Optax.
        # A power of two does not round.
        y = x.astype(wide)
        scale = power_of_two_scale(y)
        y = scaled(y, scale)
        # The steps are for singular values of at most 1: the rows are divided by a bound of the
        # largest, one number for Y, or with "aol" one for each row. All bounds but "frobenius" are
        # of Y Y^H, the second argument; for "frobenius" the compiler leaves this product out.
        y = scaled(y, _row_factors(y, square(y), preconditioning, eps, scale))
        # One polynomial (a, b, c) serves all of `ns_steps`; of several rows each serves one step.
        has_rows = coefficients.ndim == 2
        num_steps = len(coefficients) if has_rows else ns_steps

        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            """(a I + b A + c A^2) Y with A = Y Y^H, which is Hermitian: A^2 = A A^H."""
            a, b, c = coefficients[i] if has_rows else coefficients
            gram = square(y)
            return scaled(y, a) + product(scaled(gram, b) + scaled(square(gram), c), y)

        return jax.lax.fori_loop(0, num_steps, step, y).astype(x.dtype)

    return Function(iterate)


def _row_factors(
    y: Inexact[Array, "*batch m n"],
    gram: Inexact[Array, "*batch m m"],
    preconditioning: _Preconditioning,
    eps: jax.typing.ArrayLike,
    scale: Float[Array, "*batch 1 1"],
) -> Float[Array, "*batch _m 1"]:
    """What the rows of Y are multiplied by before the first step:
    one over a bound of its largest singular value.

    [*batch, m, 1] with "aol", else [*batch, 1, 1]. Optax divides the user's matrix X = Y / scale.
    The results are equal, since what Optax adds to a norm (`eps`), or takes as its least value
    (1e-8), is scaled here as the norm is.

    Args:
      y: Y = scale X.
      gram: A = Y Y^H.
      preconditioning: Which bound.
      eps: What Optax adds to the norm of X; so scale eps is added to the norm of Y.
      scale: A power of two for each matrix, which keeps products from overflowing.
    """
    # Optax 0.2.8 doesn't pass `eps` on to "aol" and "schatten". They take 1e-8 at least for a norm
    # of X X^H, and A is scale^2 X X^H. With `tiny`, as 0 would make NaN of a row of zeros.
    smallest = 1e-8 * scale * scale + jnp.finfo(scale.dtype).tiny
    if preconditioning == "aol":
        # D_i = (sum_j |A_ij|)^(-1/2): D A D, the Gram matrix of D Y, has no eigenvalue above 1
        row_sums = jnp.sum(jnp.abs(gram), -1, keepdims=True)
        return jax.lax.rsqrt(jnp.maximum(row_sums, smallest))
    if preconditioning == "schatten":
        # |A|_F^(-1/2), as |A|_F is at least the largest eigenvalue of A
        return jax.lax.rsqrt(jnp.maximum(jnp.sqrt(square_norm(gram)), smallest))
    # The square of the bound: of "frobenius" |Y|_F^2, which "spectral" replaces
    square = square_norm(y)
    if preconditioning == "spectral":
        # The square of the largest singular value is the largest eigenvalue of A.
        square = jnp.linalg.eigvalsh(gram)[..., -1:, None]
    # 1 / (scale (|X| + eps)) = 1 / (|Y| + scale eps)
    return 1 / (jnp.sqrt(square) + jnp.asarray(eps, scale.dtype) * scale)
