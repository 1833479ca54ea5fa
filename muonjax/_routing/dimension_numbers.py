"""Before the first step: which parameters go to Muon, as which matrices. Knows names and shapes, not Flax."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._matrix_view import (
    DimensionNumbers,
    FusedDimensionNumbers,
    MuonDimensionNumbers,
)
from muonjax._routing.roles import (
    CONVOLUTION,
    INTERLEAVED,
    UNKNOWN,
    Role,
    is_head_scope,
    is_position,
    module,
    roles,
    unit,
)
from muonjax._routing.stacked_layers import Parameter, unstack
from muonjax._trees import dtype_of, flatten_with_names, is_masked

Rules = Sequence[tuple[str, DimensionNumbers | None]]


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
    known: Mapping[str, Role] | None = None,
) -> Any:
    """Says of every leaf whether Muon takes it, and which of its axes are the matrix's rows and columns.

    A weight that maps `reduction_axis` to `output_axis` is a matrix; every other axis is a batch of matrices:

      - a dense kernel [in, out], an adapter's factor: one matrix;
      - an attention's query, key and value [d, heads, size] and output [heads, size, d]: one matrix d ×
        (heads·size), or with `attention="heads"` a matrix a head;
      - a convolution [*window, in, out]: one matrix (window·in) × out;
      - query, key and value in one kernel: three matrices; experts: a matrix each; a scanned stack: a matrix
        a layer.

    Biases, scales, embeddings, positions, output heads, state-space parameters, depthwise convolutions,
    vectors and integers are None: they belong to Adam. So is a kernel from d to the vocabulary in the module
    that holds the embedding.

    Whole matrices are the default because Moonlight, whose update RMS muonjax follows, orthogonalizes its
    query, key and value projections so, every head of a layer in one matrix. A matrix a head is GLM-5's "Muon
    Split", there for the upper halves of MLA; here the output projection is split too.

    Args:
      params: a tree of arrays, tracers or `jax.ShapeDtypeStruct`s: nested dicts, `FrozenDict`, Linen's
        metadata boxes, `nnx.State`. `optax.MaskedNode`s stay what they are. Pass the whole tree, unmasked
        where you can: its neighbours tell what a leaf is.
      rules: pairs (regular expression, dimension numbers or None); the first match decides. The expression is
        searched (`re.search`) in the "/"-joined path, "decoder/attn/query/kernel"; the numbers count the
        leaf's own axes.
      attention: "whole" or "heads".
      scan_axis: the axis of layers in stacked leaves (negative: from the leaf's end); None: found from the
        shapes, where all parameters of a stack agree, and the shorter axis if they agree on several.
      known: path to role, from those who know more than names (`muonjax.nnx.dimension_numbers` of a module).

    Returns:
      The tree with `MuonDimensionNumbers`, `FusedDimensionNumbers` or None in place of the leaves.

    Raises:
      ValueError: a leaf that can't be decided, a rule that matches no leaf, another `attention`.
      TypeError: a rule that gives an integer leaf to Muon.

    Example:
      >>> import jax
      >>> leaf = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
      >>> dimension_numbers({"query": {"bias": leaf(12, 64), "kernel": leaf(768, 12, 64)}})
      {'query': {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))}}

    Sources: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), whose published example gives
    Muon every matrix but the embedding and the head; GLM-5 team, "GLM-5" (2026), on Muon Split; Zhang et al.
    (arXiv 2605.08933) compare whole matrices, groups of heads and single heads; Jordan, "Muon" (2024), on
    convolutions, and on query, key and value apart.
    """
    found, treedef = routes(params, rules=rules, attention=attention, scan_axis=scan_axis, known=known)
    return jax.tree.unflatten(treedef, [r.numbers if isinstance(r, Route) else r for r in found])


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
        for role, leaf in zip(roles(paths), leaves, strict=True)
    )


def routes(
    params: Any,
    *,
    rules: Rules = (),
    attention: str = "whole",
    scan_axis: int | None = None,
    known: Mapping[str, Role] | None = None,
) -> tuple[list[Route | optax.MaskedNode], Any]:
    """The routes of all leaves in order, masked nodes among them, and the tree's structure."""
    if attention not in ("whole", "heads"):
        raise ValueError(f"dimension_numbers(attention={attention!r}) is unknown; use 'whole' or 'heads'.")
    paths, leaves, treedef = flatten_with_names(params)
    ruled = _apply_rules(["/".join(path) for path in paths], rules)

    known = known or {}
    read = [_better(role, known.get("/".join(path))) for path, role in zip(paths, roles(paths), strict=True)]
    parameters = unstack(
        [
            Parameter(path, role, jnp.shape(leaf), tuple(range(jnp.ndim(leaf))), jnp.shape(leaf))
            for path, role, leaf in zip(paths, read, leaves, strict=True)
            if not is_masked(leaf)
        ],
        scan_axis,
    )
    layer = {p.path: p for p in parameters}
    biases = {module(p.path): p.shape for p in parameters if p.role.name == "bias"}
    tables = [
        p for p in parameters if p.role.name == "embedding" and len(p.shape) == 2 and not is_position(p.path)
    ]

    result: list[Route | optax.MaskedNode] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if is_masked(leaf):
            result.append(leaf)
            continue
        name, shape, dtype = "/".join(path), jnp.shape(leaf), dtype_of(leaf)
        if name in ruled:
            numbers, why = ruled[name], "rule"
            _check_ruled(name, shape, dtype, numbers)
        elif not jnp.issubdtype(dtype, jnp.inexact):
            numbers, why = None, "not a floating-point leaf"
        else:
            p = layer[path]
            numbers, why = _decide(p, biases.get(module(path)), attention, tables, scan_axis)
            numbers = _on_leaf(numbers, p.axes)
        result.append(Route(name, shape, dtype, numbers, why))
    return result, treedef


