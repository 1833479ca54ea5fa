"""Small functions of the kinds that researchers write, in the format of `hostile_programs`.

An empty word is any reason for Adam. The answers were written before the functions were tried.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.inspect.hostile_programs import (
    ATTENTION,
    IMAGE,
    KEY,
    ROWS,
    TOKENS,
    B,
    D,
    H,
    HostileProgram,
    S,
    T,
    V,
    X,
    attend,
    conv,
    cross_entropy,
    heads,
    norm,
)
from tests.inspect.hostile_programs import program as add_program

PROGRAMS: list[HostileProgram] = []
program = functools.partial(add_program, to=PROGRAMS)
A4 = ATTENTION
M = "0 | 1"
CHAIN = "by names: a product of parameters is not followed: researchers_programs.py:"
NOT_ALL = "its queries, keys and values can't all be followed to parameters: researchers_programs.py:"
LABEL = jax.ShapeDtypeStruct((B,), "int32")


def sq(y):
    return jnp.mean(y**2)


# --- recurrent
@program(
    X,
    x=((D, 3 * S), "0 | 1 / 3 of 1"),
    h=((S, 3 * S), "0 | 1 / 3 of 1"),
    out=((S, 1), "head"),
)
def gru(p, x):
    def step(h, x):
        (xr, xz, xn), (hr, hz, hn) = (
            jnp.split(x @ p["x"], 3, -1),
            jnp.split(h @ p["h"], 3, -1),
        )
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        return h, None

    h, _ = lax.scan(step, jnp.zeros((B, S)), x.swapaxes(0, 1))
    return sq(h @ p["out"])


@program(X, w=((D, 2 * S), "0 | 1 / 2 of 1"), out=((S, 1), "head"))
def min_rnn_by_associative_scan(p, x):
    z, h = jnp.split(x @ p["w"], 2, -1)
    z = jax.nn.sigmoid(z)
    _, y = lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (1 - z, z * h), axis=1
    )
    return sq(y @ p["out"])


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


@program(X, re=((D, D), M), im=((D, D), M), out=((D, 1), "head"))
def complex_weights_of_two_parameters(p, x):
    y = x.astype("complex64") @ lax.complex(p["re"], p["im"])
    return sq(jnp.tanh(jnp.abs(y)) @ p["out"])


@program(
    X,
    mix=((3, D), "multiplied"),
    r=((D, D), M),
    k=((D, D), M),
    v=((D, D), M),
    u=((D,), "added"),
    w=((D,), ""),
    o=((D, D), M),
    out=((D, 1), "head"),
)
def rwkv(p, x):
    last = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    r, k, v = ((x * m + last * (1 - m)) @ p[n] for m, n in zip(p["mix"], "rkv"))

    def step(c, kv):
        k, v = kv
        y = (c[0] + jnp.exp(p["u"] + k) * v) / (c[1] + jnp.exp(p["u"] + k))
        e = jnp.exp(-jnp.exp(p["w"]))
        return (e * c[0] + jnp.exp(k) * v, e * c[1] + jnp.exp(k)), y

    _, y = lax.scan(
        step, (jnp.zeros((B, D)),) * 2, (k.swapaxes(0, 1), v.swapaxes(0, 1))
    )
    return sq((x + (jax.nn.sigmoid(r) * y.swapaxes(0, 1)) @ p["o"]) @ p["out"])


# --- unbatched learned inputs: products of parameters alone
@program(
    X,
    latents=((3, D), CHAIN),
    **A4 | {"q": ((D, D), CHAIN)},
    out=((D, 1), "head"),
    sites=NOT_ALL,
)
def perceiver_with_unbatched_latents(p, x):
    q, k, v = heads(p["latents"] @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
    w = jax.nn.softmax(jnp.einsum("qhd,bkhd->bhqk", q, k))
    o = jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, 3, D)
    return sq(jnp.tanh(o @ p["o"]) @ p["out"])


@program(
    X,
    latents=((3, D), CHAIN),
    **A4 | {"q": ((D, D), CHAIN)},
    out=((D, 1), "head"),
    sites=NOT_ALL,
)
def perceiver_by_vmap(p, x):
    def one(x):
        q, k, v = heads(p["latents"] @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
        o = jnp.einsum(
            "hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k)), v
        ).reshape(3, D)
        return jnp.tanh(o @ p["o"]) @ p["out"]

    return sq(jax.vmap(one)(x))


@program(
    X, pos=((T, D), CHAIN), proj=((D, D), CHAIN), w=((D, D), M), out=((D, 1), "head")
)
def a_projected_position_table(p, x):
    return sq(jnp.tanh((x + p["pos"] @ p["proj"]) @ p["w"]) @ p["out"])


@program(
    X,
    prefix=((3, 5), CHAIN),
    w1=((5, D), CHAIN),
    w2=((D, D), CHAIN),
    **A4,
    out=((D, 1), "head"),
    sites=1,
)
def prefix_tuning_by_an_mlp(p, x):
    prefix = jnp.broadcast_to(jnp.tanh(p["prefix"] @ p["w1"]) @ p["w2"], (B, 3, D))
    y = jnp.concatenate([prefix, x], 1)
    y = y + attend(heads(y @ p["q"]), heads(y @ p["k"]), heads(y @ p["v"])) @ p["o"]
    return sq(y @ p["out"])


@program(ROWS, ROWS, hyper=((D, D * D), M), out=((D, 1), "head"))
def a_hypernetwork_of_data(p, x, c):
    w = (c @ p["hyper"]).reshape(B, D, D)
    return sq(jnp.tanh(jnp.einsum("bi,bij->bj", x, w)) @ p["out"])


# --- reads by data that are no output
@program(ROWS, LABEL, w=((D, 3 * D), M), out=((D, 4), "head"))
def a_hidden_layer_by_task(p, x, task):
    h = jnp.tanh(x @ p["w"]).reshape(B, 3, D)
    h = jnp.take_along_axis(h, task[:, None, None], 1)[:, 0]
    return cross_entropy(h @ p["out"], task)


@program(ROWS, LABEL, w=((3, D, D), "1 | 2"), out=((D, 4), "head"))
def experts_that_labels_choose(p, x, task):
    h = jnp.einsum("bd,edf->bef", x, p["w"])
    h = jnp.einsum("bef,be->bf", h, jax.nn.one_hot(task, 3))
    return cross_entropy(jnp.tanh(h) @ p["out"], task)


# --- two spellings
@program(
    LABEL,
    LABEL,
    user=((V, D), "looked up"),
    item=((V, D), "looked up"),
    a=((D, S), M),
    b=((D, S), M),
)
def two_towers_by_a_sum(p, u, i):
    a, b = jnp.tanh(p["user"][u]) @ p["a"], jnp.tanh(p["item"][i]) @ p["b"]
    return jnp.mean(jax.nn.softplus(-(a * b).sum(-1)))


@program(
    LABEL,
    LABEL,
    user=((V, D), "looked up"),
    item=((V, D), "looked up"),
    a=((D, S), M),
    b=((D, S), M),
)
def two_towers_by_an_einsum(p, u, i):
    a, b = jnp.tanh(p["user"][u]) @ p["a"], jnp.tanh(p["item"][i]) @ p["b"]
    return jnp.mean(jax.nn.softplus(-jnp.einsum("bd,bd->b", a, b)))


@program(ROWS, w=((D, D), M), policy=((D, 4), "head"), value=((D, 1), "head"))
def advantages_by_a_dot(p, x):
    h = jnp.tanh(x @ p["w"])
    v, logp = (h @ p["value"])[:, 0], jax.nn.log_softmax(h @ p["policy"])[:, 0]
    return -jnp.dot(logp, lax.stop_gradient(1.0 - v)) + jnp.mean((v - 1) ** 2)


@program(ROWS, w=((D, D), M), a=((D, 4), "head"), b=((D, 3), "head"), s=((2,), ""))
def task_weights_by_a_dot(p, x):
    h = jnp.tanh(x @ p["w"])
    losses = jnp.stack([cross_entropy(h @ p[n], jnp.zeros(B, int)) for n in "ab"])
    return jnp.dot(losses, jnp.exp(-p["s"])) + p["s"].sum()


# --- recommenders
@program(TOKENS, v=((V, S), "looked up"), w=((V,), "looked up"))
def factorization_machine(p, t):
    e = p["v"][t]
    y = p["w"][t].sum(-1) + 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(-1)
    return jnp.mean(jax.nn.softplus(y))


@program(
    ROWS,
    TOKENS,
    table=((V, S), "looked up"),
    bot=((D, S), M),
    top=((S + 21, D), M),
    out=((D, 1), "head"),
)
def dlrm(p, x, t):
    d = jax.nn.relu(x @ p["bot"])
    e = jnp.concatenate([d[:, None], p["table"][t]], 1)
    z = jnp.einsum("bid,bjd->bij", e, e)
    i, j = jnp.triu_indices(T + 1, 1)
    return sq(jnp.tanh(jnp.concatenate([d, z[:, i, j]], -1) @ p["top"]) @ p["out"])


# --- graphs
EDGES = jax.ShapeDtypeStruct((9,), "int32")
NODES = jax.ShapeDtypeStruct((5, D), "float32")


@program(NODES, EDGES, EDGES, w=((D, 2 * D), "0 | 1 / 2 of 1"), out=((D, 3), "head"))
def a_gated_message_in_one_kernel(p, x, s, r):
    gate, msg = jnp.split(x @ p["w"], 2, -1)
    y = jax.ops.segment_sum(jax.nn.sigmoid(gate)[r] * msg[s], r, 5)
    return cross_entropy(y @ p["out"], jnp.zeros(5, int))


# --- attention
def mha(p, x, w=None):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    return q, k, v, jnp.einsum("bqhd,bkhd->bhqk", q, k)


def done(p, x, w, v):
    o = jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, T, D)
    return sq((x + o @ p["o"]) @ p["out"])


OUT = {"out": ((D, 1), "head")}


@program(
    X,
    lam=((), "multiplied"),
    q=((D, 2 * D), "0 | 1 / 2 of 1"),
    k=((D, 2 * D), "0 | 1 / 2 of 1"),
    v=((D, D), M),
    o=((D, D), M),
    **OUT,
    sites=2,
)
def differential_attention(p, x):
    (q1, q2), (k1, k2) = (jnp.split(x @ p[n], 2, -1) for n in "qk")
    w1, w2 = (
        jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)))
        for q, k in ((q1, k1), (q2, k2))
    )
    return done(p, x, w1 - p["lam"] * w2, heads(x @ p["v"]))


@program(X, **A4, **OUT, sites=1)
def exp_of_log_softmax(p, x):
    q, k, v, l = mha(p, x)
    return done(p, x, jnp.exp(jax.nn.log_softmax(l)), v)


@program(X, **A4, **OUT, sites=1)
def exp_minus_logsumexp(p, x):
    q, k, v, l = mha(p, x)
    return done(p, x, jnp.exp(l - jax.nn.logsumexp(l, -1, keepdims=True)), v)


@program(X, **A4, **OUT, sites=1)
def softmax_with_where(p, x):
    q, k, v, l = mha(p, x)
    return done(
        p, x, jax.nn.softmax(l, where=jnp.tril(jnp.ones((T, T), bool)), axis=-1), v
    )


@program(X, **A4, **OUT, sites=1)
def alibi(p, x):
    q, k, v, l = mha(p, x)
    bias = -jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)) * 1.0
    return done(
        p, x, jax.nn.softmax(l / 2 + bias * jnp.array([0.5, 0.25])[:, None, None]), v
    )


@program(X, table=((2 * T, H), "added"), **A4, **OUT, sites="(add)")
def t5_bias(p, x):
    q, k, v, l = mha(p, x)
    at = jnp.arange(T)[:, None] - jnp.arange(T) + T
    return done(p, x, jax.nn.softmax(l + p["table"][at].transpose(2, 0, 1)), v)


@program(X, temp=((H,), "multiplied"), **A4, **OUT, sites=1)
def a_learned_temperature_by_head(p, x):
    q, k, v, l = mha(p, x)
    return done(p, x, jax.nn.softmax(l * jnp.exp(p["temp"])[:, None, None]), v)


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


CACHE = jax.ShapeDtypeStruct((B, 3, H, S), "float32")


@program(X, CACHE, CACHE, **A4, **OUT, sites=1)
def cached_keys(p, x, ck, cv):
    q, k, v, _ = mha(p, x)
    k, v = jnp.concatenate([ck, k], 1), jnp.concatenate([cv, v], 1)
    w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return sq(
        (x + jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, T, D) @ p["o"]) @ p["out"]
    )


@program(X, **A4, **OUT, sites=1)
def a_sliding_window_by_gather(p, x):
    q, k, v, _ = mha(p, x)
    at = jnp.clip(jnp.arange(T)[:, None] + jnp.arange(-1, 2), 0, T - 1)
    w = jax.nn.softmax(jnp.einsum("bqhd,bqwhd->bhqw", q, k[:, at]))
    return sq(
        (x + jnp.einsum("bhqw,bqwhd->bqhd", w, v[:, at]).reshape(B, T, D) @ p["o"])
        @ p["out"]
    )


@program(X, LABEL, **A4, **OUT, sites=1)
def keys_that_data_choose(p, x, i):
    q, k, v, _ = mha(p, x)
    k, v = (
        jnp.take_along_axis(a, jnp.stack([i, i + 1], 1)[:, :, None, None], 1)
        for a in (k, v)
    )
    w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return done(p, x, w, v)


@program(X, q=((D, S), M), k=((D, S), M), score=((S,), "vector"), v=((D, D), M), **OUT)
def bahdanau_attention(p, x):
    e = jnp.tanh((x @ p["q"])[:, :, None] + (x @ p["k"])[:, None]) @ p["score"]
    return sq(jnp.tanh(jax.nn.softmax(e) @ (x @ p["v"])) @ p["out"])


@program(
    X,
    q=((H, D, S), "1 | 0, 2"),
    k=((H, D, S), "1 | 0, 2"),
    v=((H, D, S), "1 | 0, 2"),
    o=((H, S, D), "0, 1 | 2"),
    **OUT,
    sites=1,
)
def heads_by_vmap(p, x):
    def head(q, k, v):
        return jax.nn.softmax((x @ q) @ (x @ k).swapaxes(1, 2)) @ (x @ v)

    o = jax.vmap(head)(p["q"], p["k"], p["v"])
    return sq((x + jnp.einsum("hbts,hsd->btd", o, p["o"])) @ p["out"])


@program(
    X,
    **A4 | dict.fromkeys("qkv", ((D, D), "by names: attention head by head")),
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


@program(X, cq=((3, D), "multiplied"), **A4, **OUT, sites=1)
def primer_convolved_queries(p, x):
    q = x @ p["q"]
    q = sum(jnp.pad(q, ((0, 0), (i, 0), (0, 0)))[:, :T] * p["cq"][i] for i in range(3))
    return sq(
        (x + attend(heads(q), heads(x @ p["k"]), heads(x @ p["v"])) @ p["o"]) @ p["out"]
    )


@program(
    X,
    slots=((3, D), "learned input"),
    **A4,
    **OUT,
    sites="the maximum subtracted from its logits",
)
def slot_attention(p, x):
    q, k, v = jnp.broadcast_to(p["slots"], (B, 3, D)) @ p["q"], x @ p["k"], x @ p["v"]
    w = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k), 1)
    w = w / (w.sum(-1, keepdims=True) + 1e-8)
    return sq(jnp.tanh(jnp.einsum("bst,btd->bsd", w, v) @ p["o"]) @ p["out"])


@program(
    jax.ShapeDtypeStruct((B, 4, 4, D), "float32"),
    table=((9, H), "added"),
    qkv=((D, 3 * D), "0 | 1 / 3 of 1"),
    o=((D, D), M),
    **OUT,
    sites="(add)",
)
def swin_windows(p, x):
    w = x.reshape(B, 2, 2, 2, 2, D).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, D)
    q, k, v = (heads(a) for a in jnp.split(w @ p["qkv"], 3, -1))
    bias = p["table"][(jnp.arange(4)[:, None] - jnp.arange(4)) % 9].transpose(2, 0, 1)
    o = jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias), v
    ).reshape(-1, 4, D)
    x = x + (o @ p["o"]).reshape(B, 2, 2, 2, 2, D).transpose(0, 1, 3, 2, 4, 5).reshape(
        x.shape
    )
    return sq(x @ p["out"])


# --- convolutions
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


@program(
    IMAGE,
    first=((3, 3, 3, D), "0, 1, 2 | 3"),
    squeeze=((D, 2), M),
    excite=((2, D), M),
    deep=((3, 3, 1, 2 * D), "depthwise"),
    point=((1, 1, 2 * D, D), "2 | 3"),
    out=((D, 1), "head"),
)
def squeeze_excite_and_separable(p, x):
    y = jax.nn.relu(conv(x, p["first"]))
    y = (
        y
        * jax.nn.sigmoid(jax.nn.relu(y.mean((1, 2)) @ p["squeeze"]) @ p["excite"])[
            :, None, None
        ]
    )
    y = jax.nn.relu(conv(conv(y, p["deep"], groups=D), p["point"]))
    return sq(y.mean((1, 2)) @ p["out"])


@program(
    IMAGE, w=((3, 3, 3, D), "0, 1, 2 | 3"), g=((D,), "multiplied"), out=((D, 1), "head")
)
def weight_standardization(p, x):
    w = p["w"]
    w = (w - w.mean((0, 1, 2))) * lax.rsqrt(w.var((0, 1, 2)) + 1e-5) * p["g"]
    return sq(jax.nn.relu(conv(x, w)).mean((1, 2)) @ p["out"])


@program(ROWS, ROWS, w=((D, D), M), out=((D, 4), "head"))
def spectral_norm(p, x, uv):
    def normed(w, u):
        v = u @ w
        v = v / jnp.linalg.norm(v)
        sigma = (
            lax.stop_gradient(w @ v) @ w @ lax.stop_gradient(v)
            if w.shape[0] == w.shape[1]
            else jnp.linalg.norm(w @ v)
        )
        return w / sigma

    return cross_entropy(
        jnp.tanh(x @ normed(p["w"], uv[0])) @ normed(p["out"], uv[0]), jnp.zeros(B, int)
    )


@program(IMAGE, w=((3, 3), M), mid=((3, 5), M), out=((5, 1), "head"))
def an_invertible_convolution(p, x):
    y = x @ p["w"]
    return sq(jnp.tanh(y @ p["mid"]) @ p["out"]) - jnp.linalg.slogdet(p["w"])[1]


# --- combined weights
@program(
    ROWS,
    w=((D, D), M),
    a=((D, 2), M),
    b=((2, D), M),
    c=((D, 2), M),
    d=((2, D), M),
    out=((D, 1), "head"),
)
def loha(p, x):
    return sq(jnp.tanh(x @ (p["w"] + (p["a"] @ p["b"]) * (p["c"] @ p["d"]))) @ p["out"])


@program(ROWS, w=((D, D), M), a=((2, 2), M), b=((4, 4), M), out=((D, 1), "head"))
def lokr(p, x):
    return sq(jnp.tanh(x @ (p["w"] + jnp.kron(p["a"], p["b"]))) @ p["out"])


@program(
    ROWS,
    w=((D, D), M),
    a=((D, 2), M),
    b=((2, D), M),
    m=((D,), "multiplied"),
    out=((D, 1), "head"),
)
def dora(p, x):
    w = p["w"] + p["a"] @ p["b"]
    return sq(
        jnp.tanh(x @ (w / lax.stop_gradient(jnp.linalg.norm(w, axis=0)) * p["m"]))
        @ p["out"]
    )


@program(ROWS, LABEL, a=((D, D), M), b=((D, D), M), out=((D, 1), "head"))
def one_of_two_weights(p, x, i):
    w = lax.cond(i[0] > 0, lambda: p["a"], lambda: p["b"])
    return sq(jnp.tanh(x @ w) @ p["out"])


@program(
    X, w=((D, 2 * D), "0 | 1 / 2 of 1, 8 times"), down=((D, D), M), out=((D, 1), "head")
)
def an_interleaved_gate(p, x):
    h = x @ p["w"]
    return sq((x + (jax.nn.silu(h[..., ::2]) * h[..., 1::2]) @ p["down"]) @ p["out"])


@program(X, w=((D, 3, D), "0 | 2"), out=((D, 1), "head"))
def a_scan_over_axis_one(p, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.moveaxis(p["w"], 1, 0))
    return sq(x @ p["out"])


@program(X, w=((2, 3, D, D), "2 | 3"), out=((D, 1), "head"))
def nested_scans(p, x):
    inner = lambda x, w: (jnp.tanh(x @ w), None)
    x, _ = lax.scan(lambda x, w: (lax.scan(inner, x, w)[0], None), x, p["w"])
    return sq(x @ p["out"])


# --- losses
@program(ROWS, w=((D, D), M), out=((D, 4), "gradient inside of the function"))
def maml(p, x):
    loss = lambda p: cross_entropy(jnp.tanh(x @ p["w"]) @ p["out"], jnp.zeros(B, int))
    return loss(jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p)))


@program(ROWS, w=((D, D), M), mid=((D, D), M), out=((D, 1), "head"))
def wgan_gp(p, x):
    critic = lambda x: (jnp.tanh(jnp.tanh(x @ p["w"]) @ p["mid"]) @ p["out"])[..., 0]
    g = jax.vmap(jax.grad(critic))(x)
    return critic(x).mean() + jnp.mean((jnp.linalg.norm(g, axis=-1) - 1) ** 2)


@program(ROWS, w=((D, D), M), mid=((D, D), M), out=((D, 1), "head"))
def pinn(p, x):
    u = lambda x: (jnp.tanh(jnp.tanh(x @ p["w"]) @ p["mid"]) @ p["out"])[0]
    return jnp.mean(jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(x) ** 2)


@program(ROWS, ROWS, w=((D, D), M), mid=((D, D), M), out=((D, D), "head"))
def sliced_score_matching(p, x, v):
    score, jv = jax.jvp(
        lambda x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["mid"]) @ p["out"], (x,), (v,)
    )
    return jnp.mean(jnp.sum(v * jv, -1) + 0.5 * jnp.sum(score**2, -1))


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


@program(
    ROWS, ROWS, a=((D, D), M), b=((D, D), M), pa=((D, S), M), pb=((D, S), M), t=((), "")
)
def clip(p, x, y):
    a, b = jnp.tanh(x @ p["a"]) @ p["pa"], jnp.tanh(y @ p["b"]) @ p["pb"]
    a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (a, b))
    l = jnp.exp(p["t"]) * a @ b.T
    return cross_entropy(l, jnp.arange(B)) + cross_entropy(l.T, jnp.arange(B))


@program(
    TOKENS,
    embed=((V, D), "looked up"),
    w=((D, D), M),
    prior=((D, 3), "head"),
    latent=((D, 3 * D), M),
    head=((D, V), "head"),
)
def mixture_of_softmaxes(p, t):
    x = jnp.tanh(p["embed"][t] @ p["w"])
    pi = jax.nn.softmax(x @ p["prior"])
    h = jnp.tanh(x @ p["latent"]).reshape(B, T, 3, D)
    probs = (pi[..., None] * jax.nn.softmax(h @ p["head"])).sum(2)
    return -jnp.log(jnp.take_along_axis(probs, t[..., None], -1)).mean()


@program(
    ROWS,
    ROWS,
    w=((2, 2 * D, D), "1 | 2"),
    mid=((2, D, D), "1 | 2"),
    out=((2, D, 1), "head"),
)
def twin_critics(p, x, a):
    q = jax.vmap(
        lambda w, m, o: jnp.tanh(jnp.tanh(jnp.concatenate([x, a], -1) @ w) @ m) @ o
    )(p["w"], p["mid"], p["out"])
    return jnp.mean((q - q.min(0)) ** 2)


@program(
    X,
    router=((D, 3), M),
    up=((3, D, 5), "1 | 2"),
    down=((3, 5, D), "1 | 2"),
    sup=((D, 5), M),
    sdown=((5, D), M),
    out=((D, 1), "head"),
)
def top_two_by_one_hot(p, x):
    w, i = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    combine = jnp.einsum("btk,btke->bte", w, jax.nn.one_hot(i, 3))
    dispatch = (combine > 0).astype(x.dtype)
    h = jax.nn.relu(
        jnp.einsum("ebtd,edf->ebtf", jnp.einsum("bte,btd->ebtd", dispatch, x), p["up"])
    )
    y = jnp.einsum("ebtf,efd,bte->btd", h, p["down"], combine)
    return sq((x + y + jax.nn.relu(x @ p["sup"]) @ p["sdown"]) @ p["out"])


@program(
    X,
    router=((D, 3), M),
    up=((3, D, 5), "1 | 2"),
    down=((3, 5, D), "1 | 2"),
    out=((D, 1), "head"),
)
def expert_choice(p, x):
    x = x.reshape(-1, D)
    g, i = lax.top_k(jax.nn.softmax(x @ p["router"]).T, 4)
    h = jax.nn.relu(jnp.einsum("ecd,edf->ecf", x[i], p["up"]))
    y = jnp.einsum("ecf,efd->ecd", h, p["down"]) * g[..., None]
    return sq(
        (x + jnp.zeros_like(x).at[i.reshape(-1)].add(y.reshape(-1, D))) @ p["out"]
    )


@program(X, w=((D, D), M), out=((D, 1), "head"))
def a_layer_with_its_own_derivative(p, x):
    @jax.custom_vjp
    def f(x, w):
        return jnp.tanh(x @ w)

    f.defvjp(
        lambda x, w: (f(x, w), (x, w)),
        lambda r, g: (g @ r[1].T, jnp.einsum("btd,btf->df", r[0], g)),
    )
    return sq(f(x, p["w"]) @ p["out"])


@program(ROWS, w1=((D + 1, D), M), w2=((D, D), M), out=((D, 1), "head"))
def neural_ode(p, x):
    f = lambda x, t: (
        jnp.tanh(jnp.concatenate([x, jnp.full((B, 1), t)], -1) @ p["w1"]) @ p["w2"]
    )

    def step(i, x):
        k1 = f(x, i * 0.1)
        return x + 0.1 * f(x + 0.05 * k1, i * 0.1 + 0.05)

    return sq(lax.fori_loop(0, 4, step, x) @ p["out"])


@program(ROWS, a=((D, D), M), b=((D, D), M), out=((D, 1), "head"))
def a_shard_map(p, x):
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()[:1]), ("m",))
    f = jax.shard_map(
        lambda x, a, b: lax.psum(jnp.tanh(x @ a) @ b, "m"),
        mesh=mesh,
        in_specs=(P(), P(None, "m"), P("m", None)),
        out_specs=P(),
    )
    return sq(jnp.tanh(f(x, p["a"], p["b"])) @ p["out"])


@program(ROWS, w=((D, D), M), shift=((D, D), "0 | 1"), out=((D, 1), "head"))
def an_einsum_with_ellipsis(p, x):
    y = jnp.tanh(jnp.einsum("...i,ij->...j", x, p["w"]))
    y = jnp.tanh(jnp.einsum("ij,...j->...i", p["shift"].T, y))
    return jnp.mean(jnp.einsum("...i,io->...o", y, p["out"]) ** 2), {"y": y}


@program(X, **{n + i: ((D, D), M) for n in "qkvo" for i in "12"}, **OUT, sites=2)
def two_attentions_in_one_flat_dict(p, x):
    for i in "12":
        x = x + attend(*(heads(x @ p[n + i]) for n in "qkv")) @ p["o" + i]
    return sq(x @ p["out"])


@program(X, **A4, **OUT, sites=1)
def additive_mask(p, x):
    q, k, v, l = mha(p, x)
    return done(
        p,
        x,
        jax.nn.softmax(l / 2 + jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, -1e9)),
        v,
    )


@program(X, **A4, **OUT, sites=1)
def complex_rotary(p, x):
    cis = jnp.exp(1j * jnp.arange(T)[:, None, None] * jnp.array([1.0, 0.1]))

    def rot(x):
        y = lax.complex(x[..., ::2], x[..., 1::2]) * cis
        return jnp.stack([y.real, y.imag], -1).reshape(x.shape)

    q, k, v = (heads(x @ p[n]) for n in "qkv")
    return sq((x + attend(rot(q), rot(k), v) @ p["o"]) @ p["out"])


@program(X, **A4, **OUT, sites=1)
def logits_of_keys_by_queries(p, x):
    q, k, v, _ = mha(p, x)
    w = jax.nn.softmax(jnp.einsum("bkhd,bqhd->bhkq", k, q), 2)
    return done(p, x, w.swapaxes(2, 3), v)


@program(X, X, **A4, **{n + "x": ((D, D), M) for n in "qkvo"}, **OUT, sites=2)
def encoder_and_decoder(p, x, y):
    y = y + attend(*(heads(y @ p[n]) for n in "qkv")) @ p["o"]
    q, k, v = heads(x @ p["qx"]), heads(y @ p["kx"]), heads(y @ p["vx"])
    o = jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v
    ).reshape(B, T, D)
    return sq((x + o @ p["ox"]) @ p["out"])


@program(X, **A4, **OUT, sites="its queries, keys and values")
def a_written_cache(p, x):
    q, k, v, _ = mha(p, x)
    k, v = (
        lax.dynamic_update_slice(jnp.zeros((B, T + 2, H, S)), a, (0, 0, 0, 0))
        for a in (k, v)
    )
    l = jnp.where(jnp.arange(T + 2) < T, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    return sq(
        (
            x
            + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(l), v).reshape(B, T, D)
            @ p["o"]
        )
        @ p["out"]
    )


@program(X, X, mk=((D, D), M), mv=((D, D), M), **A4, **OUT, sites=1)
def keys_of_two_sources_joined(p, x, y):
    q, k, v, l = mha(p, x)
    k, v = (
        jnp.concatenate([k, heads(y @ p["mk"])], 1),
        jnp.concatenate([v, heads(y @ p["mv"])], 1),
    )
    w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    o = jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, T, D)
    return sq((x + o @ p["o"]) @ p["out"])


@program(
    X,
    X,
    qkv=((D, 3 * D), "0 | 1 / 3 of 1"),
    qkv2=((D, 3 * D), "0 | 1 / 3 of 1"),
    o=((D, D), M),
    **OUT,
    sites=1,
)
def joint_attention_of_mmdit(p, x, y):
    a, b = (jnp.split(z @ p[n], 3, -1) for z, n in ((x, "qkv"), (y, "qkv2")))
    q, k, v = (heads(jnp.concatenate(z, 1)) for z in zip(a, b))
    o = jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v
    ).reshape(B, 2 * T, D)
    return sq((jnp.concatenate([x, y], 1) + o @ p["o"]) @ p["out"])


@program(X, g=((D, H), M), **A4, **OUT, sites="scale its logits alone")
def forgetting_attention_bias(p, x):
    q, k, v, l = mha(p, x)
    c = jnp.cumsum(jax.nn.log_sigmoid(x @ p["g"]), 1).swapaxes(1, 2)
    return done(p, x, jax.nn.softmax(l + c[..., :, None] - c[..., None, :]), v)


@program(ROWS, w=((D, D), M), out=((D, 4), "head"))
def ntk_penalty(p, x):
    f = lambda p: jnp.tanh(x @ p["w"]) @ p["out"]
    j = jax.jacrev(f)(p)
    k = jnp.einsum("bkij,clij->bckl", j["w"], j["w"])
    return cross_entropy(f(p), jnp.zeros(B, int)) + 1e-3 * sq(k)


@program(ROWS, w=((D, D), M), mid=((D, D), M), out=((D, 4), "head"))
def virtual_adversary(p, x):
    f = lambda x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["mid"]) @ p["out"]
    clean = lax.stop_gradient(jax.nn.softmax(f(x)))
    kl = lambda r: -(clean * jax.nn.log_softmax(f(x + r))).sum(-1).mean()
    r = jax.grad(kl)(jnp.ones_like(x) * 1e-3)
    return kl(lax.stop_gradient(r)) + cross_entropy(f(x), jnp.zeros(B, int))


@program(ROWS, w=((D, 4, D), "0 | 2"), out=((D, 4, 1), "head"))
def an_ensemble_on_axis_one(p, x):
    y = jax.vmap(lambda w, o: jnp.tanh(x @ w) @ o, in_axes=(1, 1))(p["w"], p["out"])
    return jnp.mean((y - 1) ** 2)


@program(TOKENS, embed=((V, D), "looked up"), w=((D, D), M), head=((D, V), "head"))
def scheduled_sampling(p, t):
    def step(c, t):
        h, last = c
        h = jnp.tanh((h + p["embed"][last]) @ p["w"])
        l = h @ p["head"]
        return (h, jnp.argmax(l, -1)), cross_entropy(l, t)

    return lax.scan(step, (jnp.zeros((B, D)), jnp.zeros(B, int)), t.T)[1].mean()


@program(
    TOKENS,
    embed=((V, D), "looked up"),
    w=((D, D), M),
    mid=((D, D), M),
    head=((D, V), "head"),
)
def early_exits(p, t):
    x = jnp.tanh(p["embed"][t] @ p["w"])
    first = x @ p["head"]
    sure = jax.nn.softmax(first).max(-1, keepdims=True)
    x = sure * x + (1 - sure) * jnp.tanh(x @ p["mid"])
    return cross_entropy(first, t) + cross_entropy(x @ p["head"], t)


@program(ROWS, w=((3, D, D), "1 | 2"), out=((D, 1), "head"))
def layers_by_switch(p, x):
    f = [lambda x, i=i: jnp.tanh(x @ p["w"][i]) for i in range(3)]
    x = lax.fori_loop(0, 5, lambda i, x: lax.switch(i % 3, f, x), x)
    return sq(x @ p["out"])


@program(ROWS, LABEL, a=((D, D), M), b=((D, D), M), out=((D, 1), "head"))
def a_branch_by_data(p, x, i):
    return sq(
        lax.cond(i[0] > 0, lambda: jnp.tanh(x @ p["a"]), lambda: jnp.tanh(x @ p["b"]))
        @ p["out"]
    )


@program(ROWS, LABEL, a=((D, D), M), b=((D, D), M), out=((D, 1), "head"))
def weights_mixed_by_data(p, x, i):
    c = jax.nn.sigmoid(i[0] * 1.0)
    return sq(jnp.tanh(x @ (c * p["a"] + (1 - c) * p["b"])) @ p["out"])


@program(
    TOKENS,
    ROWS,
    table=((V, D), "looked up"),
    w=((D, D), M),
    q=((D, D), M),
    keys=((V, D), "1 | 0"),
    values=((V, D), "looked up"),
    out=((D, 1), "head"),
)
def product_key_memory(p, t, x):
    h = jnp.tanh(p["table"][t[:, 0]] @ p["w"])
    s, i = lax.top_k((h @ p["q"]) @ p["keys"].T, 3)
    return sq(
        jnp.tanh(h + jnp.einsum("bk,bkd->bd", jax.nn.softmax(s), p["values"][i]))
        @ p["out"]
    )


@program(
    ROWS, ROWS, w=((D, D), M), v=((D, D), M), bil=((D, D), M), out=((D, 1), "head")
)
def a_bilinear_layer(p, x, y):
    a, b = jnp.tanh(x @ p["w"]), jnp.tanh(y @ p["v"])
    s = jnp.einsum("bi,ij,bj->b", a, p["bil"], b)
    return sq((s[:, None] * a) @ p["out"])


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


@program(
    X,
    up=((D, 2 * D), M),
    down=((2 * D, D), M),
    a1=((D, 2), M),
    b1=((2, D), M),
    mod=((D, D), M),
    out=((D, 1), "head"),
)
def mixture_of_depths(p, x):
    s, i = lax.top_k(jax.nn.sigmoid((x @ p["mod"])[..., 0]), 3)
    y = jnp.take_along_axis(x, i[..., None], 1)
    y = y + jax.nn.relu(y @ p["up"]) @ p["down"] + jax.nn.relu(y @ p["a1"]) @ p["b1"]
    x = x.at[jnp.arange(B)[:, None], i].add(s[..., None] * y)
    return sq(x @ p["out"])


@program(
    X,
    w=((D, 4), M),
    mean=((D, 3), M),
    out=((D, 1), "head"),
    sites="its queries, keys and values",
)
def pooled_by_learned_weights(p, x):
    a = jax.nn.softmax(x @ p["w"], 1)
    return sq(jnp.tanh(jnp.einsum("bth,btd->bhd", a, x) @ p["mean"]) @ p["out"][:3])


@program(
    X, kv=((D, 2 * D), "0 | 1 / 2 of 1"), q=((D, D), M), o=((D, D), M), **OUT, sites=1
)
def keys_and_values_pooled(p, x):
    k, v = jnp.split(x @ p["kv"], 2, -1)
    k, v = (a.reshape(B, 3, 2, D).mean(2) for a in (k, v))
    q, k, v = heads(x @ p["q"]), heads(k), heads(v)
    return done(p, x, jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


@program(X, **A4, **OUT, sites=1)
def rolled_keys_of_shifted_windows(p, x):
    q, k, v, _ = mha(p, jnp.roll(x, 1, 1))
    q, k, v = (jnp.roll(a, 1, 1).reshape(B * 3, 2, H, S) for a in (q, k, v))
    o = jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v
    ).reshape(B, T, D)
    return sq((x + o @ p["o"]) @ p["out"])


L4 = dict.fromkeys("qkvo", ((3, D, D), "1 | 2"))


@program(X, **L4, **OUT, sites=1)
def scanned_attention_under_remat_and_vmap(p, x):
    def layer(x, w):
        f = jax.vmap(
            lambda x: attend(*(heads(x[None] @ w[n]) for n in "qkv"))[0] @ w["o"]
        )
        return x + f(x), None

    w = {n: p[n] for n in "qkvo"}
    x, _ = lax.scan(
        jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable), x, w
    )
    return sq(x @ p["out"])


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


@program(X, LABEL, **A4, **OUT, sites=1)
def attention_in_a_branch(p, x, i):
    f = lambda x: x + attend(*(heads(x @ p[n]) for n in "qkv")) @ p["o"]
    return sq(lax.cond(i[0] > 0, f, lambda x: x, x) @ p["out"])


@program(
    X, X, w=((2 * D, D), M), q=((D, D), M), k=((D, D), M), v=((D, D), M), **OUT, sites=1
)
def a_recurrent_decoder_with_attention(p, x, y):
    k, v = heads(y @ p["k"]), heads(y @ p["v"])

    def step(h, x):
        q = heads(h @ p["q"])
        a = jax.nn.softmax(jnp.einsum("bhd,bkhd->bhk", q, k))
        c = jnp.einsum("bhk,bkhd->bhd", a, v).reshape(B, D)
        return jnp.tanh(jnp.concatenate([c, x], -1) @ p["w"]), None

    h, _ = lax.scan(step, jnp.ones((B, D)), x.swapaxes(0, 1))
    return sq(h @ p["out"])


@program(X, x=((D, S), M), h=((S, S), M), q=((S, S), M), k=((S, S), M), **OUT, sites=1)
def attention_over_the_states_of_a_scan(p, x):
    def step(h, x):
        h = jnp.tanh(x @ p["x"] + h @ p["h"])
        return h, (h @ p["q"], h @ p["k"], h)

    _, (q, k, v) = lax.scan(step, jnp.zeros((B, S)), x.swapaxes(0, 1))
    a = jax.nn.softmax(jnp.einsum("qbd,kbd->bqk", q, k))
    return sq(jnp.tanh(jnp.einsum("bqk,kbd->bqd", a, v)) @ p["out"][:S])


@program(
    X,
    w=((D, D), "0 | 1 / 2 of 1"),
    spatial=((T, T), "1 | 0"),
    b=((T, 1), "added"),
    out=((D // 2, 1), "head"),
)
def gmlp(p, x):
    u, v = jnp.split(jax.nn.gelu(x @ p["w"]), 2, -1)
    return sq(
        (u * (jnp.einsum("st,btd->bsd", p["spatial"], norm(v)) + p["b"])) @ p["out"]
    )


@program(X, tok=((T, 5), M), tok2=((5, T), M), w=((D, D), M), out=((D, 1), "head"))
def mlp_mixer(p, x):
    x = x + (jax.nn.gelu(x.swapaxes(1, 2) @ p["tok"]) @ p["tok2"]).swapaxes(1, 2)
    return sq(jnp.tanh(x @ p["w"]) @ p["out"])


@program(
    X,
    re=((4, D, D), "1 | 2"),
    im=((4, D, D), "1 | 2"),
    w=((D, D), M),
    out=((D, 1), "head"),
)
def fourier_neural_operator(p, x):
    f = jnp.fft.rfft(x, axis=1)
    f = jnp.einsum("bxi,xio->bxo", f, p["re"] + 1j * p["im"])
    y = jnp.fft.irfft(f, n=T, axis=1)
    return sq(jnp.tanh(y + x @ p["w"]) @ p["out"])


@program(ROWS, spline=((D, 5, D), "0, 1 | 2"), base=((D, D), M), out=((D, 1), "head"))
def kan(p, x):
    basis = jnp.exp(-((x[..., None] - jnp.linspace(-1, 1, 5)) ** 2))
    return sq(
        jnp.tanh(
            jnp.einsum("bik,iko->bo", basis, p["spline"]) + jax.nn.silu(x) @ p["base"]
        )
        @ p["out"]
    )


@program(
    ROWS, ROWS, g1=((D, D), M), g2=((D, D), M), d1=((D, D), M), d2=((D, 1), "head")
)
def a_generator_and_its_critic(p, x, z):
    fake = jnp.tanh(z @ p["g1"]) @ p["g2"]
    critic = lambda x: jnp.tanh(x @ p["d1"]) @ p["d2"]
    return critic(x).mean() - critic(fake).mean()


@program(ROWS, w=((D, D), M), value=((D, 1), "head"), advantage=((D, 4), "head"))
def dueling_dqn(p, x):
    h = jnp.tanh(x @ p["w"])
    a = h @ p["advantage"]
    q = h @ p["value"] + a - a.mean(-1, keepdims=True)
    target = lax.stop_gradient(jnp.take_along_axis(q, q.argmax(-1)[:, None], 1))
    return sq(q[:, :1] - target)


@program(
    TOKENS,
    LABEL,
    embed=((V, D), "looked up"),
    w=((D, D), M),
    context=((V, D), "looked up"),
)
def negative_sampling(p, t, i):
    h = jnp.tanh(p["embed"][t] @ p["w"])
    return jnp.mean(jax.nn.softplus(jnp.einsum("btd,kd->btk", h, p["context"][i])))


@program(
    TOKENS,
    embed=((V, D), "looked up"),
    w=((D, D), M),
    short=((D, 5), "head"),
    down=((D, 3), M),
    tail=((3, V - 4), "head"),
)
def adaptive_softmax(p, t):
    h = jnp.tanh(p["embed"][t] @ p["w"])
    first, second = h @ p["short"], (h @ p["down"]) @ p["tail"]
    a, b = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
    rest = (
        jnp.take_along_axis(b, jnp.maximum(t - 4, 0)[..., None], -1)[..., 0] + a[..., 4]
    )
    return -jnp.where(
        t < 4, jnp.take_along_axis(a, jnp.minimum(t, 4)[..., None], -1)[..., 0], rest
    ).mean()


@program(X, first=((D, 3 * D), M), w=((D, D), M), out=((D, 1), "head"))
def maxout(p, x):
    h = (x @ p["first"]).reshape(B, T, D, 3).max(-1)
    return sq(jnp.tanh(h @ p["w"]) @ p["out"])


@program(ROWS, ROWS, w=((2 * D, D), M), out=((D, D), "head"))
def self_conditioning(p, x, noise):
    net = lambda x, c: jnp.tanh(jnp.concatenate([x, c], -1) @ p["w"]) @ p["out"]
    first = lax.stop_gradient(net(x + noise, jnp.zeros_like(x)))
    return sq(net(x + noise, first) - noise)


@program(X, w=((D, 3 * D), "0 | 1 / 3 of 1"), o=((D, D), M), out=((D, 1), "head"))
def parts_by_index(p, x):
    h = (x @ p["w"]).reshape(B, T, 3, D)
    y = jax.nn.sigmoid(h[..., 0, :]) * jnp.cumsum(h[..., 1, :], 1) + jnp.sort(
        h[..., 2, :], 1
    )
    return sq((x + y @ p["o"]) @ p["out"])


@program(
    X,
    LABEL,
    null=((D,), ""),
    w=((D, D), M),
    mod=((D, 2 * D), "0 | 1 / 2 of 1"),
    label=((V, D), "looked up"),
    out=((D, 1), "head"),
)
def classifier_free_guidance(p, x, i):
    c = jnp.where((i > 3)[:, None], p["null"], p["label"][i])
    s, t = jnp.split(jax.nn.silu(c) @ p["mod"], 2, -1)
    return sq(jnp.tanh((norm(x) * (1 + s[:, None]) + t[:, None]) @ p["w"]) @ p["out"])


@program(
    ROWS, KEY, w=((D, D), M), mid=((D, D), M), gate=((D, D), M), out=((D, 1), "head")
)
def layers_dropped_by_chance(p, x, key):
    keep = jax.random.bernoulli(key)
    w = jnp.where(keep, p["w"], p["mid"])
    return sq((jnp.tanh(x @ w) * jax.nn.sigmoid(x @ p["gate"])) @ p["out"])


@program(ROWS, w=((D, D), M), scale=((1, D), "multiplied"), out=((D, 1), "head"))
def quantized_weights_with_learned_steps(p, x):
    y = p["w"] / p["scale"]
    w = (y + lax.stop_gradient(jnp.round(jnp.clip(y, -8, 7)) - y)) * p["scale"]
    return sq(jnp.tanh(x @ w) @ p["out"])


@program(ROWS, w=((D, D), M), out=((D, 1), "head"))
def skew_symmetric_weights(p, x):
    return sq(jnp.tanh(x @ (p["w"] - p["w"].T)) @ p["out"])


@program(X, w=((D, D), M), gate=((D, D), M), **A4, **OUT, sites=1)
def gated_attention_output(p, x):
    x = jnp.tanh(x @ p["w"])
    o = attend(*(heads(x @ p[n]) for n in "qkv")) * jax.nn.sigmoid(x @ p["gate"])
    return sq((x + o @ p["o"]) @ p["out"])


@program(X, **A4, **OUT, sites=1)
def one_query_for_each_example(p, x):
    q, k, v = heads(x[:, 0] @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
    a = jax.nn.softmax(jnp.einsum("bhd,bkhd->bhk", q, k))
    return sq(
        jnp.tanh(jnp.einsum("bhk,bkhd->bhd", a, v).reshape(B, D) @ p["o"]) @ p["out"]
    )


@program(X, w=((D, D), M), out=((D, 1), "head"), g=((D,), "multiplied"))
def a_scale_by_einsum_after_a_bend(p, x):
    return sq(jnp.einsum("btd,d->btd", jax.nn.softplus(x @ p["w"]), p["g"]) @ p["out"])


@program(X, k=((D, D), M), q=((D, D), M), v=((D, D), M), o=((D, D), M), **OUT, sites=1)
def keys_average_pooled(p, x):
    q, k, v = (x @ p[n] for n in "qkv")
    k, v = (a.reshape(B, 3, 2, D).mean(2) for a in (k, v))
    q, k, v = heads(q), heads(k), heads(v)
    return done(p, x, jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


@program(
    X,
    **{"q": ((3, D), "1 | 0"), "a": ((3, 2), "1 | 0"), "b": ((2, D), "1 | 0")},
    **{"k": ((D, D), M), "v": ((D, D), M), "out": ((D, 1), "head")},
    sites="its queries, keys and values",
)
def learned_queries_with_an_adapter(p, x):
    """Which of the two a clip would have to scale is not said."""
    logits = jnp.einsum("qd,bkd->bqk", p["a"] @ p["b"] + p["q"], x @ p["k"])
    return sq(jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(logits), x @ p["v"]) @ p["out"])
