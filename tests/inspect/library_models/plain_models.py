"""Models in plain JAX, as papers and their public code define them."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.inspect.library_models.model import cross_entropy, mean_square, shape, tokens


def weights(**shapes):
    return {name: shape(*sizes) for name, sizes in shapes.items()}


def rms_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * weight


def rotary(x):
    """The two halves of the features are rotated."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def causal_softmax(logits):
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(mask, logits, -1e30))


def byte_model():
    """As many symbols as hidden features: only what is done with a kernel tells the head from a layer."""
    params = {"table": shape(256, 64), "lm_head": shape(64, 256)}
    for layer in ("below", "above"):
        params[layer] = weights(qkv=(64, 192), out=(64, 64), up=(64, 256), down=(256, 64), scale=(64,))

    def loss(params, text):
        x = params["table"][text]
        for layer in ("below", "above"):
            p = params[layer]
            q, k, v = jnp.split(rms_norm(x, p["scale"]) @ p["qkv"], 3, -1)
            q, k, v = (z.reshape(*z.shape[:2], 4, 16) for z in (q, k, v))
            a = causal_softmax(jnp.einsum("bqhd,bkhd->bhqk", rotary(q), rotary(k)) / 4)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return cross_entropy((x @ params["lm_head"])[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 8)]


def grouped_queries_by_einsum():
    """Four query heads, two key heads, weights of three axes, and layers on a leading axis that `scan` slices."""
    params = {
        "table": shape(50, 32),
        "layers": weights(
            q=(3, 4, 32, 8), k=(3, 2, 32, 8), v=(3, 2, 32, 8), o=(3, 4, 8, 32), norm=(3, 32),
            gate=(3, 32, 96), up=(3, 32, 96), down=(3, 96, 32),
        ),
        "head": shape(32, 50),
    }  # fmt: skip

    def layer(x, p):
        y = rms_norm(x, p["norm"])
        q = rotary(jnp.einsum("btd,hds->bths", y, p["q"]))
        k = rotary(jnp.einsum("btd,hds->bths", y, p["k"]))
        v = jnp.einsum("btd,hds->bths", y, p["v"])
        q = q.reshape(*q.shape[:2], 2, 2, 8)
        a = causal_softmax(jnp.einsum("btkgs,buks->bkgtu", q, k) / np.sqrt(8))
        z = jnp.einsum("bkgtu,buks->btkgs", a, v).reshape(*x.shape[:2], 4, 8)
        x = x + jnp.einsum("bths,hsd->btd", z, p["o"])
        return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"], None

    def loss(params, text):
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["table"][text], params["layers"])
        return cross_entropy((x @ params["head"])[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 8)]


def latent_attention():
    """DeepSeek's: compressed queries and keys, and a rotary part of the key that all heads share."""
    params = weights(
        q_a=(32, 16), q_norm=(16,), q_b=(16, 4, 12), kv_a=(32, 20), kv_norm=(16,), kv_b=(16, 4, 16), o=(4, 8, 32),
        head=(32, 9),
    )  # fmt: skip

    def loss(p, x, labels):
        q = jnp.einsum("btr,rhs->bths", rms_norm(x @ p["q_a"], p["q_norm"]), p["q_b"])
        q = jnp.concatenate([q[..., :8], rotary(q[..., 8:])], -1)
        kv = x @ p["kv_a"]
        shared = rotary(kv[:, :, None, 16:])
        own = jnp.einsum("btr,rhs->bths", rms_norm(kv[..., :16], p["kv_norm"]), p["kv_b"])
        k = jnp.concatenate([own[..., :8], jnp.broadcast_to(shared, (*own.shape[:3], 4))], -1)
        a = causal_softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(12))
        z = jnp.einsum("bhqk,bkhd->bqhd", a, own[..., 8:])
        return cross_entropy(jnp.einsum("bqhd,hde->bqe", z, p["o"]) @ p["head"], labels)

    return loss, params, [shape(2, 5, 32), tokens(2, 5)]


