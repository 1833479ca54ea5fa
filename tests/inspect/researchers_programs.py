"""Small functions of the kinds that researchers write, in the format of `hostile_programs`.

An empty word is any reason for Adam. The answers were written before the functions were tried.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.inspect.hostile_programs import (
    ATTENTION,
    IMAGE,
    ROWS,
    B,
    D,
    H,
    S,
    T,
    V,
    X,
    attend,
    conv,
    cross_entropy,
    heads,
    norm,
    sq,
)
from tests.inspect.hostile_programs import program as add_program

PROGRAMS = []
program = functools.partial(add_program, to=PROGRAMS)
A4 = ATTENTION
M = "0 | 1"
CHAIN = "by names: a product of parameters is not followed: researchers_programs.py:"
GRADIENT = "by names: a gradient inside of the function is not followed"
DOT = "by names: dot_general is not followed: researchers_programs.py:"
LABEL = jax.ShapeDtypeStruct((B,), "int32")


@program(X, h0=((S,), ""), x=((D, S), M), h=((S, S), M), out=((S, 1), "head"))
def rnn_with_a_learned_start(p, x):
    def step(h, x):
        return jnp.tanh(x @ p["x"] + h @ p["h"]), None

    h, _ = lax.scan(step, jnp.broadcast_to(p["h0"], (B, S)), x.swapaxes(0, 1))
    return sq(h @ p["out"])


@program(
    X,
    inp=((D, 2 * D), "0 | 1 / 2 of 1"),
    conv=((3, 1, D), "depthwise"),
    proj=((D, 2 + 3 + 3), "0 | 1 / 2, 3, 3 of 1"),
    dt=((2, D), M),
    a=((D, 3), ""),
    skip=((D,), "multiplied"),
    o=((D, D), M),
    out=((D, 1), "head"),
)
def mamba(p, x):
    u, z = jnp.split(x @ p["inp"], 2, -1)
    u = jax.nn.silu(
        lax.conv_general_dilated(
            u,
            p["conv"],
            (1,),
            [(2, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=D,
        )
    )
    dt, bb, cc = jnp.split(u @ p["proj"], (2, 5), -1)
    dt = jax.nn.softplus(dt @ p["dt"])
    da = jnp.exp(jnp.einsum("btd,dn->btdn", dt, -jnp.exp(p["a"])))
    dbu = jnp.einsum("btd,btn,btd->btdn", dt, bb, u)

    def step(h, s):
        h = s[0] * h + s[1]
        return h, jnp.einsum("bdn,bn->bd", h, s[2])

    _, y = lax.scan(
        step, jnp.zeros((B, D, 3)), tuple(a.swapaxes(0, 1) for a in (da, dbu, cc))
    )
    y = (y.swapaxes(0, 1) + u * p["skip"]) * jax.nn.silu(z)
    return sq((x + y @ p["o"]) @ p["out"])


@program(
    X, pos=((T, D), CHAIN), proj=((D, D), CHAIN), w=((D, D), M), out=((D, 1), "head")
)
def a_projected_position_table(p, x):
    return sq(jnp.tanh((x + p["pos"] @ p["proj"]) @ p["w"]) @ p["out"])


@program(ROWS, LABEL, w=((3, D, D), "1 | 2"), out=((D, 4), "head"))
def experts_that_labels_choose(p, x, task):
    h = jnp.einsum("bd,edf->bef", x, p["w"])
    h = jnp.einsum("bef,be->bf", h, jax.nn.one_hot(task, 3))
    return cross_entropy(jnp.tanh(h) @ p["out"], task)


@program(ROWS, w=((D, D), M), a=((D, 4), DOT), b=((D, 3), DOT), s=((2,), ""))
def task_weights_by_a_dot(p, x):
    h = jnp.tanh(x @ p["w"])
    losses = jnp.stack([cross_entropy(h @ p[n], jnp.zeros(B, int)) for n in "ab"])
    return jnp.dot(losses, jnp.exp(-p["s"])) + p["s"].sum()


def mha(p, x, w=None):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    return q, k, v, jnp.einsum("bqhd,bkhd->bhqk", q, k)


def done(p, x, w, v):
    o = jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, T, D)
    return sq((x + o @ p["o"]) @ p["out"])


OUT = {"out": ((D, 1), "head")}


@program(X, **A4, **OUT, sites=1)
def softmax_with_where(p, x):
    q, k, v, l = mha(p, x)
    return done(
        p, x, jax.nn.softmax(l, where=jnp.tril(jnp.ones((T, T), bool)), axis=-1), v
    )


@program(
    X, prefix=((3, H, S), "joined"), pv=((3, H, S), "joined"), **A4, **OUT, sites=1
)
def prefix_keys(p, x):
    q, k, v, _ = mha(p, x)
    k, v = (
        jnp.concatenate([jnp.broadcast_to(p[n], (B, 3, H, S)), a], 1)
        for n, a in (("prefix", k), ("pv", v))
    )
    w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return sq(
        (x + jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, T, D) @ p["o"]) @ p["out"]
    )


@program(
    X,
    sites="can't be followed",
    q=((D, S), M),
    k=((D, S), M),
    score=((S,), "vector"),
    v=((D, D), M),
    **OUT,
)
def bahdanau_attention(p, x):
    e = jnp.tanh((x @ p["q"])[:, :, None] + (x @ p["k"])[:, None]) @ p["score"]
    return sq(jnp.tanh(jax.nn.softmax(e) @ (x @ p["v"])) @ p["out"])


@program(
    X,
    **A4
    | dict.fromkeys(
        "qkv", ((D, D), "by names: attention with other columns of one layer")
    ),
    **OUT,
    sites=2,
)
def heads_by_a_loop(p, x):
    q, k, v = (x @ p[n] for n in "qkv")
    o = [
        jax.nn.softmax(q[..., i : i + S] @ k[..., i : i + S].swapaxes(1, 2))
        @ v[..., i : i + S]
        for i in (0, S)
    ]
    return sq((x + jnp.concatenate(o, -1) @ p["o"]) @ p["out"])


@program(X, up=((D, D), "0 | 1"), mask=((D,), "joined with data"), **OUT)
def tokens_put_back_in_their_order(p, x):
    """As in the decoder of a masked autoencoder."""
    hidden = jnp.broadcast_to(p["mask"], (B, 2, D))
    order = jnp.argsort(x[0, :, 0])
    return sq(jnp.concatenate([x @ p["up"], hidden], 1)[:, order] @ p["out"])


@program(
    X,
    slots=((3, D), "learned input"),
    **A4,
    **OUT,
    sites="it can't be followed from parameters",
)
def slot_attention(p, x):
    q, k, v = jnp.broadcast_to(p["slots"], (B, 3, D)) @ p["q"], x @ p["k"], x @ p["v"]
    w = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k), 1)
    w = w / (w.sum(-1, keepdims=True) + 1e-8)
    return sq(jnp.tanh(jnp.einsum("bst,btd->bsd", w, v) @ p["o"]) @ p["out"])


@program(
    IMAGE,
    down=((3, 3, 3, D), "0, 1, 2 | 3"),
    mid=((3, 3, D, D), "0, 1, 2 | 3"),
    up=((2, 2, D, D), "0, 1, 2 | 3"),
    time=((D, 2 * D), "0 | 1 / 2 of 1"),
    out=((3, 3, 2 * D, 3), "head"),
)
def unet(p, x):
    a = jax.nn.silu(conv(x, p["down"]))
    s, t = jnp.split(jnp.sin(jnp.arange(D) * 1.0) @ p["time"], 2)
    b = jax.nn.silu(conv(a, p["mid"], stride=2) * (1 + s) + t)
    b = lax.conv_transpose(b, p["up"], (2, 2), "SAME")
    return sq(conv(jax.nn.silu(jnp.concatenate([a, b], -1)), p["out"]) - x)


@program(
    IMAGE,
    first=((3, 3, 3, D), "0, 1, 2 | 3"),
    up=((3, 3, D, D), "0, 1, 3 | 2"),
    out=((D, 1), "head"),
)
def transposed_convolution_with_a_transposed_kernel(p, x):
    y = jax.nn.relu(conv(x, p["first"]))
    y = lax.conv_transpose(y, p["up"], (2, 2), "SAME", transpose_kernel=True)
    return sq(jax.nn.relu(y) @ p["out"])


@program(ROWS, w=((D, D), GRADIENT), out=((D, 4), GRADIENT))
def maml(p, x):
    loss = lambda p: cross_entropy(jnp.tanh(x @ p["w"]) @ p["out"], jnp.zeros(B, int))
    return loss(jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p)))


@program(ROWS, w=((D, D), GRADIENT), out=((D, 4), GRADIENT))
def maml_of_a_jitted_loss(p, x):
    loss = jax.jit(
        lambda p: cross_entropy(jnp.tanh(x @ p["w"]) @ p["out"], jnp.zeros(B, int))
    )
    return loss(jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p)))


@program(
    ROWS, ROWS, enc=((D, D), GRADIENT), w=((D, D), GRADIENT), out=((D, 1), GRADIENT)
)
def forces_with_a_penalty_on_features(p, x, y):
    """Without the gradient the encoder would be a head."""
    features = lambda x: jnp.tanh(x @ p["enc"])
    energy = lambda x: jnp.sum(jnp.tanh(features(x) @ p["w"]) @ p["out"])
    return sq(jax.grad(energy)(x) - y) + sq(features(x))


@program(
    ROWS, w=((D, D), M), mid=((D, D), M), b=((D,), "added"), out=((D, 1), GRADIENT)
)
def a_gradient_penalty(p, x):
    """WGAN's."""
    critic = lambda x: jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["mid"]) @ p["out"]
    return jnp.mean(critic(x)) + sq(jax.grad(lambda x: jnp.sum(critic(x)))(x))


