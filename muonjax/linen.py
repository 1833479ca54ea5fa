"""The door to Flax Linen: which parameters go to Muon, and attention that reports its largest logits."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from muonjax import _routing
from muonjax._max_logits import max_logits
from muonjax._routing import Rules

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
    return _routing.dimension_numbers(params, rules=rules, attention=attention, scan_axis=scan_axis)


# Attention


def attention_fn(
    base: Callable[..., jax.Array] = nn.dot_product_attention, *, block_q: int = 512, block_k: int = 512
) -> Callable[..., jax.Array]:
    """An `attention_fn` for `nn.MultiHeadDotProductAttention` that sows each head's largest logit for QK-Clip.

    Call the attention with `sow_weights=True` and the model with `mutable=["intermediates"]`; then pass
    `variables["intermediates"]` to `tx.update(..., max_logits=...)`. Works under `nn.scan` and `nn.remat`; a module
    that is called several times reports the largest of all calls.

    Args:
      base: The attention itself, with Linen's signature.
      block_q: Query positions that are held at a time (see `max_logits`).
      block_k: Key positions that are held at a time.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> from flax import linen as nn
      >>> attention = nn.MultiHeadDotProductAttention(2, attention_fn=muonjax.linen.attention_fn())
      >>> x = jnp.ones((1, 3, 8))
      >>> params = {"params": attention.init(jax.random.key(0), x)["params"]}
      >>> y, sown = attention.apply(params, x, sow_weights=True, mutable=["intermediates"])
      >>> sown["intermediates"]["max_logits"].shape
      (2,)
    """

    # Spelled out: Linen passes only the arguments that it finds in the signature, so **kwargs would lose the mask.
    def attention(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        force_fp32_for_softmax=False,
    ):
        if module is not None:
            largest = max_logits(query, key, mask=mask, block_q=block_q, block_k=block_k)
            # The base gets no module: it would sow the full attention weights.
            module.sow(
                "intermediates",
                "max_logits",
                largest,
                reduce_fn=jnp.maximum,
                init_fn=lambda: jnp.full(largest.shape, -jnp.inf, largest.dtype),
            )
        return base(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            force_fp32_for_softmax=force_fp32_for_softmax,
        )

    return attention