def dense_experts():
    """Every expert sees every token; a router weighs them."""
    params = weights(first=(20, 32), router=(32, 6), up=(6, 32, 48), down=(6, 48, 32), head=(32, 7))

    def loss(p, x, labels):
        x = jnp.tanh(x @ p["first"])
        gates = jax.nn.softmax(x @ p["router"])
        y = jax.nn.relu(jnp.einsum("btd,edf->betf", x, p["up"]))
        x = x + jnp.einsum("bte,betd->btd", gates, jnp.einsum("betf,efd->betd", y, p["down"]))
        return cross_entropy(x @ p["head"], labels)

    return loss, params, [shape(2, 5, 20), tokens(2, 5)]


def chosen_experts():
    """Mixtral's: the best two of four, tokens sorted by expert, products of ragged groups."""
    params = weights(
        first=(20, 32), router=(32, 4), gate=(4, 32, 48), up=(4, 32, 48), down=(4, 48, 32), head=(32, 7)
    )

    def loss(p, x, labels):
        x = jnp.tanh(x @ p["first"])
        best, which = jax.lax.top_k(x @ p["router"], 2)
        order = jnp.argsort(which.reshape(-1))
        tokens, sizes = jnp.repeat(x, 2, axis=0)[order], jnp.bincount(which.reshape(-1), length=4)
        y = jax.nn.silu(jax.lax.ragged_dot(tokens, p["gate"], sizes)) * jax.lax.ragged_dot(
            tokens, p["up"], sizes
        )
        y = jax.lax.ragged_dot(y, p["down"], sizes)[jnp.argsort(order)].reshape(*which.shape, 32)
        x = x + jnp.einsum("tk,tkd->td", jax.nn.softmax(best), y)
        return cross_entropy(x @ p["head"], labels)

    return loss, params, [shape(10, 20), tokens(10)]


def merged_adapters():
    """A low-rank adapter added to its weight, DoRA's normalized one, and a weight of a sum that is trained alone."""
    params = weights(
        w=(32, 32), a=(32, 4), b=(4, 32), v=(32, 24), c=(32, 3), d=(3, 24), magnitude=(24,), head=(24, 5)
    )  # fmt: skip

    def loss(p, x, labels):
        x = jnp.tanh(x @ (p["w"] + 0.5 * p["a"] @ p["b"]))
        whole = p["v"] + p["c"] @ p["d"]
        x = jnp.tanh(x @ (p["magnitude"] * whole / jnp.linalg.norm(whole, axis=0)))
        return cross_entropy(x @ p["head"], labels)

    return loss, params, [shape(4, 32), tokens(4)]


