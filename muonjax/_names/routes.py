"""Decide by paths, shapes and neighbors which parameters go to Muon, and as which matrices.

The evidence, in this order; what comes first decides:

  1. the names in the path: what the parameter is (`roles`), if its shape fits;
  2. which axes count layers: all parameters of a scanned module have one axis more (`layer_axes`);
  3. its bias, its attention's other projections, the order of axes in the rest of the tree, and
     last its own shape (`neighbors`, `axes`);
  4. whether it is an end of the model: a patch embedding (`convolutions`) or an output head
     (`ends_of_model`).

A rule of the caller's replaces the answer. A leaf that nothing decides, or that may be an end of
the model, is open: it goes to Adam, and one warning lists all such leaves. A model in which no name
is an end is warned about, too.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muonjax._common import trees
from muonjax._common.arguments import errors_of, warn_once
from muonjax._common.nnx_models import parameters_of
from muonjax._names import roles
from muonjax._names.axes import matrices
from muonjax._names.callers_rules import PathRules, apply_rules
from muonjax._names.check_parameters import INSPECT, check_parameters
from muonjax._names.convolutions import patch_embedding
from muonjax._names.ends_of_model import ends
from muonjax._names.layer_axes import has_axis_of_layers, unstack
from muonjax._names.neighbors import Neighbors
from muonjax._names.roles import Answer, Parameter, Role

# How the reason of an answer begins if names, or the caller's rules, know an end of the model.
_END_OR_RULE = "embedding|patch embedding|output head|rule"


def dimension_numbers(params: Any, *, rules: PathRules = ()) -> Any:
    """Says of every leaf whether Muon takes it, and which of its axes are rows and columns.

    A weight that maps `reduction_axis` to `output_axis` is a matrix; every other axis is a batch of
    matrices:

      - a dense kernel [in, out], an adapter's factor: one matrix;
      - an attention's query, key and value [d, heads, size]: one matrix d × (heads·size), as in
        Moonlight; its output [heads, size, d]: one matrix (a program also has a matrix for each
        head: `Program.dimension_numbers`);
      - a convolution [*window, in, out]: one matrix (window·in) × out;
      - query, key and value in one kernel: three matrices, also of unequal sizes; experts: a matrix
        each; a scanned stack: a matrix per layer.

    Biases, scales, embeddings of tokens, patches and positions, output heads, state-space
    parameters, depthwise convolutions, vectors and integers are None: they belong to Adam. What
    names leave open is None too, and one warning lists these leaves and says how to decide them.

    Args:
      params: A tree of arrays, tracers or `jax.ShapeDtypeStruct`s: nested dicts, `FrozenDict`,
        Linen's metadata boxes, an NNX module or its `nnx.State`, an Equinox module's arrays.
        `optax.MaskedNode`s stay what they are. Pass the whole tree, unmasked where you can: its
        neighbors tell what a leaf is.
      rules: Pairs (regular expression, dimension numbers or None); the first match decides. The
        expression is searched (`re.search`) in the "/"-joined path, "decoder/attn/query/kernel";
        the numbers count the leaf's own axes.

    Returns:
      The tree with `MuonDimensionNumbers`, `FusedDimensionNumbers` or None in place of the leaves;
      of an NNX module its `nnx.Param`s.

    Raises:
      ValueError: A rule that matches no leaf.
      TypeError: A rule that gives an integer leaf to Muon.

    Example:
      >>> import jax
      >>> leaf = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
      >>> dimension_numbers({"query": {"bias": leaf(12, 64), "kernel": leaf(768, 12, 64)}})
      {'query': {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=0, output_axis=(1,
      2))}}

    Sources: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), whose published
    example gives Muon every matrix but the embedding and the head; Jordan, "Muon" (2024), on
    convolutions, and on query, key and value separately.
    """
    # {"up/kernel": Answer(MuonDimensionNumbers(0, 1), "dense")}, in the order of the tree's leaves;
    # an `optax.MaskedNode` is a leaf in neither.
    answers = routes(params, rules=rules)
    # The `nnx.Param`s of an NNX module; any other tree as it is.
    treedef = jax.tree.structure(parameters_of(params))
    return treedef.unflatten([answer.numbers for answer in answers.values()])


def routes(
    params: Any, *, rules: PathRules = (), reasons: Mapping[str, str] = {}
) -> dict[str, Answer]:
    """Decide by names, shapes and neighbors where each leaf goes; warn of what they leave open.

    Returns what is decided about each leaf, by its "/"-joined path, in the order of the tree:
    {"up/kernel": Answer(MuonDimensionNumbers(0, 1), "dense")}. What is masked is no leaf.

    Args:
      params: As in `dimension_numbers`.
      rules: As in `dimension_numbers`.
      reasons: Why a program could not decide a leaf, by its "/"-joined path. Names decide such a
        leaf, and a warning gives the reason, also if they give it to Muon.
    """
    # The parameters of an NNX model; any other tree as it is.
    arrays = parameters_of(params)
    with errors_of("dimension_numbers"):
        check_parameters(arrays)
        leaves = trees.flatten_paths(arrays)
        ruled = apply_rules(leaves, rules)
    # Modules know more than a tree of their arrays, such as that a layer is an embedding.
    parameters = _parameters(arrays, roles.types_of_modules(params))
    # What leaves say of each other: a bias shows the outputs of its kernel, and all together show
    # in which order the library stores weights.
    neighbors = Neighbors(parameters)
    answers = {p.path: _answer_by_layer(p, neighbors) for p in parameters}
    answers |= ends(parameters, answers)
    # What the caller says counts more than names, also for a leaf that is an end of the model.
    for path, numbers in ruled.items():
        answers[path] = Answer(numbers, "rule")
    _warn(parameters, answers, reasons)
    # Integers have no answer, unless a rule gives one.
    no_parameter = Answer(None, "not a floating-point leaf")
    return {
        path: answers.get(path, no_parameter)
        for path, leaf in leaves.items()
        if not trees.is_masked(leaf)
    }


def _parameters(arrays: Any, roles_of_modules: Mapping[str, Role]) -> list[Parameter]:
    """The floating-point leaves of a tree, each with its role and with the axes that one layer has.

    `roles_of_modules` are those that types of modules show, by the path of the parameter.
    """
    keys_of_leaves, leaves = trees.flatten_with_names(arrays)
    paths = list(map("/".join, keys_of_leaves))
    # Masked leaves too: they tell what their neighbors are.
    roles_by_path = roles.read_roles(paths)
    parameters = []
    for keys, path, leaf in zip(keys_of_leaves, paths, leaves, strict=True):
        if trees.is_masked(leaf):
            continue
        # Integers count or are quantized; neither optimizer takes them.
        if not jnp.issubdtype(trees.dtype_of(leaf), jnp.inexact):
            continue
        # The type of a module shows what its kernel is: that of an `eqx.nn.Embedding` is an
        # embedding under any name, and that of a grouped convolution is `SPECIAL`, which stays
        # open. The convolution's bias has the same role there, which is wrong: what names give to
        # Adam, such as a bias, keeps the role that they show.
        role = roles_by_path[path]
        if role not in roles.ADAM:
            role = roles_of_modules.get(path, role)
        # All axes of the leaf, until `unstack` removes those that count layers or parts
        axes = tuple(range(jnp.ndim(leaf)))
        parameters.append(Parameter(keys, path, role, jnp.shape(leaf), axes))
    return unstack(parameters)


def _answer_by_layer(p: Parameter, neighbors: Neighbors) -> Answer:
    """What names say of a parameter, wherever its layer is in the model; `ends` corrects that for
    the layers at an end of it."""
    # The path's name is that of a vector or a table, such as `norm` or `embed`, but a bias next to
    # it, or its own name `kernel`, shows a matrix. Whether the name is wrong or the bias belongs
    # elsewhere can't be told, so that such a leaf is open.
    is_misnamed = p.is_matrix and neighbors.contradict_name(p)
    if p.role in roles.ADAM and not is_misnamed:
        return Answer(None, p.role.name)
    # Before its axes are asked for: an embedding of patches is Adam's however it is stored.
    if patch := patch_embedding(p):
        return patch
    if not p.is_matrix:
        return Answer(None, "vector")
    # `unstack` has removed the axes of layers that it could find. Where one is left, the axes can't
    # be read. None, for a leaf that may or may not have one, counts as False: other leaves of its
    # module would have shown a stack.
    is_unreadable = is_misnamed or has_axis_of_layers(p, neighbors)
    numbers = None if is_unreadable else matrices(p, neighbors)
    if numbers is None:
        return Answer(None, f"{p.role.name}, axes unknown", is_open=True)
    # A matrix with one row or one column is a vector in another shape.
    if 1 in map(math.prod, p.sizes_of(numbers)):
        return Answer(None, f"{p.role.name} with one row or column")
    return Answer(numbers, f"{p.role.name}, stacked" if p.is_stack else p.role.name)


def _warn(
    parameters: Sequence[Parameter],
    answers: Mapping[str, Answer],
    reasons: Mapping[str, str],
) -> None:
    """Warn of open leaves, of a model without ends, and of leaves that a program could not follow.

    Args:
      parameters: The floating-point leaves.
      answers: What names and rules say of each.
      reasons: Why a program could not decide a leaf, by its "/"-joined path.
    """
    open_leaves, open_paths, unfollowed = [], [], []
    for p in parameters:
        answer = answers[p.path]
        leaf = f"{p.path!r} {p.leaf_shape}"
        reason = reasons.get(p.path)
        # What goes to Adam with a vector's shape is no surprise,
        # even if the program could not follow it.
        if reason and (answer.numbers is not None or p.is_matrix):
            optimizer = "Adam" if answer.numbers is None else "Muon"
            unfollowed.append(
                f"{leaf}, {optimizer}: {reason}; by its name {answer.why}"
            )
        elif answer.is_open:
            open_leaves.append(f"{leaf}: {answer.why}")
            open_paths.append(re.escape(p.path))
    if unfollowed:
        warn_once(
            "The program does not decide these leaves, and their names do: "
            f"{trees.listed(unfollowed)}. Check them with "
            "muonjax.tabulate(params, program); program.with_rules([(path, None)]) corrects them."
        )
    if open_leaves:
        warn_once(
            "muonjax can't tell by names alone what these leaves are, and gives them to Adam: "
            f"{trees.listed(open_leaves)}. {INSPECT} By hand: muonjax.dimension_numbers(params, "
            f"rules=[(r'^{open_paths[0]}$', None)]), and so on; MuonDimensionNumbers(rows, "
            "columns) is for Muon."
        )
    elif not reasons:
        # Names alone decide all leaves, so that one of them should be an end's. (A program gives
        # reasons. Names decide few leaves then, and the first warning lists them.)
        _warn_without_ends(parameters, answers)


def _warn_without_ends(
    parameters: Sequence[Parameter], answers: Mapping[str, Answer]
) -> None:
    """Warn that Muon takes all matrices, if no name is that of an embedding or an output head."""
    muon_leaves = []
    for p in parameters:
        # Nothing is missing if a leaf goes to Adam as an end, with a reason such as "embedding" or
        # "output head: by its name", or if one has the reason "rule": the caller has looked.
        if re.match(_END_OR_RULE, answers[p.path].why):
            return
        if answers[p.path].numbers is not None:
            muon_leaves.append(f"{p.path!r} {p.leaf_shape}")
    # A single matrix has no layer before or after it, and is no model with ends.
    if len(muon_leaves) > 1:
        warn_once(
            "No name is that of an embedding or an output head, so that Muon takes all "
            f"{len(muon_leaves)} matrices, {muon_leaves[0]} and {muon_leaves[-1]} too. {INSPECT} "
            "By hand: muonjax.dimension_numbers(params, rules=[('path of an end', None)])."
        )


def decays(params: Any, vectors: Collection[str] = ()) -> Any:
    """Which leaves weight decay is for, a tree of booleans: not for biases, scales, leaves of one
    axis, and `vectors`, the paths that a program knows as such.

    >>> import jax.numpy as jnp
    >>> decays({"embedding": jnp.ones((9, 4)), "query": {"bias": jnp.ones((2, 4))}})
    {'embedding': True, 'query': {'bias': False}}
    """
    # Masked leaves too: the names next to a leaf tell what it is.
    leaves = trees.flatten_paths(params)
    decayed = []
    for path, role in roles.read_roles(leaves).items():
        # The bias of a query has two axes, [heads, size], and is a vector nevertheless.
        is_vector = role.name in ("bias", "scale") or path in vectors
        # In AdamW's tree the leaves of Muon are masked, and `jax.tree`, which makes the result,
        # does not count them.
        if not trees.is_masked(leaves[path]):
            decayed.append(jnp.ndim(leaves[path]) > 1 and not is_vector)
    return jax.tree.structure(params).unflatten(decayed)
