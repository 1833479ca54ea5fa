"""The update of a matrix: `orthogonalize` makes it nearly orthogonal; its shape, or its neurons, give the size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from muonjax._common.arguments import check_choice, check_range, errors_of
from muonjax._common.explicit_axes import zero_beside
from muonjax._common.linalg import at_least_float32, or_one
from muonjax._common.platform_policy import Policy, policy_of
from muonjax._matrices.batching import Function, map_leaves
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    MatrixView,
    matrix_pieces,
)
from muonjax._mesh.distribution import (
    Distribution,
    check_distribution,
    shardings_on_mesh,
)
from muonjax._mesh.exchange import map_on_mesh
from muonjax._newton_schulz.polar_factor import polar_function
from muonjax._newton_schulz.settings import NewtonSchulz, settings_of

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Inexact


def orthogonalize(
    *,
    dimension_numbers: DimensionNumbersTree | None = None,
    newton_schulz: NewtonSchulz | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformation:
    r"""Replace every matrix of the updates by its polar factor: U S V^H -> U V^H, nearly.

    This is steepest descent in the spectral norm. Leaves of equal or neighboring matrix shape share a loop.

    Args:
      dimension_numbers: Which axes of a leaf are rows and columns: a tree of `MuonDimensionNumbers`, or a
        prefix of one, or a function of the updates that returns one. All other axes are batch axes: each
        index is a matrix of its own. None in the tree leaves that leaf as it is; None for the whole tree
        says that every leaf is a plain [fan_in, fan_out] matrix.
      newton_schulz: Settings of the iteration; None is `NewtonSchulz()`.
      distribution: How the leaves are sharded over a mesh, so that each matrix is orthogonalized once and not on every
        device. Not needed on one device, nor with explicit axis types, where the arrays themselves say it.

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

    Source: Jordan et al., "Muon", 2024; Bernstein & Newhouse, "Old optimizer, new norm", 2024.
    """
    with errors_of("orthogonalize"):
        settings = settings_of(newton_schulz)
        check_distribution(distribution)

    @errors_of("orthogonalize")
    def update(updates, params):
        del params
        polar = functools.partial(polar_function, settings)
        return map_matrices(polar, updates, dimension_numbers, distribution)

    return optax.stateless(update)


def map_matrices(
    function: Callable[[Policy], Function],
    tree: Any,
    dimension_numbers: DimensionNumbersTree | None,
    distribution: Distribution | None,
) -> Any:
    """A function of each matrix of a tree: equal shapes share a loop, and on a mesh each matrix has one owner.

    Args:
      function: From the policy to f, with f(x.mT) = f(x).mT.
      tree: The leaves; those without dimension numbers stay.
      dimension_numbers: As in `orthogonalize`.
      distribution: As in `orthogonalize`.
    """
    # For each piece, which is a leaf or a part of one: its array, its view, and the index of its leaf.
    pieces = matrix_pieces(dimension_numbers, tree)
    inputs = pieces.of(tree)
    views = [piece.view for piece in pieces]
    indices = [piece.leaf for piece in pieces]
    leaves = jax.tree.leaves(tree)
    # The platform of the matrices decides how they are stacked, and in which dtype they are multiplied.
    mesh = None if distribution is None else distribution.mesh
    policy = policy_of(*(leaves[i] for i in indices), mesh=mesh)
    f = function(policy)
    shardings = shardings_on_mesh(distribution, tree, indices)
    if shardings is None:
        results = map_leaves(f, inputs, views, policy)
    else:
        # Each matrix goes to its owner and comes back.
        results = map_on_mesh(f, inputs, views, shardings, policy)
    return pieces.replaced(tree, results)


Rule = Literal["rms", "width", "spectral"]


def match_rms(
    rms: float = 0.2,
    *,
    dimension_numbers: DimensionNumbersTree | None = None,
    rule: Rule = "rms",
) -> optax.GradientTransformation:
    r"""Scale orthogonalized updates by their shape.

    An orthogonal m x n matrix of full rank has root mean square 1 / sqrt(max(m, n)); one of rank r has sqrt(r /
    min(m, n)) times that. With `rule`

    - "rms": times `rms` sqrt(max(m, n)): every update of full rank has the root mean square `rms`. AdamW's is
      usually 0.2 to 0.4, so 0.2 lets Muon take AdamW's weight decay, and two to four times its rate.
    - "width": times sqrt(max(1, fan_out / fan_in)), Jordan's; `rms` is not used.
    - "spectral": times sqrt(fan_out / fan_in), the spectral norm at the scale of the layer (Bernstein); `rms`
      is not used.

    Args:
      rms: The root mean square of an update of full rank; > 0.
      dimension_numbers: As in `orthogonalize`.
      rule: Which of the three.

    Returns:
      A stateless `optax.GradientTransformation`.

    Raises:
      ValueError: If `rms` is not positive, the rule is unknown, or the dimension numbers do not fit the tree.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.match_rms(0.2)
      >>> updates, _ = tx.update({"w": jnp.eye(4)}, tx.init(None))
      >>> round(float(jnp.sqrt(jnp.mean(updates["w"] ** 2))), 6)
      0.2

    Source: Liu et al., "Muon is scalable for LLM training" (Moonlight), 2025, eq. (4); Jordan et al.,
    "Muon", 2024; Bernstein & Newhouse, "Modular duality in deep learning", 2024.
    """
    with errors_of("match_rms"):
        check_range(
            "rms", rms, "positive and finite", "; 0.2 is the usual RMS of AdamW's."
        )
        check_choice("rule", rule, get_args(Rule))

    def factor(view: MatrixView) -> float:
        """What an orthogonalized matrix with this view is multiplied by."""
        ratio = view.fan_out / view.fan_in
        if rule == "spectral":
            # This norm maps inputs of RMS 1 to outputs of RMS 1 at most.
            return math.sqrt(ratio)
        if rule == "width":
            # A layer that narrows keeps the norm 1.
            return math.sqrt(max(1.0, ratio))
        # An orthogonal m x n matrix has the RMS 1 / sqrt(max(m, n)).
        return rms * math.sqrt(max(view.fan_in, view.fan_out))

    @errors_of("match_rms")
    def update(updates, params):
        del params
        pieces = matrix_pieces(dimension_numbers, updates)
        scaled = []
        for piece, x in zip(pieces, pieces.of(updates), strict=True):
            scaled.append(x * factor(piece.view))
        return pieces.replaced(updates, scaled)

    return optax.stateless(update)


class NormalizeNeuronsState(NamedTuple):
    """State of `normalize_neurons`.

    Attributes:
      second_moment: A tree like the parameters. For each matrix the running mean, for each of its neurons, of the mean
        square of that neuron's entries; float32, in the leaf's shape with its reduction axes of size 1.
        `optax.MaskedNode()` in place of a leaf that is no matrix, a tuple where a leaf has unequal parts.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> muonjax.normalize_neurons().init({"w": jnp.ones((3, 4))}).second_moment["w"].shape
      (1, 4)
    """

    second_moment: Any


def normalize_neurons(
    decay: float = 0.95,
    *,
    eps: float = 1e-8,
    dimension_numbers: DimensionNumbersTree | None = None,
) -> optax.GradientTransformation:
    r"""Divide each neuron of an orthogonalized update by the root of its running mean square, and keep the norm.

    With O [fan_in, fan_out] an orthogonalized update, whose column j holds the weights of neuron j,

        v_j <- decay v_j + (1 - decay) mean_i O_ij^2
        P_ij = O_ij / (sqrt(v_j) + eps)
        O   <- P ||O||_F / ||P||_F

    It belongs directly after `orthogonalize`: other updates pass without an error, but their second moment then follows
    the size of the gradient.

    Args:
      decay: The decay of the running mean, in [0, 1).
      eps: Added to the root, > 0.
      dimension_numbers: As in `orthogonalize`. The neurons are the output axes; each matrix of a stacked leaf has its
        own.

    Returns:
      An `optax.GradientTransformation` whose state is a `NormalizeNeuronsState`.

    Raises:
      ValueError: If `decay` or `eps` is out of its range, the dimension numbers do not fit the tree, or the state is
        that of other parameters.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.normalize_neurons()
      >>> updates = {"w": jnp.array([[3.0, 0.1], [4.0, 0.2]])}
      >>> updates, state = tx.update(updates, tx.init(updates))
      >>> [round(float(norm), 3) for norm in jnp.linalg.norm(updates["w"], axis=0)]  # both neurons have it
      [3.539, 3.539]
      >>> state.second_moment["w"].shape
      (1, 2)

    Source: Li et al., "NorMuon: making Muon more efficient and scalable", 2025 (arXiv:2510.05491), algorithm 1.
    """
    with errors_of("normalize_neurons"):
        check_range("decay", decay, "in [0, 1)", "; 0.95 is usual.")
        check_range("eps", eps, "positive and finite", "; 1e-8 is usual.")

    @errors_of("normalize_neurons")
    def init(params) -> NormalizeNeuronsState:
        pieces = matrix_pieces(dimension_numbers, params)

        # `params` may be shapes, which have no entries to sum.
        def as_array(leaf: Any) -> jax.Array:
            return leaf if isinstance(leaf, jax.Array) else jnp.zeros_like(leaf)

        arrays = jax.tree.map(as_array, params)
        moments = []
        for piece, array in zip(pieces, pieces.of(arrays), strict=True):
            # A number for each neuron: of a matrix [batch, rows, columns] an array [batch, 1, columns], or with the
            # rows and columns of the view. It is a sum like that of `update`, and so sharded as that one is.
            zero = zero_beside(piece.view.split(array), piece.view.reduction_axes)
            moments.append(zero.astype(jnp.float32))
        return NormalizeNeuronsState(pieces.as_state(moments))

    @errors_of("normalize_neurons")
    def update(updates, state, params=None):
        del params
        pieces = matrix_pieces(dimension_numbers, updates)
        # Each neuron, a column, has one number: a moment has the shape of its piece, with size 1 along the rows.
        shapes = [piece.view.summed_over(piece.view.reduction_axes) for piece in pieces]
        # One array for each piece, after a check of their shapes
        moments = pieces.of_state(state.second_moment, shapes)
        normalized = []
        new_moments = []
        for piece, x, moment in zip(pieces, pieces.of(updates), moments, strict=True):
            x, moment = _normalize(x, moment, piece.view, decay, eps)
            normalized.append(x)
            new_moments.append(moment)
        updates = pieces.replaced(updates, normalized)
        return updates, NormalizeNeuronsState(pieces.as_state(new_moments))

    return optax.GradientTransformation(init, update)


def _normalize(
    update: Inexact[Array, "*leaf"],
    moment: Float[Array, "*neurons"],
    view: MatrixView,
    decay: Any,
    eps: Any,
) -> tuple[Inexact[Array, "*leaf"], Float32[Array, "*neurons"]]:
    """The normalized update of one leaf and the new second moment of its neurons, as `normalize_neurons` has them.

    For a leaf [d, heads, size] with rows d the moment is [1, heads, size].
    """
    # In the view's shape, where rows and columns may be several axes each
    o = view.split(update).astype(at_least_float32(update.dtype))
    # |O_j|^2 of each neuron, which is a column
    squares = jnp.sum(jnp.abs(o) ** 2, view.reduction_axes, keepdims=True)
    # v <- decay v + (1 - decay) |O_j|^2 / fan_in
    moment = decay * moment.astype(squares.dtype) + (1 - decay) * squares / view.fan_in
    # P_j = O_j / (sqrt(v_j) + eps)
    factor = 1 / (jnp.sqrt(moment) + eps)
    # |O|^2 and |P|^2 from the neurons' own norms: no second pass over the update.
    square = jnp.sum(squares, view.output_axes, keepdims=True)
    square_of_p = jnp.sum(squares * factor**2, view.output_axes, keepdims=True)
    # O <- P |O| / |P|
    factor *= jnp.sqrt(square / or_one(square_of_p))
    normalized = (o * factor.astype(o.dtype)).astype(update.dtype)
    return view.join(normalized, like=update), moment.astype(jnp.float32)