def diffusion_transformer():
    """DiT: patches by a reshape, six modulations from the noise level by one kernel, a head to patches."""
    params = weights(
        patches=(48, 32), position=(16, 32), level_1=(16, 32), level_2=(32, 32), labels=(11, 32), adaln=(32, 192),
        qkv=(32, 96), out=(32, 32), up=(32, 128), down=(128, 32), last_adaln=(32, 64), last=(32, 48),
    )  # fmt: skip

    def normalized(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def loss(p, images, level, labels, noise):
        x = images.reshape(-1, 4, 4, 4, 4, 3).swapaxes(2, 3).reshape(-1, 16, 48)
        x = x @ p["patches"] + p["position"]
        waves = level[:, None] * np.exp(-np.arange(8.0, dtype=np.float32))
        c = jax.nn.silu(jnp.concatenate([jnp.cos(waves), jnp.sin(waves)], -1) @ p["level_1"]) @ p["level_2"]
        c = jax.nn.silu(c + p["labels"][labels])[:, None]
        shift_a, scale_a, gate_a, shift_b, scale_b, gate_b = jnp.split(c @ p["adaln"], 6, -1)
        q, k, v = jnp.split((normalized(x) * (1 + scale_a) + shift_a) @ p["qkv"], 3, -1)
        q, k, v = (z.reshape(*z.shape[:2], 4, 8) for z in (q, k, v))
        x = x + gate_a * (jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"])
        y = normalized(x) * (1 + scale_b) + shift_b
        x = x + gate_b * (jax.nn.gelu(y @ p["up"]) @ p["down"])
        shift, scale = jnp.split(c @ p["last_adaln"], 2, -1)
        return mean_square((normalized(x) * (1 + scale) + shift) @ p["last"] - noise)

    inputs = [shape(2, 16, 16, 3), shape(2), tokens(2), shape(2, 16, 48)]
    return loss, params, inputs


def graph_network():
    """Messages along edges, added up at their ends; a graph's embedding by a mean."""
    params = weights(
        nodes=(7, 16), message_1=(40, 32), message_2=(32, 16), update=(32, 16), edges=(5, 8), head=(16, 3)
    )

    def loss(p, kinds, edge_kinds, sender, receiver, labels):
        x, e = p["nodes"][kinds], p["edges"][edge_kinds]
        for _ in range(2):  # the same parameters twice
            m = (
                jax.nn.relu(jnp.concatenate([x[sender], x[receiver], e], -1) @ p["message_1"])
                @ p["message_2"]
            )
            sums = jax.ops.segment_sum(m, receiver, 6)
            x = jax.nn.relu(jnp.concatenate([x, sums], -1) @ p["update"])
        return cross_entropy(x @ p["head"], labels)

    inputs = [tokens(6), tokens(9), tokens(9), tokens(9), tokens(6)]
    return loss, params, inputs


def graph_attention():
    """GAT: a softmax over neighbours, but of sums of two numbers for each node, not of products."""
    params = weights(first=(10, 3, 8), own=(3, 8), other=(3, 8), head=(24, 4))

    def loss(p, x, edges, labels):
        h = jnp.einsum("nd,dhf->nhf", x, p["first"])
        scores = (
            jnp.einsum("nhf,hf->nh", h, p["own"])[:, None] + jnp.einsum("nhf,hf->nh", h, p["other"])[None]
        )
        a = jax.nn.softmax(jnp.where(edges[..., None], jax.nn.leaky_relu(scores), -1e30), axis=1)
        y = jax.nn.elu(jnp.einsum("nmh,mhf->nhf", a, h)).reshape(x.shape[0], -1)
        return cross_entropy(y @ p["head"], labels)

    inputs = [shape(6, 10), shape(6, 6, dtype=bool), tokens(6)]
    return loss, params, inputs


def state_space():
    """Mamba's: a causal depthwise convolution, and a scan whose step, input and output depend on the token."""
    params = weights(
        table=(20, 16), into=(16, 64), window=(4, 32), select=(32, 9), step=(1, 32), step_bias=(32,), log_a=(32, 4),
        skip=(32,), out=(32, 16), head=(16, 20),
    )  # fmt: skip

    def loss(p, text):
        x = p["table"][text]
        u, gate = jnp.split(x @ p["into"], 2, -1)
        past = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = jax.nn.silu(sum(past[:, i : i + u.shape[1]] * p["window"][i] for i in range(4)))
        low, b, c = jnp.split(u @ p["select"], [1, 5], -1)
        step = jax.nn.softplus(low @ p["step"] + p["step_bias"])
        keep = jnp.exp(step[..., None] * -jnp.exp(p["log_a"]))
        write = (step * u)[..., None] * b[:, :, None]

        def one(state, at):
            keep, write, c = at
            state = keep * state + write
            return state, jnp.einsum("bds,bs->bd", state, c)

        axes = (z.swapaxes(0, 1) for z in (keep, write, c))
        _, y = jax.lax.scan(one, jnp.zeros((text.shape[0], 32, 4)), tuple(axes))
        y = (y.swapaxes(0, 1) + u * p["skip"]) * jax.nn.silu(gate)
        return cross_entropy(((x + y @ p["out"]) @ p["head"])[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 6)]


def linear_attention():
    """No softmax: RetNet's decay of past keys. Nothing to clip."""
    params = weights(table=(20, 32), qkv=(32, 96), out=(32, 32), head=(32, 20))

    def loss(p, text):
        x = p["table"][text]
        q, k, v = (z.reshape(*z.shape[:2], 4, 8) for z in jnp.split(x @ p["qkv"], 3, -1))
        far = np.arange(text.shape[1])[:, None] - np.arange(text.shape[1])
        decay = np.where(far >= 0, 0.9 ** np.maximum(far, 0), 0).astype(np.float32)
        y = jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", q, k) * decay, v)
        return cross_entropy(((x + y.reshape(x.shape) @ p["out"]) @ p["head"])[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 6)]


def sliced_projections():
    """PyTorch's `in_proj_weight`, (3 d, d), cut before its products."""
    params = weights(table=(20, 32), in_proj=(96, 32), in_bias=(96,), out_proj=(32, 32), head=(20, 32))

    def loss(p, text):
        x = p["table"][text]
        w, b = jnp.split(p["in_proj"], 3), jnp.split(p["in_bias"], 3)
        q, k, v = ((x @ w[i].T + b[i]).reshape(*x.shape[:2], 4, 8) for i in range(3))
        a = causal_softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8))
        y = jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(x.shape)
        return cross_entropy(((x + y @ p["out_proj"].T) @ p["head"].T)[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 6)]


