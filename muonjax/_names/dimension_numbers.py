"""Decide by names which parameters go to Muon and as which matrices: from paths, shapes and the leaves next to a leaf.

The evidence, in this order; what comes first decides:

  1. the names in the path: what the parameter is (`roles`), if its shape fits;
  2. which axes count layers: all parameters of a scanned module have one axis more (`axes`);
  3. its bias, its attention's other projections, the order of axes in the rest of the tree, and last its own shape
     (`axes`);
  4. whether it is an end of the model: a patch embedding or an output head (`ends_of_model`).

A rule of the caller's replaces the answer. What nothing tells, and what may be an end of the model, is open: it goes to
Adam, and one warning lists all such leaves, with rules that decide them.
"""

import math
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._common import trees
from muonjax._common.arguments import check_pattern, warn_user
from muonjax._matrices.matrix_view import DimensionNumbers, axes_of, matrix_pieces, one_or_several
from muonjax._names import roles
from muonjax._names.axes import Neighbors, matrices, unstack
from muonjax._names.ends_of_model import ends, patch_embedding
from muonjax._names.roles import Answer, Parameter, Path, Role

Rules = Sequence[tuple[str, DimensionNumbers | None]]


class Route(NamedTuple):
    """Where one leaf goes, and why, in a few words."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    numbers: DimensionNumbers | None
    why: str
    is_open: bool  # nothing tells what it is, so that it goes to Adam with a warning


def dimension_numbers(params: Any, *, rules: Rules = ()) -> Any:
    """Says of every leaf whether Muon takes it, and which of its axes are the matrix's rows and columns.

    A weight that maps `reduction_axis` to `output_axis` is a matrix; every other axis is a batch of matrices:

      - a dense kernel [in, out], an adapter's factor: one matrix;
      - an attention's query, key and value [d, heads, size]: one matrix d × (heads·size), as in Moonlight; its output
        [heads, size, d]: one matrix (a program also has a matrix for each head: `Program.dimension_numbers`);
      - a convolution [*window, in, out]: one matrix (window·in) × out;
      - query, key and value in one kernel: three matrices, also of unequal sizes; experts: a matrix each; a scanned
        stack: a matrix per layer.

    Biases, scales, embeddings of tokens, patches and positions, output heads, state-space parameters, depthwise
    convolutions, vectors and integers are None: they belong to Adam. What names leave open is None too, and one warning
    lists these leaves with rules for them.

    Args:
      params: A tree of arrays, tracers or `jax.ShapeDtypeStruct`s: nested dicts, `FrozenDict`, Linen's
        metadata boxes, an NNX module or its `nnx.State`, an Equinox module's arrays.
        `optax.MaskedNode`s stay what they are. Pass the whole tree, unmasked where you can: its neighbors tell what a
        leaf is.
      rules: Pairs (regular expression, dimension numbers or None); the first match decides. The expression is
        searched (`re.search`) in the "/"-joined path, "decoder/attn/query/kernel"; the numbers count the
        leaf's own axes.

    Returns:
      The tree with `MuonDimensionNumbers`, `FusedDimensionNumbers` or None in place of the leaves; of an NNX module
      its `nnx.Param`s.

    Raises:
      ValueError: A rule that matches no leaf.
      TypeError: A rule that gives an integer leaf to Muon.

    Example:
      >>> import jax
      >>> leaf = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
      >>> dimension_numbers({"query": {"bias": leaf(12, 64), "kernel": leaf(768, 12, 64)}})
      {'query': {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))}}

    Sources: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), whose published example gives
    Muon every matrix but the embedding and the head; Jordan, "Muon" (2024), on convolutions, and on query, key and
    value separately.
    """
    arrays = trees.parameters_of(params)
    return numbers_tree(*routes(arrays, rules=rules, layers=params))


def numbers_tree(found: Sequence[Any], treedef: Any) -> Any:
    """The tree of dimension numbers of what `routes` returns."""
    return jax.tree.unflatten(treedef, [r.numbers if isinstance(r, Route) else r for r in found])


def decays(params: Any, vectors: Collection[str] = ()) -> Any:
    """Which leaves weight decay is for: a tree of booleans, False for biases, scales and other `vectors`.

    >>> import jax.numpy as jnp
    >>> decays({"embedding": jnp.ones((9, 4)), "query": {"bias": jnp.ones((2, 4))}, "scale": jnp.ones(4)})
    {'embedding': True, 'query': {'bias': False}, 'scale': False}
    """
    paths, leaves, treedef = trees.flatten_with_names(params)
    found = zip(paths, roles.read_roles(paths), leaves, strict=True)
    return treedef.unflatten(
        leaf
        if trees.is_masked(leaf)
        else role.name not in ("bias", "scale") and jnp.ndim(leaf) > 1 and "/".join(path) not in vectors
        for path, role, leaf in found
    )


def routes(
    params: Any,
    *,
    rules: Rules = (),
    reasons: Mapping[str, str] = {},
    layers: Any = None,
    call: str = "dimension_numbers",
    warn: bool = True,
) -> tuple[list[Route | optax.MaskedNode], Any]:
    """The routes of all leaves in order, masked nodes among them, and the tree's structure.

    Args:
      params: As in `dimension_numbers`.
      rules: As in `dimension_numbers`.
      reasons: Why a program could not decide a leaf, by its "/"-joined path. What names say of such a leaf counts,
        and a warning gives the reason, also where names have an answer that is Muon's.
      layers: The modules that `params` are of, where these are no tree of modules.
      call: Whom `params` were given to, for messages about them.
      warn: Whether to warn of what may be wrong.
    """
    check_parameters(params, call, warn=warn)
    paths, leaves, treedef = trees.flatten_with_names(params)
    ruled = {path: Answer(numbers, "rule") for path, numbers in apply_rules(paths, leaves, rules).items()}
    types = types_of_modules(params if layers is None else layers)
    answers: dict[Path, Answer] = {}
    whole: list[Parameter] = []
    for path, leaf, role in zip(paths, leaves, roles.read_roles(paths), strict=True):
        if trees.is_masked(leaf):
            continue
        shape, kind = jnp.shape(leaf), types.get("/".join(path))
        if not jnp.issubdtype(trees.dtype_of(leaf), jnp.inexact):
            answers[path] = Answer(None, "not a floating-point leaf")
        else:
            role = kind if kind and role.muon else role
            whole.append(Parameter(path, role, shape, tuple(range(len(shape))), shape))
    parameters = unstack(whole)
    neighbors = Neighbors(parameters)
    found = {p.path: _decide(p, neighbors) for p in parameters}
    found |= ends(parameters, found)
    answers |= {
        p.path: found[p.path]._replace(numbers=_on_leaf(found[p.path].numbers, p.axes)) for p in parameters
    }
    answers |= ruled
    if warn:
        _warn_of_open(parameters, answers, paths, reasons)
        _warn_of_unfollowed(parameters, answers, reasons)
    return [
        leaf
        if trees.is_masked(leaf)
        else Route("/".join(path), jnp.shape(leaf), trees.dtype_of(leaf), *answers[path])
        for path, leaf in zip(paths, leaves, strict=True)
    ], treedef


def _warn_of_open(
    parameters: Sequence[Parameter],
    answers: Mapping[Path, Answer],
    paths: Sequence[Path],
    reasons: Mapping[str, str],
) -> None:
    """Warn once of all leaves that nothing tells, with rules that decide them."""
    open_parameters = [p for p in parameters if answers[p.path].is_open]
    if not open_parameters:
        return
    lines = []
    for p in open_parameters:
        path = "/".join(p.path)
        reason = f" ({reasons[path]})" if path in reasons else ""
        lines.append(f"{path!r} {p.leaf_shape}: {answers[p.path].why}{reason}")
    rules = _suggested([p.path for p in open_parameters], paths)
    warn_user(
        "muonjax can't tell by names alone what these leaves are, and gives them to Adam: "
        f"{trees.listed(lines)}. {INSPECT} By hand: muonjax.dimension_numbers(params, rules=[{rules}]), "
        "where MuonDimensionNumbers(rows, columns) is for Muon."
    )


def _warn_of_unfollowed(
    parameters: Sequence[Parameter], answers: Mapping[Path, Answer], reasons: Mapping[str, str]
) -> None:
    """Warn once of all leaves that a program could not follow and that names give to Muon."""
    lines = []
    for p in parameters:
        path = "/".join(p.path)
        if path in reasons and answers[p.path].numbers is not None:
            lines.append(f"{path!r} {p.leaf_shape}: {reasons[path]}; by its name {answers[p.path].why}")
    if lines:
        warn_user(
            f"The program does not decide these leaves, and their names give them to Muon: {trees.listed(lines)}. "
            "Check their matrices with muonjax.tabulate(params, program); a tree in place of the program corrects them."
        )


def _decide(p: Parameter, neighbors: Neighbors) -> Answer:
    """One leaf, as one layer sees it."""
    is_matrix = sum(size > 1 for size in p.shape) > 1
    is_odd = is_matrix and neighbors.contradict(p)
    if not p.role.muon and not is_odd:
        return Answer(None, p.role.name)
    if patch := patch_embedding(p):
        return patch
    if not is_matrix:
        return Answer(None, "vector")
    numbers = None if p.stacked or is_odd else matrices(p, neighbors)
    if numbers is None:
        return Answer(None, f"{p.role.name}, axes unknown", is_open=True)
    sides = [math.prod(p.shape[i] for i in axes_of(axes)) for axes in numbers[:2]]
    if 1 in sides:
        return Answer(None, f"{p.role.name} with one {'row' if sides[0] == 1 else 'column'}")
    stacked = ", stacked" if math.prod(p.shape) < math.prod(p.leaf_shape) else ""
    return Answer(numbers, p.role.name + stacked)


def _on_leaf(numbers: DimensionNumbers | None, axes: tuple[int, ...]) -> DimensionNumbers | None:
    """Dimension numbers of one layer, written in the axes of the leaf."""
    if numbers is None or axes == tuple(range(len(axes))):
        return numbers
    rows, columns = (one_or_several([axes[i] for i in axes_of(side)]) for side in numbers[:2])
    found: Any = numbers._replace(reduction_axis=rows, output_axis=columns)
    return found._replace(axis=axes[found.axis]) if hasattr(found, "axis") else found


_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")


def check_parameters(params: Any, call: str = "dimension_numbers", *, warn: bool = True) -> None:
    """Raises TypeError for a module or an optimizer in place of parameters, and for what is no array among them.

    Warns of other collections next to them.
    """
    kind = type(params).__name__
    if callable(getattr(params, "dimension_numbers", None)):
        raise TypeError(f"{call}(params) got what inspect returned; it is second: {call}(params, program).")
    is_leaf = jax.tree_util.all_leaves([params])
    makes_others = hasattr(params, "init") and (hasattr(params, "apply") or hasattr(params, "update"))
    has_no_arrays = is_leaf and hasattr(params, "__dict__") and not hasattr(params, "dtype")
    # An optimizer and Haiku's `Transformed` are tuples.
    if has_no_arrays or (makes_others and (is_leaf or isinstance(params, tuple))):
        raise TypeError(f"{call}(params) got {kind} and no arrays, such as model.init(key, x)['params'].")
    for path, leaf in trees.flatten_paths(params).items():
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        if callable(leaf) or not (is_number or trees.is_masked(leaf)):
            what = f"{path!r} is no array but {reprlib.repr(leaf)}"
            raise TypeError(f"{call}: {what}: eqx.filter(model, eqx.is_inexact_array).")
    if warn and isinstance(params, Mapping) and "params" in params:
        beside = [str(name) for name in params if name in _COLLECTIONS]
        if beside:
            warn_user(f"{call}(params) got {', '.join(beside)} too: give variables['params'] alone.")


def apply_rules(paths: Sequence[Path], leaves: Sequence[Any], rules: Rules) -> dict[Path, Any]:
    """What the first rule that matches says of each leaf."""
    for rule in rules if isinstance(rules, Sequence) else [rules]:
        is_pair = isinstance(rule, Sequence) and len(rule) == 2 and isinstance(rule[0], str)
        if not (is_pair and isinstance(rule[1], (DimensionNumbers, type(None)))):
            raise TypeError(f"dimension_numbers(rules=...) has {rule!r}; give pairs: pattern, numbers.")
        check_pattern("dimension_numbers", "rules", rule[0])
    named = {"/".join(path): (path, leaf) for path, leaf in zip(paths, leaves, strict=True)}
    ruled: dict[tuple[str, ...], DimensionNumbers | None] = {}
    for pattern, numbers in rules:
        matched = [name for name in named if re.search(pattern, name)]
        if not matched:
            shown = ", ".join(list(named)[:3])
            raise ValueError(f"rules=...: {pattern!r} matches no leaf; paths look like {shown}.")
        for name in matched:
            path, leaf = named[name]
            if path not in ruled and not trees.is_masked(leaf):
                matrix_pieces({name: numbers}, {name: leaf}, call="dimension_numbers(rules=...)")
                ruled[path] = numbers
    return ruled


def types_of_modules(params: Any) -> dict[str, Role]:
    """What modules say that names can't, by the path of a parameter: an embedding by their type, as Equinox calls it,
    and another use by their settings, groups or the letters of an einsum. Raises for axes with names, as Haliax's and
    penzai's arrays have them: a program reads these better."""

    def kind(node: Any) -> Role | None:
        groups = getattr(node, "feature_group_count", getattr(node, "groups", 1))  # Flax's and Equinox's
        if hasattr(node, "einsum_str") or (isinstance(groups, int) and groups > 1):
            return roles.SPECIAL
        return roles.EMBEDDING if type(node).__name__ in ("Embedding", "Embed") else None

    def has_names(node: Any) -> bool:
        return hasattr(node, "named_axes") or (hasattr(node, "array") and hasattr(node, "axes"))

    found: dict[str, Role] = {}
    nodes = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda node: has_names(node) or kind(node) is not None
    )
    for path, node in nodes:
        if has_names(node):
            raise TypeError(
                f"{'/'.join(trees.names(path))!r} has axes with names, which nothing reads here. {INSPECT}"
            )
        if role := kind(node):
            below = jax.tree_util.tree_leaves_with_path(node)
            found |= {"/".join(trees.names((*path, *rest))): role for rest, _ in below}
    return found


INSPECT = "Better: program = muonjax.inspect(loss_fn, params, batch), then muonjax.muon(2e-3, program)."


def _suggested(chosen: Sequence[Path], paths: Sequence[Path]) -> str:
    """Rules for these leaves and no others, numbered ones together, as a person pastes them; None is Adam."""
    exact = {path: re.escape("/".join(path)) for path in paths}
    alike = {path: re.sub(r"\d+", r"\\d+", pattern) for path, pattern in exact.items()}
    others = {alike[path] for path in paths if path not in chosen}
    patterns = dict.fromkeys(exact[path] if alike[path] in others else alike[path] for path in chosen)
    return ", ".join(f"(r'^{pattern}$', None)" for pattern in patterns)
