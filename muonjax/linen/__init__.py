"""The door to Flax Linen: which parameters go to Muon, attention that reports its largest logits, adapters."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from muonjax._clipping.attention_fn import reporting
from muonjax._routing.dimension_numbers import Rules
from muonjax._routing.dimension_numbers import dimension_numbers as _routing_of_names
from muonjax.linen._loha import LoHaConv as LoHaConv
from muonjax.linen._loha import LoHaDense as LoHaDense
from muonjax.linen._loha import loha as loha
from muonjax.linen._parameters import adopt as adopt
from muonjax.linen._parameters import join_adapters as join_adapters
from muonjax.linen._parameters import load_lycoris as load_lycoris
from muonjax.linen._parameters import merge as merge
from muonjax.linen._parameters import save_lycoris as save_lycoris
from muonjax.linen._parameters import split_adapters as split_adapters
from muonjax.linen._parameters import unmerge as unmerge

# Routing


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


# Attention


def attention_fn(
    base: Callable[..., jax.Array] = nn.dot_product_attention,
    *,
    rotate: Callable[[jax.Array], jax.Array] | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    block_q: int = 512,
    block_k: int = 512,
) -> Callable[..., jax.Array]:
    """Attention for `nn.MultiHeadDotProductAttention` that also sows each head's largest logit, for QK-Clip.

    Call the attention with `sow_weights=True` and the model with `mutable=["intermediates"]`, and pass what comes
    back to `tx.update(..., max_logits=...)`. Without them nothing is sown. The module sows `max_logits`, `[heads]`,
    and not the attention weights; if it is called several times, the largest of all calls. Everything that Flax
    passes (mask, dropout, cache, precision) reaches `base` as it was. Works under `nn.scan` and `nn.remat`.

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
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> attention = nn.MultiHeadDotProductAttention(4, attention_fn=muonjax.linen.attention_fn())
      >>> x = jnp.ones((2, 6, 8))
      >>> params = attention.init(jax.random.key(0), x)["params"]
      >>> y, sown = attention.apply({"params": params}, x, sow_weights=True, mutable=["intermediates"])
      >>> sown["intermediates"]["max_logits"].shape
      (4,)
    """

    def sow(module: nn.Module, maxima: jax.Array) -> None:
        lowest = jnp.full(maxima.shape, -jnp.inf, maxima.dtype)
        module.sow("intermediates", "max_logits", maxima, reduce_fn=jnp.maximum, init_fn=lambda: lowest)

    return reporting(
        "muonjax.linen.attention_fn",
        base,
        sow,
        rotate=rotate,
        scale=scale,
        local_window_size=local_window_size,
        block_q=block_q,
        block_k=block_k,
    )
