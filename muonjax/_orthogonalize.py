"""The transformation between momentum and `match_rms`: every matrix of the tree becomes nearly orthogonal."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from muonjax._grouping import map_groups
from muonjax._matrix_view import DimensionNumbersTree, matrix_view, resolve_dimension_numbers
from muonjax._newton_schulz import NewtonSchulz, newton_schulz


def orthogonalize(
    *,
    dimension_numbers: DimensionNumbersTree | None = None,
    newton_schulz: NewtonSchulz | None = None,
    adaptive: bool = False,
) -> optax.GradientTransformation:
    r"""Replace every matrix of the updates by its polar factor: U S V^H -> U V^H, nearly.

    This is steepest descent in the spectral norm. Leaves of equal matrix shape share one compiled loop.

    Args:
      dimension_numbers: Which axes of a leaf are rows and columns: a tree of `MuonDimensionNumbers`, or a
        prefix of one, or a function of the updates that returns one. All other axes are batch axes: each
        index is a matrix of its own. None in the tree leaves that leaf as it is; None for the whole tree
        says that every leaf is a plain [fan_in, fan_out] matrix.
      newton_schulz: How; `NewtonSchulz()` if None.
      adaptive: Multiply each matrix by its dual norm `<G, orthogonalize(G)>` (about the sum of its singular
        values): steepest descent with its length, as derived. Each matrix of a stacked leaf has its own norm.

    Returns:
      A stateless `optax.GradientTransformation`.

    Raises:
      ValueError, TypeError: While tracing: a leaf with fewer than two axes, axes that overlap or are out of
        range, an empty or an integer leaf, dimension numbers that do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.orthogonalize(newton_schulz=muonjax.NewtonSchulz.accurate())
      >>> updates, _ = tx.update({"w": 3e-5 * jnp.eye(4)}, tx.init(None))
      >>> bool(jnp.allclose(updates["w"], jnp.eye(4), atol=1e-5))
      True

    Source: Jordan et al., "Muon", 2024; Bernstein & Newhouse, "Old optimizer, new norm", 2024, for
    `adaptive`.
    """
    settings = NewtonSchulz() if newton_schulz is None else newton_schulz
    if not isinstance(settings, NewtonSchulz):
        raise TypeError(
            f"orthogonalize(newton_schulz={settings!r}) must be a NewtonSchulz, such as NewtonSchulz.fast()."
        )

    def update(updates: optax.Updates, state: optax.OptState, params: Any = None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        numbers = resolve_dimension_numbers(dimension_numbers, updates, call="orthogonalize")
        views = [
            None if n is None else matrix_view(x, n, call="orthogonalize")
            for x, n in zip(leaves, numbers, strict=True)
        ]
        matrices = [v.to_matrices(x) for x, v in zip(leaves, views, strict=True) if v is not None]
        results = iter(map_groups(lambda x: _newton_schulz(x, settings), matrices))
        for i, view in enumerate(views):
            if view is not None:
                y = next(results)
                if adaptive:
                    y = y * _dual_norm(view.to_matrices(leaves[i]), y)
                leaves[i] = view.to_leaf(y)
        return jax.tree.unflatten(treedef, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


_newton_schulz = newton_schulz  # the setting of the same name hides it inside `orthogonalize`


def _dual_norm(g: jax.Array, y: jax.Array) -> jax.Array:
    """<g, y> a matrix, [batch, 1, 1]: the dual of the spectral norm, where y is g's polar factor."""
    product = jnp.sum(
        g.conj() * y, axis=(-2, -1), keepdims=True, dtype=jnp.promote_types(g.dtype, jnp.float32)
    )
    return product.real.astype(y.real.dtype)
