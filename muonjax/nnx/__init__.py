"""The door to Flax NNX: which parameters go to Muon, attention that reports its largest logits, adapters."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from muonjax._clipping.attention_fn import reporting
from muonjax._matrix_view import FusedDimensionNumbers, MuonDimensionNumbers
from muonjax._routing.dimension_numbers import Rules
from muonjax._routing.dimension_numbers import dimension_numbers as _routing_of_names
from muonjax._routing.roles import BIAS, DENSE, EMBEDDING, Layout, Role
from muonjax.nnx._loha import LoHa as LoHa
from muonjax.nnx._loha import LoHaConv as LoHaConv
from muonjax.nnx._loha import LoHaLinear as LoHaLinear
from muonjax.nnx._loha import LoHaParam as LoHaParam
from muonjax.nnx._model import adapters as adapters
from muonjax.nnx._model import add_loha as add_loha
from muonjax.nnx._model import load_lycoris as load_lycoris
from muonjax.nnx._model import merge as merge
from muonjax.nnx._model import remove_loha as remove_loha
from muonjax.nnx._model import save_lycoris as save_lycoris
from muonjax.nnx._model import unmerge as unmerge

# Routing


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
        return _routing_of_names(params, rules=rules, attention=attention, scan_axis=scan_axis)
    known = {
        "/".join(map(str, (*path, leaf))): role
        for path, module in nnx.iter_modules(params)
        for leaf, role in _layer(module).items()
    }
    state = nnx.as_pure(nnx.state(params, nnx.Param))
    return _routing_of_names(state, rules=rules, attention=attention, scan_axis=scan_axis, known=known)


# Attention


def attention_fn(
    base: Callable[..., jax.Array] = nnx.dot_product_attention,
    *,
    rotate: Callable[[jax.Array], jax.Array] | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    block_q: int = 512,
    block_k: int = 512,
) -> Callable[..., jax.Array]:
    """Attention for `nnx.MultiHeadAttention` that also sows each head's largest logit, for QK-Clip.

    Call the attention with `sow_weights=True`, the model through `nnx.capture(model, nnx.Intermediate)`, and pass
    what comes back to `tx.update(..., max_logits=...)`. Without `sow_weights` nothing is sown. The module sows
    `max_logits`, `[heads]`, and not the attention weights; if it is called several times, the largest of all calls.
    Everything that Flax passes (mask, `is_causal`, dropout, cache, precision) reaches `base` as it was, except the
    module, so that NNX keeps its fused attention.

    Args:
      base: the attention function to wrap: softmax(scale · query keyᵀ, masked) value, and nothing else. What its
        own defaults or a `functools.partial` say of `scale`, `local_window_size` and `is_causal` is measured so.
      rotate: rotary embedding, or another linear map of `[*batch, T, heads, D]`, applied to queries and keys
        before they are measured and handed to `base`.
      scale: the scale that `base` uses, if it isn't 1/√D.
      local_window_size: the window that `base` uses, as in `max_logits`.
      block_q: queries that are held at a time, as in `max_logits`.
      block_k: keys that are held at a time.

    Returns:
      A function for Flax's `attention_fn`.

    Raises:
      ValueError: `base` rotates or caps the logits itself, or has another scale or window.
      TypeError: when called, if `base` cannot take an argument that Flax passes.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> from flax import nnx
      >>> attention = nnx.MultiHeadAttention(
      ...     4, 8, attention_fn=muonjax.nnx.attention_fn(), decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> forward = nnx.capture(lambda attention, x: attention(x, sow_weights=True), nnx.Intermediate)
      >>> y, sown = forward(attention, jnp.ones((2, 6, 8)))
      >>> sown["max_logits"][...].shape
      (4,)
    """

    def sow(module: nnx.Module, maxima: jax.Array) -> None:
        lowest = jnp.full(maxima.shape, -jnp.inf, maxima.dtype)
        module.sow(nnx.Intermediate, "max_logits", maxima, reduce_fn=jnp.maximum, init_fn=lambda: lowest)

    return reporting(
        "muonjax.nnx.attention_fn",
        base,
        sow,
        rotate=rotate,
        scale=scale,
        local_window_size=local_window_size,
        block_q=block_q,
        block_k=block_k,
    )


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
            return {
                "kernel": _role("dense", *axes, batch=batch),
                "bias": BIAS._replace(ranks=(batch + outputs,)),
            }
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
            in_axis, out_axis = (
                (rank - 1, rank - 2) if getattr(module, "transpose_kernel", False) else (rank - 2, rank - 1)
            )
            role = _role("convolution", (*window, in_axis), (out_axis,))
            if groups > 1:  # each group maps its own inputs to its own share of the outputs
                split = FusedDimensionNumbers((*window, in_axis), out_axis, groups, out_axis)
                role = role._replace(name="grouped convolution", layouts={rank: Layout(split)})
            return {"kernel": role, "bias": BIAS}
    return {}


def _role(name: str, rows: tuple[int, ...], columns: tuple[int, ...], batch: int = 0) -> Role:
    rank = len(rows) + len(columns) + batch
    if not (rows and columns):
        return Role(f"{name} without a contraction", muon=False, ranks=(rank,))
    numbers = MuonDimensionNumbers(*(axes[0] if len(axes) == 1 else axes for axes in (rows, columns)))
    return Role(name, ranks=(rank,), layouts={rank: Layout(numbers)})