@program(ROWS, w=((D, D), M), mid=((D, D), M), out=((D, 4), "head"))
def first_order_maml(p, x):
    """So does SAM: what it adds to the weights has no gradient."""
    net = lambda p: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["mid"]) @ p["out"]
    loss = lambda p: cross_entropy(net(p), jnp.zeros(B, int))
    g = lax.stop_gradient(jax.grad(loss)(p))
    return loss(jax.tree.map(jnp.subtract, p, g))


@program(ROWS, w=((D, D), M), u=((D, S), M), items=((V, 4), CHAIN), i=((4, S), CHAIN))
def a_head_of_encoded_items(p, x):
    """Two towers with a softmax over all items."""
    u = jnp.tanh(x @ p["w"]) @ p["u"]
    return cross_entropy(u @ (p["items"] @ p["i"]).T, jnp.zeros(B, int))


@program(ROWS, w=((D, D), GRADIENT), mid=((D, D), GRADIENT), out=((D, 1), GRADIENT))
def pinn(p, x):
    u = lambda x: (jnp.tanh(jnp.tanh(x @ p["w"]) @ p["mid"]) @ p["out"])[0]
    return jnp.mean(jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(x) ** 2)


@program(
    ROWS,
    enc=((D, S), M),
    code=((V, S), "looked up"),
    dec=((S, D), M),
    out=((D, D), "head"),
)
def vq_vae(p, x):
    z = jnp.tanh(x) @ p["enc"]
    d = (z**2).sum(-1, keepdims=True) - 2 * z @ p["code"].T + (p["code"] ** 2).sum(-1)
    q = p["code"][jnp.argmin(d, -1)]
    commit = sq(lax.stop_gradient(q) - z) + sq(q - lax.stop_gradient(z))
    q = z + lax.stop_gradient(q - z)
    return sq(jnp.tanh(q @ p["dec"]) @ p["out"] - x) + commit


