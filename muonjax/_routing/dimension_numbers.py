"""Decide which parameters go to Muon and as which matrices, from paths, shapes and siblings.

The evidence, in this order; what comes first decides:

  1. a rule of the caller's; its leaf is no evidence for others;
  2. the names of the axes, where the array carries them;
  3. the names in the path: what the parameter is (`roles`), if its shape fits;
  4. which axes count layers: all parameters of a scanned module have one axis more (`stacked_layers`);
  5. its bias, its attention's other projections, its adapter's other factor, the order of axes in the rest of the tree,
     and last its own shape (`matrices`);
  6. whether it is an end of the model: a patch embedding or an output head (`output_heads`).

What none of them tells is refused, with a rule that decides it. Sizes alone decide nothing: where only they speak for
an output head, a warning says so.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._arguments import warn_user
from muonjax._matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    axes_of,
    explained,
    matrix_pieces,
    one_or_several,
)
from muonjax._nnx_models import parameters_of
from muonjax._routing import roles
from muonjax._routing.given import (
    Rules,
    apply_rules,
    by_axis_names,
    chances_message,
    check_parameters,
    named_axes,
    settings_message,
    tables,
    undecided_message,
    unlike_their_names,
)
from muonjax._routing.matrices import is_dense_general, matrices
from muonjax._routing.output_heads import for_adam
from muonjax._routing.roles import Parameter, Role, module, words
from muonjax._routing.siblings import Siblings, is_trailing_window, is_weight, is_window
from muonjax._routing.stacked_layers import unstack
from muonjax._trees import Key, dtype_of, flatten_with_names, is_masked


class Route(NamedTuple):
    """Where one leaf goes, and why, in a few words."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    numbers: DimensionNumbers | None
    why: str


def dimension_numbers(
    params: Any,
    *,
    rules: Rules = (),
    attention: Literal["whole", "heads"] = "whole",
    scan_axis: int | None = None,
) -> Any:
    """Says of every leaf whether Muon takes it, and which of its axes are the matrix's rows and columns.

    A weight that maps `reduction_axis` to `output_axis` is a matrix; every other axis is a batch of matrices:

      - a dense kernel [in, out], an adapter's factor: one matrix;
      - an attention's query, key and value [d, heads, size]: one matrix d × (heads·size), or with
        `attention="heads"` a matrix per head; its output [heads, size, d]: one matrix in either case;
      - a convolution [*window, in, out]: one matrix (window·in) × out;
      - query, key and value in one kernel: three matrices, also of unequal sizes; experts: a matrix each; a scanned
        stack: a matrix per layer.

    Biases, scales, embeddings of tokens, patches and positions, output heads, state-space parameters, depthwise
    convolutions, vectors and integers are None: they belong to Adam.

    Whole matrices are the default, as in Moonlight, whose update RMS muonjax follows; a matrix per head is GLM-5's
    "Muon Split".

    Args:
      params: A tree of arrays, tracers or `jax.ShapeDtypeStruct`s: nested dicts, `FrozenDict`, Linen's
        metadata boxes, an NNX module or its `nnx.State`, an Equinox module's arrays, Haliax's named arrays.
        `optax.MaskedNode`s stay what they are. Pass the whole tree, unmasked where you can: its neighbours tell what a
        leaf is.
      rules: Pairs (regular expression, dimension numbers or None); the first match decides. The expression is
        searched (`re.search`) in the "/"-joined path, "decoder/attn/query/kernel"; the numbers count the
        leaf's own axes.
      attention: "whole" or "heads".
      scan_axis: The axis of layers in stacked leaves (negative: from the leaf's end); None: found from the
        shapes, where all parameters of a stack agree, and the shorter axis if they agree on several.

    Returns:
      The tree with `MuonDimensionNumbers`, `FusedDimensionNumbers` or None in place of the leaves; of an NNX module
      its `nnx.Param`s.

    Raises:
      ValueError: A leaf that can't be decided, a rule that matches no leaf, another `attention`, a `scan_axis` on which
        neighbours differ.
      TypeError: A rule that gives an integer leaf to Muon.

    Example:
      >>> import jax
      >>> leaf = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
      >>> dimension_numbers({"query": {"bias": leaf(12, 64), "kernel": leaf(768, 12, 64)}})
      {'query': {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))}}

    Sources: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), whose published example gives
    Muon every matrix but the embedding and the head; GLM-5 team, "GLM-5" (arXiv 2602.15763), on Muon Split; Zhang et
    al. (arXiv 2605.08933) compare whole matrices, groups of heads and single heads; Jordan, "Muon" (2024), on
    convolutions, and on query, key and value apart.
    """
    arrays = parameters_of(params)
    return numbers_tree(*routes(arrays, rules=rules, attention=attention, scan_axis=scan_axis, layers=params))


