"""The polar factor: of an array, in the precision that platform and settings say;
and as a function for batching."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp

from muonjax._common.arguments import errors_of
from muonjax._common.platform_policy import Policy, policy_of
from muonjax._matrices.batching import Function
from muonjax._newton_schulz import full_precision, half_precision
from muonjax._newton_schulz.settings import NewtonSchulz, settings_of

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact


def newton_schulz(
    x: Inexact[Array, "*batch m n"],
    settings: NewtonSchulz | None = None,
) -> Inexact[Array, "*batch m n"]:
    """The polar factor U V^H of x = U S V^H, approximately:
    every singular value is moved close to 1.

    For derivatives take `muonjax.msign`: in half precision the one of this function is not 0 at a
    zero matrix but about 1e29.

    Args:
      x: [*batch, m, n], float or complex, wide or tall,
        at any scale (1e-30 and 1e30 give the same).
      settings: Which polynomials, in which form and precision; `NewtonSchulz()` if None.

    Returns:
      Same shape and dtype. A zero matrix gives zeros;
      a matrix with NaN or inf gives NaN in that matrix only.

    Raises:
      ValueError: If x is no matrix, or has an empty dimension.
      TypeError: If x holds integers.

    Example:
      >>> import jax, muonjax
      >>> x = jax.random.normal(jax.random.key(0), (32, 128))
      >>> y = muonjax.newton_schulz(x, muonjax.NewtonSchulz.accurate())
      >>> bool(abs(y @ y.T - jax.numpy.eye(32)).max() < 1e-5)
      True

    Source: Bernstein & Newhouse, "Old optimizer, new norm", 2024; Amsel et al.,
    "The Polar Express", 2025.
    """
    with errors_of("newton_schulz"):
        # An error reads "newton_schulz(x, settings=...) must be a NewtonSchulz".
        settings = settings_of(settings, "x, settings")
    if not hasattr(x, "ndim"):
        raise TypeError(
            f"newton_schulz(x) needs an array, got {type(x).__name__}; give jnp.asarray(x)."
        )
    if x.ndim < 2:
        raise ValueError(
            f"newton_schulz(x) needs a matrix, got shape {x.shape}; give a bias to Adam instead."
        )
    if 0 in x.shape:
        raise ValueError(
            f"newton_schulz(x) got shape {x.shape}: an empty matrix has no polar factor."
        )
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"newton_schulz(x) needs a float or complex matrix, got {x.dtype}."
        )
    return polar_factor(x, settings, policy_of(x))


def polar_factor(
    x: Inexact[Array, "*batch m n"], settings: NewtonSchulz, policy: Policy
) -> Inexact[Array, "*batch m n"]:
    """`newton_schulz` of checked arguments, in the precision that the platform and the settings
    say.

    Args:
      x: Wide or tall matrices.
      settings: The polynomials, and what they say of precision.
      policy: The policy for the device of x.
    """
    dtype = policy.compute_dtype(x.dtype, settings.compute_dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if is_tall else x
    precision = half_precision if jnp.finfo(dtype).bits == 16 else full_precision
    y = precision.iterate(wide, settings, policy, dtype)
    y = y.mT if is_tall else y
    return y.astype(x.dtype)


def polar_function(settings: NewtonSchulz, policy: Policy) -> Function:
    """x -> its polar factor, as `batching` and a mesh apply it to the matrices of a tree."""
    return Function(
        whole=functools.partial(polar_factor, settings=settings, policy=policy),
        # (m, n) -> whether in the Gram form, which is another program than the standard form
        form=settings.takes_gram_form,
        exchange_dtype=functools.partial(
            policy.exchange_dtype, asked=settings.compute_dtype
        ),
    )
