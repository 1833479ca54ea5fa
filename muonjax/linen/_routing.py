"""Dimension numbers of the parameters of a Linen model."""

from typing import Any, Literal

from muonjax._routing.dimension_numbers import Rules
from muonjax._routing.dimension_numbers import dimension_numbers as _routing_of_names


def dimension_numbers(
    params: Any,
    *,
    rules: Rules = (),
    attention: Literal["whole", "heads"] = "whole",
    scan_axis: int | None = None,
) -> Any:
    """Says of every leaf of a Linen model whether Muon takes it, and as which matrices.

    Attention kernels, Dense, convolutions, scanned stacks and experts are found by their names and shapes;
    biases, norms, embeddings and output heads are None. `muonjax.tabulate(params)` prints the result with its
    reasons.

    Args:
      params: `model.init(...)["params"]`, boxed by `nn.with_partitioning` or not, or its shapes from
        `jax.eval_shape`.
      rules: pairs (regular expression searched in "block_0/attn/query/kernel", dimension numbers or None).
      attention: "whole" folds the heads into one matrix, "heads" makes each head a matrix of its own.
      scan_axis: the axis of layers, `variable_axes={"params": scan_axis}` of `nn.scan`; None: found from the
        shapes.

    Returns:
      A tree like `params` of `MuonDimensionNumbers`, `FusedDimensionNumbers` or None.

    Raises:
      ValueError: a leaf that can't be decided, a rule that matches no leaf, another `attention`.
      TypeError: a rule that gives an integer leaf to Muon.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> params = jax.eval_shape(nn.Dense(3).init, jax.random.key(0), jnp.ones((1, 2)))["params"]
      >>> dimension_numbers(params)
      {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=0, output_axis=1)}
    """
    return _routing_of_names(params, rules=rules, attention=attention, scan_axis=scan_axis)
