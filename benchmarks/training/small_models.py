"""Small byte-level transformers with four layouts of attention, as functions of a tree of parameters.

The model of examples/train_transformer.py at other sizes; the tree has names that muonjax routes by itself.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

Layout = Literal["MHA", "GQA", "MLA", "fused"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder over bytes.

    Attributes:
      layout: "MHA": a key head for each query head; "GQA": one for four; "MLA": keys and values from a latent vector of
        half the width; "fused": queries and one key head for all of them in one kernel.
      head_size: Of queries, keys and values; the number of heads is the width over it.
    """

    layout: Layout = "MHA"
    layers: int = 2
    width: int = 128
    head_size: int = 16
    context: int = 64

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    @property
    def key_heads(self) -> int:
        return {"GQA": max(1, self.heads // 4), "fused": 1}.get(self.layout, self.heads)

    def _shapes(self) -> dict[str, Any]:
        """Of one block's kernels, and the number of inputs that each of their outputs sums over."""
        d, h, k, s = self.width, self.heads, self.key_heads, self.head_size
        attention = {
            "MHA": {"query": (d, h, s), "key": (d, h, s), "value": (d, h, s)},
            "GQA": {"query": (d, h, s), "key": (d, k, s), "value": (d, k, s)},
            "MLA": {"wq": (d, h, s), "wkv_a": (d, d // 2), "wkv_b": (d // 2, h, 2 * s)},
            "fused": {"qkv": (d, h + 2 * k, s)},
        }[self.layout]
        return {"attention": {**attention, "out": (h, s, d)}, "up": (d, 4 * d), "down": (4 * d, d)}

    def init(self, seed: int) -> dict[str, Any]:
        """Parameters, initialized as the example's are: variance 1 / fan_in, less before the residual stream."""
        keys = iter(jax.random.split(jax.random.key(seed), 16 * (self.layers + 1)))

        def kernel(path: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
            name = path[-1].key
            fan_in = math.prod(shape[:-1]) if name == "out" else shape[0]
            scale = 0.1 / self.layers if name in ("out", "down") else 1.0
            return {"kernel": math.sqrt(scale / fan_in) * jax.random.normal(next(keys), shape)}

        def block() -> dict[str, Any]:
            kernels = jax.tree.map_with_path(kernel, self._shapes(), is_leaf=lambda x: isinstance(x, tuple))
            norms = {name: {"scale": jnp.ones(self.width)} for name in ("attention_norm", "mlp_norm")}
            latent = {"kv_norm": {"scale": jnp.ones(self.width // 2)}} if self.layout == "MLA" else {}
            return {**kernels, **norms, "attention": {**kernels["attention"], **latent}}

        def table(size: int) -> dict[str, jax.Array]:
            return {"embedding": 0.02 * jax.random.normal(next(keys), (size, self.width))}

        return {
            "embedding": table(256),
            "position_embedding": table(self.context),
            **{f"block_{i}": block() for i in range(self.layers)},
            "final_norm": {"scale": jnp.ones(self.width)},
            "head": {"kernel": jax.random.normal(next(keys), (self.width, 256)) / math.sqrt(self.width)},
        }

    def apply(self, params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Logits [batch, time, 256], and the activations by name, for a coordinate check."""
        batch, time = tokens.shape
        position = params["position_embedding"]["embedding"][:time]
        x = (params["embedding"]["embedding"][tokens] + position).reshape(-1, self.width)
        seen = {"embedding": x}
        for i in range(self.layers):
            block = params[f"block_{i}"]
            attended = self._attention(block["attention"], _norm(block["attention_norm"], x), batch)
            x = x + attended
            hidden = _product(_norm(block["mlp_norm"], x), block["up"])
            x = x + _product(jax.nn.gelu(hidden), block["down"])
            seen |= {"attention": attended, "hidden layer": hidden, "residual stream": x}
        logits = _product(_norm(params["final_norm"], x), params["head"])
        return logits.reshape(batch, time, -1), {**seen, "logits": logits}

    def _attention(self, p: dict[str, Any], x: jax.Array, batch: int) -> jax.Array:
        """Causal attention of x [batch · time, width]."""
        if self.layout == "MLA":
            latent = _norm(p["kv_norm"], _product(x, p["wkv_a"]))
            q = self._by_head(_product(x, p["wq"]), batch)
            k, v = jnp.split(self._by_head(_product(latent, p["wkv_b"]), batch), 2, axis=-1)
        elif self.layout == "fused":
            cuts = [self.heads, self.heads + self.key_heads]
            q, k, v = jnp.split(self._by_head(_product(x, p["qkv"]), batch), cuts, axis=1)
        else:
            q, k, v = (self._by_head(_product(x, p[name]), batch) for name in ("query", "key", "value"))
        k, v = (jnp.repeat(a, self.heads // a.shape[1], axis=1) for a in (k, v))
        # Batched products of matrices: on a CPU several times faster than jax.nn.dot_product_attention's einsums.
        logits = jnp.einsum("bhqs,bhks->bhqk", q, k) / math.sqrt(self.head_size)
        mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
        y = jnp.swapaxes(weights @ v, 1, 2).reshape(x.shape[0], -1)
        return y @ p["out"]["kernel"].reshape(-1, self.width)

    def _by_head(self, x: jax.Array, batch: int) -> jax.Array:
        """[batch · time, heads · size] as [batch, heads, time, size]."""
        size = x.shape[-1] // self.heads if self.layout == "MLA" else self.head_size
        return jnp.swapaxes(x.reshape(batch, x.shape[0] // batch, -1, size), 1, 2)


def _product(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """x [rows, d] times a kernel [d, ...] as one matrix."""
    return x @ p["kernel"].reshape(x.shape[-1], -1)


def _norm(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]


def loss(model: Model, params: dict[str, Any], windows: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per byte of windows [batch, time + 1]."""
    logits, _ = model.apply(params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()
