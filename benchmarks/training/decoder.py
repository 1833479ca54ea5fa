"""A decoder of today in Flax NNX: RMSNorm, rotary positions, grouped keys, SwiGLU, no biases, untied head.

Weights are float32 and products bfloat16. The caller chooses the attention, so that the same weights run with XLA's,
whose softmax `muonjax.inspect` can read, and with cuDNN's, whose softmax is hidden.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import muonjax

# An output [batch, time, ...], and the largest logit of each head or None.
Attended = tuple[jax.Array, jax.Array | None]
# Of queries, keys and values [batch, time, heads, depth].
Attend = Callable[[jax.Array, jax.Array, jax.Array], Attended]


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model, and of the batch that it trains on."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    context: int
    batch: int

    @property
    def depth(self) -> int:
        """Features of a head."""
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * self.context


SIZES = {
    "tiny": Size(
        layers=1,
        width=32,
        heads=4,
        key_heads=2,
        hidden=64,
        vocabulary=256,
        context=32,
        batch=4,
    ),
    "30M": Size(
        layers=8,
        width=384,
        heads=6,
        key_heads=2,
        hidden=1536,
        vocabulary=16384,
        context=1024,
        batch=64,
    ),
    "124M": Size(
        layers=12,
        width=768,
        heads=12,
        key_heads=4,
        hidden=2880,
        vocabulary=16384,
        context=1024,
        batch=64,
    ),
}


def attention(
    implementation: str, statistic: str | None = None, measure: jax.Array | bool = True
) -> Attend:
    """Causal attention that also measures its logits.

    Args:
      implementation: "xla" or "cudnn".
      statistic: "bound" takes the log-sum-exp, "exact" computes the logits again, None measures nothing.
      measure: Where it is False, "exact" computes nothing and returns -inf, which no clip acts on.
    """
    causal = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=implementation
    )

    def attend(query, key, value):
        if statistic == "bound":
            y, log_sum_exp = causal(query, key, value, return_residual=True)
            return y, muonjax.max_logits_bound(log_sum_exp)
        y = causal(query, key, value)
        if statistic is None:
            return y, None

        def exact():
            return muonjax.max_logits(query, key, is_causal=True)

        def nothing():
            return jnp.full(query.shape[-2], -jnp.inf)

        return y, lax.cond(measure, exact, nothing)

    return attend


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, time, heads, depth]: the halves of a head are turned as pairs."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x.dtype)


def linear(
    inputs: int, outputs: int, rngs: nnx.Rngs, variance: float = 1.0
) -> nnx.Linear:
    init = nnx.initializers.variance_scaling(variance, "fan_in", "truncated_normal")
    return nnx.Linear(
        inputs, outputs, use_bias=False, dtype=jnp.bfloat16, kernel_init=init, rngs=rngs
    )


def norm(size: Size, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(size.width, dtype=jnp.bfloat16, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.depth = size.depth
        self.query = linear(size.width, size.width, rngs)
        self.key = linear(size.width, size.key_heads * size.depth, rngs)
        self.value = linear(size.width, size.key_heads * size.depth, rngs)
        self.out = linear(size.width, size.width, rngs, 0.5 / size.layers)

    def __call__(self, x: jax.Array, attend: Attend) -> Attended:
        heads = *x.shape[:-1], -1, self.depth
        query = rotate(self.query(x).reshape(heads))
        key = rotate(self.key(x).reshape(heads))
        value = self.value(x).reshape(heads)
        y, largest = attend(query, key, value)
        return self.out(y.reshape(x.shape)), largest


class Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.attention_norm = norm(size, rngs)
        self.attention = Attention(size, rngs)
        self.mlp_norm = norm(size, rngs)
        self.gate = linear(size.width, size.hidden, rngs)
        self.up = linear(size.width, size.hidden, rngs)
        self.down = linear(size.hidden, size.width, rngs, 0.5 / size.layers)

    def __call__(self, x: jax.Array, attend: Attend) -> Attended:
        y, largest = self.attention(self.attention_norm(x), attend)
        x = x + y
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y)), largest


class Decoder(nnx.Module):
    """Tokens [batch, time] -> logits [batch, time, vocabulary], and the largest attention logits by module."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(
            size.vocabulary,
            size.width,
            dtype=jnp.bfloat16,
            embedding_init=normal,
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.final_norm = norm(size, rngs)
        self.head = linear(size.width, size.vocabulary, rngs)

    def __call__(
        self, tokens: jax.Array, attend: Attend
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        x = self.embedding(tokens)
        max_logits = {}
        for i, block in enumerate(self.blocks):
            x, largest = block(x, attend)
            if largest is not None:
                max_logits[f"blocks/{i}/attention"] = largest
        return self.head(self.final_norm(x)), max_logits