@program(X, g=((D, H), M), **A4, **OUT, sites="scale its logits alone")
def forgetting_attention_bias(p, x):
    q, k, v, l = mha(p, x)
    c = jnp.cumsum(jax.nn.log_sigmoid(x @ p["g"]), 1).swapaxes(1, 2)
    return done(p, x, jax.nn.softmax(l + c[..., :, None] - c[..., None, :]), v)


@program(ROWS, LABEL, a=((D, D), M), b=((D, D), M), out=((D, 1), "head"))
def weights_mixed_by_data(p, x, i):
    c = jax.nn.sigmoid(i[0] * 1.0)
    return sq(jnp.tanh(x @ (c * p["a"] + (1 - c) * p["b"])) @ p["out"])


@program(
    jax.ShapeDtypeStruct((B, 8, 3), "float32"),
    first=((3, 3, D), "0, 1 | 2"),
    dil=((3, D, D), "0, 1 | 2"),
    gate=((3, D, 2 * D), "0, 1 | 2 / 2 of 2"),
    out=((1, D, 4), "head"),
)
def wavenet(p, x):
    c = lambda x, w, d=1: lax.conv_general_dilated(
        x,
        w,
        (1,),
        [((w.shape[0] - 1) * d, 0)],
        rhs_dilation=(d,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    x = jax.nn.relu(c(x, p["first"]))
    a, b = jnp.split(c(x, p["gate"], 2), 2, -1)
    x = x + c(jnp.tanh(a) * jax.nn.sigmoid(b), p["dil"], 4)
    return sq(c(jax.nn.relu(x), p["out"]))


L4 = dict.fromkeys("qkvo", ((3, D, D), "1 | 2"))


@program(X, **dict.fromkeys("qkvo", ((D, 3, D), "0 | 2")), **OUT, sites=1)
def scanned_attention_on_axis_one(p, x):
    def layer(x, w):
        return norm(x + attend(*(heads(x @ w[n]) for n in "qkv")) @ w["o"]), None

    x, _ = lax.scan(layer, x, {n: jnp.moveaxis(p[n], 1, 0) for n in "qkvo"})
    return sq(x @ p["out"])


@program(X, **L4, **OUT, sites=1)
def attention_by_a_counter(p, x):
    def layer(i, x):
        return norm(x + attend(*(heads(x @ p[n][i]) for n in "qkv")) @ p["o"][i])

    return sq(lax.fori_loop(0, 3, layer, x) @ p["out"])


@program(X, w=((D, D), M), out=((D, 1), "head"), g=((D,), "multiplied"))
def a_scale_by_einsum_after_a_bend(p, x):
    return sq(jnp.einsum("btd,d->btd", jax.nn.softplus(x @ p["w"]), p["g"]) @ p["out"])


@program(
    X,
    sites="can't be followed",
    probe=((H, S), "vectors"),
    k=((D, H, S), "0 | 1, 2"),
    v=((D, H, S), "0 | 1, 2"),
    o=((H, S, D), "0, 1 | 2"),
    **OUT,
)
def pooling_by_learned_queries(p, x):
    """The heads of the keys are a batch of the product with one vector for each, and no experts."""
    k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "kv")
    w = jax.nn.softmax(jnp.einsum("hk,bthk->bht", p["probe"], k))
    y = jnp.einsum("bht,bthk->bhk", w, v)
    return sq(jnp.einsum("bhk,hkd->bd", y, p["o"]) @ p["out"])


@program(
    ROWS,
    router=((D, 3), M),
    up=((3, D, S), "by names: an einsum of three or more"),
    down=((3, S, D), "by names: an einsum of three or more"),
    **OUT,
)
def experts_that_data_choose_in_an_einsum_of_three(p, x):
    chosen = jnp.argmax(x @ p["router"], -1)
    gate = jax.nn.softmax(x @ p["router"]).max(-1)
    h = jax.nn.relu(jnp.einsum("bd,bdf->bf", x, p["up"][chosen]))
    return sq(jnp.einsum("b,bf,bfd->bd", gate, h, p["down"][chosen]) @ p["out"])