def numbers_tree(found: Sequence[Any], treedef: Any) -> Any:
    """The tree of dimension numbers of what `routes` returns."""
    numbers = [explained(r.numbers, r.why) if isinstance(r, Route) else r for r in found]
    return jax.tree.unflatten(treedef, numbers)


def decays(params: Any) -> Any:
    """Which leaves weight decay is for: a tree of booleans, False for biases, scales and other vectors.

    >>> import jax.numpy as jnp
    >>> decays({"embedding": jnp.ones((9, 4)), "query": {"bias": jnp.ones((2, 4))}, "scale": jnp.ones(4)})
    {'embedding': True, 'query': {'bias': False}, 'scale': False}
    """
    paths, leaves, treedef = flatten_with_names(params)
    vectors = ("bias", "scale")
    return treedef.unflatten(
        leaf if is_masked(leaf) else role.name not in vectors and jnp.ndim(leaf) > 1
        for role, leaf in zip(roles.read_roles(paths), leaves, strict=True)
    )


def routes(
    params: Any,
    *,
    rules: Rules = (),
    attention: str = "whole",
    scan_axis: int | None = None,
    layers: Any = None,
    partial: bool = False,
    call: str = "dimension_numbers",
    warn: bool = True,
) -> tuple[list[Route | optax.MaskedNode], Any]:
    """The routes of all leaves in order, masked nodes among them, and the tree's structure.

    Args:
      params: As in `dimension_numbers`.
      rules: As in `dimension_numbers`.
      attention: As in `dimension_numbers`.
      scan_axis: As in `dimension_numbers`.
      layers: The modules that `params` are of, where these are no tree of modules.
      partial: Leave None where a leaf can't be decided, and output heads among the matrices, and do not warn.
      call: Whom `params` were given to, for messages about them.
      warn: Whether to warn of what may be wrong.
    """
    if attention not in ("whole", "heads"):
        raise ValueError(f"dimension_numbers(attention={attention!r}) is unknown; use 'whole' or 'heads'.")
    check_parameters(params, call, warn=warn and not partial)
    paths, leaves, treedef = flatten_with_names(params)
    ruled = apply_rules(["/".join(path) for path in paths], rules)
    in_tables = tables(params)
    axis_names = named_axes(params)
    found: dict[tuple[str, ...], tuple[DimensionNumbers | None, str]] = {}
    undecided: list[Parameter] = []
    for path, leaf, role in zip(paths, leaves, roles.read_roles(paths), strict=True):
        name = "/".join(path)
        if is_masked(leaf):
            continue
        shape, dtype = _shape_and_dtype(leaf)
        if name in ruled:
            leaf = jax.ShapeDtypeStruct(shape, "float32" if dtype == jax.dtypes.float0 else dtype or bool)
            matrix_pieces({name: ruled[name]}, {name: leaf}, call="dimension_numbers(rules=...)")
            found[path] = ruled[name], "rule"
        elif dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            found[path] = None, "not a floating-point leaf"
        elif path in axis_names:
            found[path] = by_axis_names(path, role, axis_names[path], attention)
        else:
            role = roles.EMBEDDING if name in in_tables else role
            # A projection by a 1 x 1 convolution is a dense one.
            projects = role.projection or role.parts > 1
            ones = len(shape) - 2 if projects and len(shape) > 3 and {*shape[:-2]} == {1} else 0
            undecided.append(Parameter(path, role, shape[ones:], tuple(range(ones, len(shape))), shape))
    parameters = unstack(_fitting(undecided), scan_axis)
    siblings = Siblings(parameters)
    decided = {p.path: _decide(p, siblings, attention, scan_axis) for p in parameters}
    refused = [p for p in parameters if decided[p.path] is None]
    if refused and not partial:
        raise ValueError(undecided_message(refused, parameters, attention))
    answers = {path: answer or (None, "undecided") for path, answer in decided.items()}
    if not partial:
        ends, chances = for_adam(parameters, {path: numbers for path, (numbers, _) in answers.items()})
        answers |= {path: (None, why) for path, why in ends.items()}
        if chances and warn:
            warn_user(chances_message(chances, parameters))
        special = unlike_their_names(params if layers is None else layers)
        taken = ["/".join(path) for path, (numbers, _) in answers.items() if numbers]
        if warn and (wrong := [path for path in taken if path in special]):
            warn_user(settings_message(wrong))
    found |= {p.path: (_on_leaf(answers[p.path][0], p.axes), answers[p.path][1]) for p in parameters}
    return [
        leaf if is_masked(leaf) else Route("/".join(path), *_shape_and_dtype(leaf), *found[path])
        for path, leaf in zip(paths, leaves, strict=True)
    ], treedef


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    # In a list of pairs (path, array) the path is a leaf too.
    return ((), None) if isinstance(leaf, Key) else (jnp.shape(leaf), dtype_of(leaf))


