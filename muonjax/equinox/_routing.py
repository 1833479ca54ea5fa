"""Dimension numbers of the parameters of an Equinox model, from the types of its layers."""

from typing import Any, Literal

import jax

from muonjax._matrix_view import FusedDimensionNumbers, MuonDimensionNumbers
from muonjax._routing.dimension_numbers import numbers_tree, routes
from muonjax._routing.given import Rules
from muonjax._routing.roles import BIAS, DENSE, EMBEDDING, SCALE, Role
from muonjax._trees import names


def dimension_numbers(
    params: Any,
    *,
    rules: Rules = (),
    attention: Literal["whole", "heads"] = "whole",
    scan_axis: int | None = None,
) -> Any:
    """Says of every array of an Equinox model whether Muon takes it, and as which matrices.

    The types of the layers decide where names would not: a weight is (out, in, *window), an `eqx.nn.Embedding`'s is a
    table, a grouped convolution holds a matrix per group, and an attention knows its number of heads. Stacks made by
    `eqx.filter_vmap` are found as elsewhere.

    Args:
      params: An Equinox module, its arrays alone (`eqx.filter(model, eqx.is_inexact_array)`) or their shapes
        (`eqx.filter_eval_shape`). What is no array gets no dimension numbers.
      rules: Pairs (regular expression searched in "layers/0/attention/query_proj/weight", dimension numbers or None).
      attention: "whole" folds the heads into one matrix, "heads" makes each head of queries, keys and values a matrix.
      scan_axis: The axis of layers in a stack, `out_axes` of `eqx.filter_vmap`; None: found from the shapes.

    Returns:
      The model with `MuonDimensionNumbers`, `FusedDimensionNumbers` or None in place of its arrays.

    Raises:
      ImportError: Equinox is not installed.
      ValueError: A leaf that can't be decided, a rule that matches no leaf, another `attention`.
      TypeError: A rule that gives an integer leaf to Muon.
    """
    try:
        import equinox as eqx
    except ImportError as error:
        raise ImportError("muonjax.equinox needs Equinox: pip install 'muonjax[equinox]'.") from error
    arrays = eqx.filter(params, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    norms = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
    layers = (eqx.nn.Embedding, eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose, *norms)
    known = {
        name: role
        for path, layer in _nodes(arrays, layers)
        for name, role in _layer(eqx, path, layer).items()
    }
    head_sizes = {names(path): node.qk_size for path, node in _nodes(arrays, eqx.nn.MultiheadAttention)}
    settings: Any = {"rules": rules, "attention": attention, "scan_axis": scan_axis}
    return numbers_tree(*routes(arrays, known=known, head_sizes=head_sizes, outputs_first=True, **settings))


def _nodes(tree: Any, kinds: Any) -> list[tuple[Any, Any]]:
    """The outermost modules of these kinds, with their paths."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(path, node) for path, node in found if isinstance(node, kinds)]


def _layer(eqx: Any, path: tuple[Any, ...], layer: Any) -> dict[str, Role]:
    """The parameters of one of Equinox's own layers by path."""
    match layer:
        case eqx.nn.Embedding():
            roles = {"weight": EMBEDDING}
        case eqx.nn.Linear():
            roles = {"weight": DENSE, "bias": BIAS}
        case eqx.nn.Conv() | eqx.nn.ConvTranspose():
            rank = layer.num_spatial_dims + 2
            rows, groups = (1, *range(2, rank)), layer.groups
            if layer.in_channels == groups:
                role = Role("one input channel: depthwise", muon=False, ranks=(rank,))
            elif groups > 1:
                split = FusedDimensionNumbers(rows, 0, groups, 0)
                role = Role("grouped convolution", ranks=(rank,), layouts={rank: split})
            else:
                role = Role("convolution", ranks=(rank,), layouts={rank: MuonDimensionNumbers(rows, 0)})
            roles = {"weight": role, "bias": BIAS._replace(ranks=(rank - 1,))}
        case _:
            roles = {"weight": SCALE._replace(ranks=()), "bias": BIAS._replace(ranks=())}
    return {"/".join(names((*path, jax.tree_util.GetAttrKey(name)))): role for name, role in roles.items()}