def matrix_shape(shape: tuple[int, ...], numbers: DimensionNumbers) -> tuple[int, int, int]:
    """How many matrices of how many rows and columns a leaf holds.

    >>> matrix_shape((24, 768, 12, 64), MuonDimensionNumbers(1, (2, 3)))
    (24, 768, 768)
    >>> matrix_shape((768, 2304), FusedDimensionNumbers(0, 1, parts=3, axis=1))
    (3, 768, 768)
    """
    rows, columns = (_axes(axes, len(shape)) for axes in numbers[:2])
    m, n = (math.prod(shape[i] for i in axes) for axes in (rows, columns))
    count = math.prod(size for i, size in enumerate(shape) if i not in (*rows, *columns))
    if isinstance(numbers, FusedDimensionNumbers):
        on_rows = numbers.axis % len(shape) in rows
        m, n = (m // numbers.parts, n) if on_rows else (m, n // numbers.parts)
        count *= numbers.parts
    return count, m, n


def _better(named: Role, known: Role | None) -> Role:
    """A layer's type tells its axes; only names tell heads, fused parts and the vocabulary."""
    if known is None or (known.muon and not named.muon):
        return named
    heads = any(layout.heads for layout in named.layouts.values())
    return named if known.muon and (heads or named.parts > 1 or named is INTERLEAVED) else known


def _decide(
    p: Parameter,
    bias: tuple[int, ...] | None,
    attention: str,
    tables: Sequence[Parameter],
    scan_axis: int | None,
) -> tuple[DimensionNumbers | None, str]:
    """One leaf, as one layer sees it."""
    role, rank = p.role, len(p.shape)
    if not role.muon:
        return None, role.name
    if rank < 2:
        return None, "vector" if rank else "scalar"
    if role is UNKNOWN and rank == 3 and scan_axis is not None and p.stacked is None and not bias:
        i = scan_axis % 3
        return MuonDimensionNumbers(*(j for j in range(3) if j != i)), f"{role.name}, stacked"
    if (role is CONVOLUTION or role is UNKNOWN) and rank > 2 and p.shape[-2] == 1:
        return None, "one input channel: depthwise"
    numbers = None if p.stacked else _matrices(p, bias, attention)
    if numbers is None:
        raise ValueError(_undecided(p, attention))
    _, m, n = matrix_shape(p.shape, numbers)
    if min(m, n) == 1:
        return None, f"{role.name} with one {'row' if m == 1 else 'column'}"
    if role.kind == "" and rank == 2 and role.parts == 1 and _is_vocabulary(p, tables):
        return None, "output head: maps to the vocabulary"
    return numbers, role.name + (", stacked" if rank < len(p.leaf_shape) else "")


def _matrices(p: Parameter, bias: tuple[int, ...] | None, attention: str) -> DimensionNumbers | None:
    """The matrices in one layer's parameter, on that layer's axes; None where nothing tells."""
    role, shape, rank = p.role, p.shape, len(p.shape)
    if role is INTERLEAVED:
        return None
    if role.parts > 1:
        return _fused(shape, role.parts, attention)
    if layout := role.layouts.get(rank):
        if attention == "whole":
            return layout.whole
        return None if role.kind and layout.heads is None else layout.heads or layout.whole
    if role.ranks:
        return None
    if rank == 2:
        return MuonDimensionNumbers(0, 1)
    if bias and shape[-len(bias) :] == bias and rank > len(bias):  # what has a bias is an output axis
        inputs = tuple(range(rank - len(bias)))
        return MuonDimensionNumbers(_one(inputs), _one(tuple(range(rank - len(bias), rank))))
    if rank == 4 and shape[0] == shape[1] < min(17, shape[3]) and p.stacked is None:  # a square window
        return MuonDimensionNumbers((0, 1, 2), 3)
    return None


def _fused(shape: tuple[int, ...], parts: int, attention: str) -> DimensionNumbers | None:
    """Query, key and value as [d, 3·d], as its transpose, or with an axis of three."""
    if len(shape) == 2 and attention == "whole":
        if parts == 3 and shape[0] == 3 * shape[1]:  # stored as (out, in), as Hugging Face's GPT-2 does
            return FusedDimensionNumbers(1, 0, parts, 0)
        if shape[1] % parts == 0 and (parts == 2 or shape[1] == 3 * shape[0]):
            return FusedDimensionNumbers(0, 1, parts, 1)
    if len(shape) > 2:
        batch = 1 if shape[1] == parts else next((i for i, size in enumerate(shape) if size == parts), None)
        inner = [i for i in range(len(shape)) if i != batch]
        if batch is not None and len(inner) == 2:
            return MuonDimensionNumbers(*inner) if attention == "whole" else None
        if batch is not None and len(inner) == 3:
            d, head, size = inner
            return MuonDimensionNumbers(d, (head, size) if attention == "whole" else size)
    return None


def _is_vocabulary(p: Parameter, tables: Sequence[Parameter]) -> bool:
    """Whether a kernel [d, vocabulary] undoes an embedding [vocabulary, d]: beside it, or inside a head."""
    scope = unit(p.path)[0]
    for table in tables:
        transposed = p.shape == table.shape[::-1] and p.shape[0] != p.shape[1]
        beside = scope == unit(table.path)[0] or scope == table.path[:-2]
        if (transposed and beside) or (p.shape[1] == table.shape[0] and is_head_scope(p.path[:-1])):
            return True
    return False


def _undecided(p: Parameter, attention: str) -> str:
    name = "/".join(p.path)
    text = f"dimension_numbers(params) can't tell which matrices the leaf {name!r} ({p.role.name}) of shape "
    text += f"{p.leaf_shape} holds"
    rule = "MuonDimensionNumbers(reduction_axis, output_axis)"
    if p.role is INTERLEAVED:
        text += ", because its heads lie interleaved"
    elif attention == "heads" and (p.role.kind or p.role.parts > 1) and len(p.shape) < 4:
        text += " with attention='heads', because its heads lie folded in one axis"
        rule = "FusedDimensionNumbers(0, 1, parts=number_of_heads, axis=1)"
    cure = f"add a rule, rules=[(r'{re.escape(name)}', {rule})], or None as its numbers to give it to Adam"
    if p.stacked or len(p.shape) == 3:
        cure += "; if it is a stack of layers, give scan_axis"
    in_muon = "muon_weight_dimension_numbers=lambda params: dimension_numbers(params, rules=...)"
    return f"{text}; {cure}. In muon: {in_muon}."


def _apply_rules(paths: Sequence[str], rules: Rules) -> dict[str, DimensionNumbers | None]:
    ruled: dict[str, DimensionNumbers | None] = {}
    for pattern, numbers in rules:
        if numbers is not None and not isinstance(numbers, DimensionNumbers):
            raise TypeError(
                f"dimension_numbers(rules=...) has {numbers!r} for {pattern!r}; "
                "give MuonDimensionNumbers, FusedDimensionNumbers or None."
            )
        matched = [path for path in paths if re.search(pattern, path)]
        if not matched:
            shown = ", ".join(paths[:3])
            raise ValueError(
                f"dimension_numbers(rules=...): {pattern!r} matches no leaf; paths look like {shown}, … "
                "Correct the expression or drop the rule."
            )
        for path in matched:
            ruled.setdefault(path, numbers)
    return ruled


def _check_ruled(name: str, shape: tuple[int, ...], dtype: Any, numbers: DimensionNumbers | None) -> None:
    """A rule's numbers must fit its leaf; here the leaf has a name to put into the message."""
    if numbers is None:
        return
    rank = len(shape)
    where = (
        f"dimension_numbers(rules=...) gives the leaf {name!r} of shape {shape} and dtype {dtype} {numbers}"
    )
    if dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"{where}, but Muon takes floating-point leaves only; give it None.")
    both = [i for axes in numbers[:2] for i in ((axes,) if isinstance(axes, int) else axes)]
    if rank < 2 or not all(-rank <= i < rank for i in both) or len({i % rank for i in both}) < len(both):
        raise ValueError(
            f"{where}, which need distinct axes of a leaf of rank two or more; correct them or give None."
        )
    if isinstance(numbers, FusedDimensionNumbers):
        axis = numbers.axis % rank
        if axis not in {i % rank for i in both} or numbers.parts < 1 or shape[axis] % numbers.parts:
            raise ValueError(
                f"{where}, whose parts must divide a reduction or output axis; correct parts or axis."
            )


def _on_leaf(numbers: DimensionNumbers | None, axes: tuple[int, ...]) -> DimensionNumbers | None:
    """Dimension numbers of one layer, written in the axes of the leaf."""
    if numbers is None or axes == tuple(range(len(axes))):
        return numbers
    rows, columns = (_one(tuple(axes[i] for i in _axes(part, len(axes)))) for part in numbers[:2])
    if isinstance(numbers, FusedDimensionNumbers):
        return FusedDimensionNumbers(rows, columns, numbers.parts, axes[numbers.axis])
    return MuonDimensionNumbers(rows, columns)


def _axes(axes: Sequence[int] | int, rank: int) -> tuple[int, ...]:
    return tuple(i % rank for i in ((axes,) if isinstance(axes, int) else axes))


def _one(axes: tuple[int, ...]) -> tuple[int, ...] | int:
    return axes[0] if len(axes) == 1 else axes
