"""The door to Flax NNX: which parameters of an NNX model go to Muon."""

from typing import Any, Literal

from flax import nnx
from optax.contrib import MuonDimensionNumbers

from muonjax import _routing
from muonjax._layer_names import BIAS, EMBEDDING, HEAD, Layout, Role
from muonjax._routing import Rules

# Routing


def dimension_numbers(
    params: Any,
    *,
    rules: Rules = (),
    attention: Literal["whole", "heads"] = "whole",
    scan_axis: int | None = None,
) -> Any:
    """Says of every parameter of an NNX model whether Muon takes it, and as which matrices.

    Given the module itself, its layers' own settings decide where names would not: the letters of an `nnx.Einsum`, the
    axes of an `nnx.LinearGeneral`, the groups of an `nnx.Conv`, and how many axes one layer of an `nnx.vmap` stack has.
    `muonjax.tabulate(nnx.state(model, nnx.Param))` prints what the names alone give, with its reasons.

    Args:
      params: an `nnx.Module` or its `nnx.state(model, nnx.Param)`, of arrays or of shapes (`nnx.eval_shape`).
      rules: pairs (regular expression searched in "blocks/0/attn/query/kernel", dimension numbers or None).
      attention: "whole" folds the heads into one matrix, "heads" makes each head a matrix of its own.
      scan_axis: the axis of layers in an `nnx.vmap` stack, its `out_axes`; None: found from the shapes.

    Returns:
      A tree of `MuonDimensionNumbers`, `FusedDimensionNumbers` or None: like `params` for a state; for a module an
      `nnx.State` with one value a parameter, a prefix of the states that `nnx.Optimizer` initialises and updates with.

    Raises:
      ValueError: a leaf that can't be decided, a rule that matches no leaf, another `attention`.
      TypeError: a rule that gives an integer leaf to Muon.

    Example:
      >>> from flax import nnx
      >>> einsum = nnx.Einsum("bd,hde->bhe", (4, 16, 8), rngs=nnx.Rngs(0))
      >>> dimension_numbers(einsum)["kernel"]
      MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    """
    if not isinstance(params, nnx.Module):
        return _routing.dimension_numbers(params, rules=rules, attention=attention, scan_axis=scan_axis)
    known = {
        "/".join(map(str, (*path, leaf))): role
        for path, module in nnx.iter_modules(params)
        for leaf, role in _layer(module).items()
    }
    state = nnx.as_pure(nnx.state(params, nnx.Param))
    return _routing.dimension_numbers(state, rules=rules, attention=attention, scan_axis=scan_axis, known=known)


def _layer(module: Any) -> dict[str, Role]:
    """The parameters of one of Flax's own layers, by their attribute's name, when its type says more than names."""
    match module:
        case nnx.Embed():
            return {"embedding": EMBEDDING}
        case nnx.Conv() if module.feature_group_count > 1:
            return {"kernel": _grouped(len(module.kernel_shape), module.feature_group_count, module.kernel_shape)}
        case nnx.Einsum():
            return {"kernel": _einsum(module.einsum_str), "bias": BIAS._replace(ranks=())}
    return {}
