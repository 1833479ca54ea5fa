"""The update of a matrix becomes nearly orthogonal, on one device or on a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import optax

from muonjax._common.arguments import errors_of
from muonjax._common.platform_policy import Policy, policy_of
from muonjax._matrices.batching import Function, map_leaves
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    matrix_pieces,
)
from muonjax._mesh.distribution import (
    Distribution,
    check_distribution,
    shardings_on_mesh,
)
from muonjax._mesh.map_on_mesh import map_on_mesh
from muonjax._newton_schulz.polar_factor import polar_function
from muonjax._newton_schulz.settings import NewtonSchulz, settings_of


def orthogonalize(
    *,
    dimension_numbers: DimensionNumbersTree | None = None,
    newton_schulz: NewtonSchulz | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformation:
    r"""Replace every matrix of the updates by its polar factor: U S V^H -> U V^H, nearly.

    This is steepest descent in the spectral norm.
    Leaves of equal or neighboring matrix shape share a loop.

    Args:
      dimension_numbers: Which axes of a leaf are rows and columns: a tree of
        `MuonDimensionNumbers`, or a prefix of one, or a function of the updates that returns one.
        All other axes are batch axes: each index is a matrix of its own. None in the tree leaves
        that leaf as it is; None for the whole tree says that every leaf is a plain
        [fan_in, fan_out] matrix.
      newton_schulz: Settings of the iteration; None is `NewtonSchulz()`.
      distribution: How the leaves are sharded over a mesh, so that each matrix is orthogonalized
        once and not on every device. Not needed on one device, nor with explicit axis types,
        where the arrays themselves say it.

    Returns:
      A stateless `optax.GradientTransformation`.

    Raises:
      ValueError, TypeError: While tracing: a leaf with fewer than two axes, axes that overlap or
        are out of range, an empty or an integer leaf, dimension numbers that do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.orthogonalize(newton_schulz=muonjax.NewtonSchulz.accurate())
      >>> updates, _ = tx.update({"w": 3e-5 * jnp.eye(4)}, tx.init(None))
      >>> bool(jnp.allclose(updates["w"], jnp.eye(4), atol=1e-5))
      True

    Source: Jordan et al., "Muon", 2024; Bernstein & Newhouse, "Old optimizer, new norm", 2024.
    """
    with errors_of("orthogonalize"):
        settings = settings_of(newton_schulz)
        check_distribution(distribution)

    @errors_of("orthogonalize")
    def update(updates, params):
        del params
        # `map_matrices` calls it with the policy of the updates' platform.
        polar = functools.partial(polar_function, settings)
        return map_matrices(polar, updates, dimension_numbers, distribution)

    return optax.stateless(update)


def map_matrices(
    function: Callable[[Policy], Function],
    tree: Any,
    dimension_numbers: DimensionNumbersTree | None,
    distribution: Distribution | None,
) -> Any:
    """A function of each matrix of a tree: equal and similar shapes share a loop,
    and on a mesh each matrix has one owner.

    Args:
      function: From the policy to f, a `Function` of stacks of matrices. It has f(x.mT) = f(x).mT,
        because a tall matrix is transposed before f and after it, to be in a stack with wide ones;
        and columns of zeros change no others, as some fill up a matrix to the size of its stack.
      tree: The leaves; those without dimension numbers stay.
      dimension_numbers: As in `orthogonalize`.
      distribution: As in `orthogonalize`.

    Returns:
      The tree with the results in place of the matrices.
    """
    # For each piece, which is a leaf or a part of one: its array, its view,
    # and below the index of its leaf.
    pieces = matrix_pieces(dimension_numbers, tree)
    inputs = pieces.of(tree)
    views = [piece.view for piece in pieces]
    # The platform of the matrices decides how they are stacked, and in which dtype they are
    # multiplied. A mesh tells the platform of traced arrays too, which have no device yet.
    mesh = None if distribution is None else distribution.mesh
    policy = policy_of(*inputs, mesh=mesh)
    f = function(policy)
    indices = [piece.leaf for piece in pieces]
    # None where nothing says how the leaves are sharded, as on one device.
    shardings = shardings_on_mesh(distribution, tree, indices)
    if shardings is None:
        results = map_leaves(f, inputs, views, policy)
    else:
        # Each matrix goes to its owner and comes back.
        results = map_on_mesh(f, inputs, views, shardings, policy)
    return pieces.replaced(tree, results)
