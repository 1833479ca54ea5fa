"""Dimension numbers of the parameters of an NNX model, from the settings of its layers."""

from typing import Any, Literal

from flax import nnx

from muonjax._matrix_view import FusedDimensionNumbers, MuonDimensionNumbers, one_or_several
from muonjax._routing.dimension_numbers import numbers_tree, routes
from muonjax._routing.given import Rules
from muonjax._routing.roles import BIAS, DENSE, EMBEDDING, Role


def dimension_numbers(
    params: Any,
    *,
    rules: Rules = (),
    attention: Literal["whole", "heads"] = "whole",
    scan_axis: int | None = None,
) -> Any:
    """Says of every parameter of an NNX model whether Muon takes it, and as which matrices.

    Given the module itself, its layers' own settings decide where names would not: the letters of an
    `nnx.Einsum`, the axes of an `nnx.LinearGeneral`, the groups of an `nnx.Conv`, and how many axes one layer
    of an `nnx.vmap` stack has. `muonjax.tabulate(nnx.state(model, nnx.Param))` prints what the names alone
    give, with its reasons.

    Args:
      params: an `nnx.Module` or its `nnx.state(model, nnx.Param)`, of arrays or of shapes (`nnx.eval_shape`).
      rules: pairs (regular expression searched in "blocks/0/attn/query/kernel", dimension numbers or None).
      attention: "whole" folds the heads into one matrix, "heads" makes each head a matrix of its own.
      scan_axis: the axis of layers in an `nnx.vmap` stack, its `out_axes`; None: found from the shapes.

    Returns:
      A tree of `MuonDimensionNumbers`, `FusedDimensionNumbers` or None. It is like `params` for a state; for a
      module it is an `nnx.State` with one value a parameter, a prefix of the states that `nnx.Optimizer`
      initialises and updates with.

    Raises:
      ValueError: a leaf that can't be decided, a rule that matches no leaf, another `attention`.
      TypeError: a rule that gives an integer leaf to Muon.

    Example:
      >>> from flax import nnx
      >>> einsum = nnx.Einsum("bd,hde->bhe", (4, 16, 8), rngs=nnx.Rngs(0))
      >>> dimension_numbers(einsum)["kernel"]
      MuonDimensionNumbers(reduction_axis=1, output_axis=(0, 2))
    """
    if not isinstance(params, nnx.Module):
        return numbers_tree(*routes(params, rules=rules, attention=attention, scan_axis=scan_axis))
    known = {
        "/".join(map(str, (*path, leaf))): role
        for path, module in nnx.iter_modules(params)
        for leaf, role in _layer(module).items()
    }
    state = nnx.as_pure(nnx.state(params, nnx.Param))
    settings: Any = {"rules": rules, "attention": attention, "scan_axis": scan_axis}
    return numbers_tree(*routes(state, known=known, head_sizes=_head_sizes(params), **settings))


def _head_sizes(model: nnx.Module) -> dict[tuple[str, ...], int]:
    """Path of each attention to the size of its heads: an attribute, or the query's features by the number of heads."""
    found = {}
    for path, module in nnx.iter_modules(model):
        size = _number(module, "head_dim", "head_size", "d_head")
        heads = _number(module, "num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
        for name in ("q_proj", "query", "to_q", "q", "wq"):
            features = getattr(getattr(module, name, None), "out_features", None)
            if size is None and heads and isinstance(features, int) and features % heads == 0:
                size = features // heads
        if size is not None:
            found[tuple(map(str, path))] = size
    return found


def _number(module: Any, *names: str) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _layer(module: Any) -> dict[str, Role]:
    """The parameters of one of Flax's own layers by attribute, where its type says more than names do."""
    match module:
        case nnx.Embed():
            return {"embedding": EMBEDDING}
        case nnx.Linear():
            return {"kernel": DENSE, "bias": BIAS}
        case nnx.LinearGeneral():
            batch, inputs, outputs = len(module.batch_axis), len(module.in_features), len(module.out_features)
            axes = tuple(range(batch, batch + inputs)), tuple(range(batch + inputs, batch + inputs + outputs))
            role = _role("dense", *axes, batch=batch)
            return {"kernel": role, "bias": BIAS._replace(ranks=(batch + outputs,))}
        case nnx.Einsum():
            operands, result = module.einsum_str.replace(" ", "").replace("...", "").split("->")
            inputs, kernel = operands.split(",")
            rows = tuple(i for i, axis in enumerate(kernel) if axis not in result)
            columns = tuple(i for i, axis in enumerate(kernel) if axis in result and axis not in inputs)
            role = _role("einsum", rows, columns, batch=len(kernel) - len(rows) - len(columns))
            return {"kernel": role, "bias": BIAS._replace(ranks=(len(module.bias_shape or ()),))}
        case nnx.Conv() | nnx.ConvTranspose():
            rank, groups = len(module.kernel_shape), getattr(module, "feature_group_count", 1)
            if groups == module.in_features > 1:
                return {"kernel": Role("depthwise convolution", muon=False, ranks=(rank,)), "bias": BIAS}
            window = tuple(range(rank - 2))
            in_axis, out_axis = rank - 2, rank - 1
            if getattr(module, "transpose_kernel", False):
                in_axis, out_axis = out_axis, in_axis
            role = _role("convolution", (*window, in_axis), (out_axis,))
            if groups > 1:  # each group maps its own inputs to its own share of the outputs
                split = FusedDimensionNumbers((*window, in_axis), out_axis, groups, out_axis)
                role = role._replace(name="grouped convolution", layouts={rank: split})
            return {"kernel": role, "bias": BIAS}
    return {}


def _role(name: str, rows: tuple[int, ...], columns: tuple[int, ...], batch: int = 0) -> Role:
    rank = len(rows) + len(columns) + batch
    if not (rows and columns):
        return Role(f"{name} without a contraction", muon=False, ranks=(rank,))
    numbers = MuonDimensionNumbers(one_or_several(rows), one_or_several(columns))
    return Role(name, ranks=(rank,), layouts={rank: numbers})