def _fitting(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The same parameters, without the roles that their shapes do not fit: a norm's weight has as many axes as its
    bias, a table two and no bias (one as long as the vocabulary is that of a tied head)."""
    biases = {module(p.path): p.shape for p in parameters if p.role.name == "bias"}
    sizes = Counter(size for p in parameters if p.role.name != "bias" for size in set(p.shape))

    def fitting(p: Parameter) -> Role:
        bias = biases.get(module(p.path), ())
        if p.role is roles.NORM and bias and len(p.shape) != len(bias):
            return roles.DENSE
        is_long = sum(size > 1 for size in p.shape) > 2
        if p.role is roles.TABLE and (is_long or (bias and sizes[p.shape[0]] > 1)):
            return roles.UNKNOWN
        return p.role

    return [p._replace(role=fitting(p)) for p in parameters]


def _decide(
    p: Parameter, siblings: Siblings, attention: str, scan_axis: int | None
) -> tuple[DimensionNumbers | None, str] | None:
    """One leaf, as one layer sees it; None where nothing tells."""
    role, rank = p.role, len(p.shape)
    if role is roles.NORM and sum(size > 1 for size in p.shape) > 1 and siblings.bias(p) != p.shape:
        return (None, role.name) if p.path[-1] != "kernel" else None
    if not role.muon:
        return None, role.name
    if rank < 2:
        return None, "vector" if rank else "scalar"
    if _is_input_patches(p):
        return None, roles.PATCHES.name
    unknown = role is roles.UNKNOWN and p.stacked is None and not siblings.bias(p)
    if unknown and rank == 3 and scan_axis is not None:
        i = scan_axis % 3
        return MuonDimensionNumbers(*(j for j in range(3) if j != i)), f"{role.name}, stacked"
    if sum(size > 1 for size in p.shape) <= 1:
        return None, "vector"
    numbers = None if p.stacked and not is_dense_general(p) else matrices(p, siblings, attention)
    if numbers is None:
        return None
    sides = [math.prod(p.shape[i] for i in axes_of(axes)) for axes in numbers[:2]]
    if 1 in sides:
        return None, f"{role.name} with one {'row' if sides[0] == 1 else 'column'}"
    return numbers, role.name + (", stacked" if math.prod(p.shape) < math.prod(p.leaf_shape) else "")


def _is_input_patches(p: Parameter) -> bool:
    """Whether a convolution's kernel cuts an image or a video into patches.

    Its window is even, and it is named for an embedding, or it is large and sees few channels.
    """
    *window, inputs, outputs = p.shape
    if is_weight(p) and is_trailing_window(p.shape):
        outputs, inputs, *window = p.shape
    elif not is_window(p.shape):
        return False
    names = r"embed|patch|stem" if inputs <= 4 else r"embed|patch"
    named = any(re.search(names, name.lower()) for name in words(p.path)[-4:-1])
    return window[-1] % 2 == 0 and inputs <= 16 and (named or (window[-1] >= 8 and outputs >= 128))


def _on_leaf(numbers: DimensionNumbers | None, axes: tuple[int, ...]) -> DimensionNumbers | None:
    """Dimension numbers of one layer, written in the axes of the leaf."""
    if numbers is None or axes == tuple(range(len(axes))):
        return numbers
    rows, columns = (one_or_several(tuple(axes[i] for i in axes_of(part))) for part in numbers[:2])
    if isinstance(numbers, FusedDimensionNumbers):
        return FusedDimensionNumbers(rows, columns, numbers.parts, axes[numbers.axis])
    return MuonDimensionNumbers(rows, columns)
