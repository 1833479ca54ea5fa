"""A decoder with the parameter tree, the scanned layers and the attention op of MaxText, small enough for a CPU.

Names, shapes, axes and arguments are those of MaxText at commit e591f30 (src/maxtext/layers); its quantization,
kernels, caches and rotary embedding are left out. `DecoderModel` is its NNX model, `linen_model()` its Linen one.
"""

import types

import jax
import jax.numpy as jnp
from flax import nnx

CONFIG = types.SimpleNamespace(
    emb_dim=32, mlp_dim=64, num_query_heads=4, num_kv_heads=2, head_dim=8, num_decoder_layers=3, vocab_size=64,
    opt_type="muon", muon_weight_decay=0.1, mu_dtype="float32", qk_clip_threshold=1.0,
    mesh_axes=("fsdp", "tensor"),
    logical_axis_rules=(
        ("embed", "fsdp"), ("q_heads", "tensor"), ("kv_heads", "tensor"), ("mlp", "tensor"),
        ("embed_vocab", "fsdp"), ("vocab", "tensor"), ("heads", "tensor"),
    ),
)  # fmt: skip


def named(init, *axes):
    """An initializer whose parameter has named axes; `with_maxtext.shardings_of` makes shardings of them."""
    return nnx.with_partitioning(init, axes)


class DenseGeneral(nnx.Module):
    """A kernel with named axes."""

    def __init__(self, shape, axes, scale, rngs):
        init = named(nnx.initializers.normal(scale), *axes)
        self.kernel = nnx.Param(init(rngs.params(), shape))


class RMSNorm(nnx.Module):
    """A scale."""

    def __init__(self, size, rngs):
        init = named(nnx.initializers.ones, "norm")
        self.scale = nnx.Param(init(rngs.params(), (size,)))

    def __call__(self, x):
        return self.scale[...] * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


class AttentionOp(nnx.Module):
    """Causal attention inside of segments; the scale is part of the query's initial values."""

    def __call__(
        self, query, key, value, decoder_segment_ids, inputs_positions, model_mode, *, record_max_logits=False
    ):
        batch, time, heads, size = query.shape
        query = query.reshape(batch, time, key.shape[2], -1, size)
        logits = jnp.einsum("btkgd,bskd->bkgts", query, key)
        visible = jnp.tri(time, dtype=bool) & (
            decoder_segment_ids[:, :, None] == decoder_segment_ids[:, None, :]
        )
        logits = jnp.where(visible[:, None, None], logits, -0.7 * float(jnp.finfo(logits.dtype).max))
        if record_max_logits:
            self.max_logits = nnx.Intermediate(logits.max((-2, -1)).reshape(batch, heads))
        y = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(logits), value)
        return y.reshape(batch, time, heads, size)


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(self, c, rngs):
        d, q, k, size = c.emb_dim, c.num_query_heads, c.num_kv_heads, c.head_dim
        scale = d**-0.5
        self.query = DenseGeneral((d, q, size), ("embed", "q_heads", "kv"), scale * size**-0.5, rngs)
        self.key = DenseGeneral((d, k, size), ("embed", "kv_heads", "kv"), scale, rngs)
        self.value = DenseGeneral((d, k, size), ("embed", "kv_heads", "kv"), scale, rngs)
        self.out = DenseGeneral((q, size, d), ("heads", "kv", "embed"), (q * size) ** -0.5, rngs)
        self.attention_op = AttentionOp()

    def __call__(self, x, segments):
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, p.kernel[...]) for p in (self.query, self.key, self.value))
        y = self.attention_op(q, k, v, segments, None, "train")
        return jnp.einsum("bthe,hed->btd", y, self.out.kernel[...])


class Mlp(nnx.Module):
    """A gated perceptron."""

    def __init__(self, c, rngs):
        self.wi_0 = DenseGeneral((c.emb_dim, c.mlp_dim), ("embed", "mlp"), c.emb_dim**-0.5, rngs)
        self.wi_1 = DenseGeneral((c.emb_dim, c.mlp_dim), ("embed", "mlp"), c.emb_dim**-0.5, rngs)
        self.wo = DenseGeneral((c.mlp_dim, c.emb_dim), ("mlp", "embed"), c.mlp_dim**-0.5, rngs)

    def __call__(self, x):
        return (jax.nn.silu(x @ self.wi_0.kernel[...]) * (x @ self.wi_1.kernel[...])) @ self.wo.kernel[...]


class DecoderLayer(nnx.Module):
    """One layer of Llama."""

    def __init__(self, c, rngs):
        self.pre_self_attention_layer_norm = RMSNorm(c.emb_dim, rngs)
        self.self_attention = Attention(c, rngs)
        self.post_self_attention_layer_norm = RMSNorm(c.emb_dim, rngs)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x, segments):
        x = x + self.self_attention(self.pre_self_attention_layer_norm(x), segments)
        return x + self.mlp(self.post_self_attention_layer_norm(x))


class Decoder(nnx.Module):
    """Layers stacked on axis 1 of their parameters (`param_scan_axis`), run by one scan."""

    def __init__(self, c, rngs):
        axes = nnx.StateAxes({nnx.Param: 1, ...: None})
        keys = nnx.split_rngs(splits=c.num_decoder_layers)
        make = nnx.vmap(
            lambda rngs: DecoderLayer(c, rngs),
            out_axes=axes,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        self.layers = keys(make)(rngs)
        self.decoder_norm = RMSNorm(c.emb_dim, rngs)
        self.logits_dense = DenseGeneral(
            (c.emb_dim, c.vocab_size), ("embed_vocab", "vocab"), c.emb_dim**-0.5, rngs
        )

    def __call__(self, x, segments):
        graph, params, others = nnx.split(self.layers, nnx.Param, ...)

        def one(x, params):
            layer = nnx.merge(graph, params, others)
            return layer(x, segments), nnx.state(layer, nnx.Intermediate)

        x, sown = jax.lax.scan(one, x, jax.tree.map(lambda p: jnp.moveaxis(p, 1, 0), params))
        nnx.update(self.layers, sown)
        return self.decoder_norm(x) @ self.logits_dense.kernel[...]


class DecoderModel(nnx.Module):
    """Tokens and segments [batch, time] -> logits [batch, time, vocabulary]."""

    def __init__(self, c, *, rngs):
        init = named(nnx.initializers.normal(1.0), "vocab", "embed_vocab")
        self.token_embedder = nnx.Embed(c.vocab_size, c.emb_dim, embedding_init=init, rngs=rngs)
        self.decoder = Decoder(c, rngs)

    def __call__(self, tokens, segments):
        return self.decoder(self.token_embedder(tokens), segments)


def linen_model():
    """The same as a Linen module, whose variables are {"params": ..., "intermediates": ...}."""
    return nnx.bridge.ToLinen(DecoderModel, args=(CONFIG,))