def unet():
    """Convolutions down and up, a skipped connection, the noise level added to all places, attention over pixels."""
    params = weights(
        first=(3, 3, 3, 16), level=(8, 16), down=(3, 3, 16, 32), q=(32, 32), k=(32, 32), v=(32, 32), out=(32, 32),
        up=(3, 3, 32, 16), joined=(3, 3, 32, 16), last=(3, 3, 16, 3), scale=(16,), offset=(16,),
    )  # fmt: skip

    def conv(x, w, stride=1):
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def group_norm(x, scale, offset):
        groups = x.reshape(*x.shape[:3], 4, -1)
        groups = (groups - groups.mean((1, 2, 4), keepdims=True)) * jax.lax.rsqrt(
            groups.var((1, 2, 4), keepdims=True) + 1e-5
        )
        return groups.reshape(x.shape) * scale + offset

    def loss(p, images, level, noise):
        h = conv(images, p["first"]) + (jnp.sin(level[:, None] * np.arange(8.0)) @ p["level"])[:, None, None]
        h = jax.nn.silu(group_norm(h, p["scale"], p["offset"]))
        x = jax.nn.silu(conv(h, p["down"], 2))
        y = x.reshape(x.shape[0], -1, 32)
        a = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", y @ p["q"], y @ p["k"]) / np.sqrt(32))
        x = x + (jnp.einsum("bqk,bkd->bqd", a, y @ p["v"]) @ p["out"]).reshape(x.shape)
        x = jax.nn.silu(conv(jax.image.resize(x, (x.shape[0], 8, 8, 32), "nearest"), p["up"]))
        x = jax.nn.silu(conv(jnp.concatenate([x, h], -1), p["joined"]))
        return mean_square(conv(x, p["last"]) - noise)

    inputs = [shape(2, 8, 8, 3), shape(2), shape(2, 8, 8, 3)]
    return loss, params, inputs


def soft_actor_critic():
    """The critics' loss and the actor's, added, as `inspect` asks for: two critics, a target that is an input."""
    params = {
        "actor": weights(a=(8, 32), b=(32, 32), mean=(32, 2), log=(32, 2)),
        "critic": weights(a=(2, 10, 32), b=(2, 32, 32), out=(2, 32, 1)),
        "log_temperature": shape(),
    }

    def critic(p, x, action):
        y = jnp.concatenate([x, action], -1)
        y = jax.nn.relu(jnp.einsum("bd,kdf->kbf", y, p["a"]))
        return jnp.einsum("kbf,kfo->kbo", jax.nn.relu(jnp.einsum("kbf,kfg->kbg", y, p["b"])), p["out"])

    def loss(p, x, action, target, noise):
        y = jax.nn.relu(jax.nn.relu(x @ p["actor"]["a"]) @ p["actor"]["b"])
        mean, log = y @ p["actor"]["mean"], jnp.clip(y @ p["actor"]["log"], -5, 2)
        drawn = jnp.tanh(mean + jnp.exp(log) * noise)
        likely = jnp.sum(-0.5 * noise**2 - log - jnp.log1p(1e-6 - drawn**2), -1)
        frozen = jax.lax.stop_gradient(p["critic"])
        value = critic(frozen, x, drawn).min(0)[:, 0]
        alpha = jnp.exp(p["log_temperature"])
        actor = jnp.mean(jax.lax.stop_gradient(alpha) * likely - value)
        temperature = -jnp.mean(alpha * jax.lax.stop_gradient(likely - 2.0))
        return actor + temperature + mean_square(critic(p["critic"], x, action)[..., 0] - target)

    inputs = [shape(4, 8), shape(4, 2), shape(4), shape(4, 2)]
    return loss, params, inputs
