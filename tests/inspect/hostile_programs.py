"""Small functions in which names, sizes and first appearances mislead, with what is right for each parameter.

A matrix is written by its axes, "0 | 1" (summed | given), with its parts behind a slash: "0 | 1 / 3 of 1" are three of
equal size along axis 1. Behind a semicolon are the matrices of each head. Everything else is a word of the reason why
Adam gets the parameter; "refused" is an error. A parameter with a shape alone may be anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

B, T, D, H, S, V = 2, 6, 8, 2, 4, 12
TOKENS = jax.ShapeDtypeStruct((B, T), "int32")
X = jax.ShapeDtypeStruct((B, T, D), "float32")
ROWS = jax.ShapeDtypeStruct((B, D), "float32")
KEY = jax.eval_shape(lambda: jax.random.key(0))


# How many attentions can be clipped; words of the reason why the only one, or each one, can't; None for either.
Sites = int | str | tuple[str, ...] | None


class HostileProgram(NamedTuple):
    fun: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    expected: dict[str, str]
    sites: Sites
    logits: Callable[..., Any] | None = (
        None  # [batch, heads of all attentions, queries, keys]
    )


PROGRAMS: list[HostileProgram] = []
ANYTHING = "anything"


def program(
    *args: Any,
    sites: Sites = 0,
    to: list[HostileProgram] = PROGRAMS,
    logits: bool = False,
    **parameters: Any,
):
    """Adds a function to a list; each parameter is its shape and what is right for it.

    With `logits` the function returns its loss and the logits that a clip scales.
    """

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        params: dict[str, Any] = {}
        expected = {}
        for path, value in parameters.items():
            shape, expected[path] = (
                value if value and isinstance(value[0], tuple) else (value, ANYTHING)
            )
            *modules, name = path.split("/")
            module = params
            for each in modules:
                module = module.setdefault(each, {})
            module[name] = jax.ShapeDtypeStruct(shape, "float32")
        loss = functools.wraps(fun)(lambda *given: fun(*given)[0]) if logits else fun
        reported = (lambda *given: fun(*given)[1]) if logits else None
        to.append(HostileProgram(loss, params, args, expected, sites, reported))
        return fun

    return register


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), labels[..., None], -1
    ).mean()


def norm(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def heads(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], H, S)


def attend(q: Any, k: Any, v: Any) -> Any:
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -1e9)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), v)
    return out.reshape(*out.shape[:2], -1)


# Heads and lookups.


@program(
    TOKENS,
    embed=((V, D), "looked up"),
    up=((D, V), "0 | 1"),
    down=((V, D), "0 | 1"),
    head=((D, V), "head"),
)
def a_width_that_is_the_vocabulary(p, t):
    x = p["embed"][t]
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return cross_entropy(x @ p["head"], t)


@program(TOKENS, embed=((V, D), "looked up"), w=((D, D), "0 | 1"))
def tied_embedding(p, t):
    x = jnp.tanh(p["embed"][t] @ p["w"])
    return cross_entropy(x @ p["embed"].T, t)


@program(
    TOKENS, embed=((V, D), "looked up"), w=((D, D), "0 | 1"), head=((D, V), "head")
)
def a_lookup_by_one_hot(p, t):
    x = jax.nn.one_hot(t, V) @ p["embed"]
    return cross_entropy(jnp.tanh(x @ p["w"]) @ p["head"], t)


@program(
    TOKENS, embed=((V, 4), "looked up"), factor=((4, D), "0 | 1"), head=((D, V), "head")
)
def a_factored_embedding(p, t):
    return cross_entropy(jnp.tanh((p["embed"] @ p["factor"])[t]) @ p["head"], t)


@program(
    TOKENS, embed=((V, D), "looked up"), w=((D, D), "0 | 1"), head=((D, V), "head")
)
def a_loss_in_chunks(p, t):
    x = jnp.tanh(p["embed"][t] @ p["w"])

    def chunk(total, part):
        x, t = part
        return total + cross_entropy(x @ p["head"], t), None

    chunks = x.reshape(3, B, 2, D), t.reshape(3, B, 2)
    return lax.scan(chunk, 0.0, chunks)[0]


@program(
    TOKENS, embed=((V, D), "looked up"), policy=((D, V), "head"), value=((V, 1), "head")
)
def a_value_net_that_reads_the_logits(p, t):
    logits = p["embed"][t] @ p["policy"]
    return cross_entropy(logits, t) + jnp.mean((jnp.tanh(logits) @ p["value"]) ** 2)


@program(ROWS, torso=((D, D), "0 | 1"), actor=((D, 4), "head"), critic=((D, 1), "head"))
def an_actor_and_a_critic(p, x):
    h = jnp.tanh(x @ p["torso"])
    action = jnp.zeros(B, int)
    return cross_entropy(h @ p["actor"], action) + jnp.mean((h @ p["critic"] - 1) ** 2)


@program(ROWS, KEY, encoder=((D, D), "0 | 1"), mean=((D, 4), "0 | 1"), deviation=((D, 4), "0 | 1"),
         decoder=((4, D), "0 | 1"), out=((D, D), "head"))  # fmt: skip
def a_variational_autoencoder(p, x, key):
    h = jnp.tanh(x @ p["encoder"])
    mean, deviation = h @ p["mean"], h @ p["deviation"]
    z = mean + jnp.exp(deviation) * jax.random.normal(key, mean.shape)
    divergence = jnp.mean(mean**2 + jnp.exp(2 * deviation) - 2 * deviation)
    return jnp.mean((jnp.tanh(z @ p["decoder"]) @ p["out"] - x) ** 2) + divergence


@program(ROWS, w=((D, D), "0 | 1"), out=((D, 1), "head"))
def a_penalty_is_no_use(p, x):
    penalty = jnp.vdot(p["out"], p["out"]) + jnp.sum(
        (p["w"].T @ p["w"] - jnp.eye(D)) ** 2
    )
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["out"]) ** 2) + penalty


@program(ROWS, w=((D, D), "0 | 1"), out=((D, 1), "head"))
def energy_and_forces(p, x):
    def energy(x):
        return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"])

    e, f = jax.value_and_grad(energy)(x)
    return jnp.mean((f + x) ** 2) + (e - 1) ** 2


@program(
    ROWS, w=((D, D), "0 | 1"), out=((D, 4), "head"), unused_head=((D, 3), "never used")
)
def dead_code(p, x):
    h = jnp.tanh(x @ p["w"])
    logits = h @ p["out"]
    _ = jnp.tanh(logits).sum()
    return cross_entropy(logits, jnp.zeros(B, int))


@program(ROWS, ROWS, left=((D, 4), "0 | 1"), right=((D, 4), "0 | 1"))
def two_towers(p, x, y):
    a, b = norm(jnp.tanh(x) @ p["left"]), norm(jnp.tanh(y) @ p["right"])
    return cross_entropy(a @ b.T, jnp.arange(B))


@program(ROWS, **dict.fromkeys(("subject", "relation", "object"), ((D, 4), "0 | 1")))
def three_towers(p, x):
    a, b, c = (jnp.tanh(x) @ p[name] for name in ("subject", "relation", "object"))
    return jnp.mean((jnp.sum(a * b * c, -1) - 1) ** 2)


@program(X, w=((D, D), "0 | 1"), query=((D, D), "0 | 1"), key=((D, D), "0 | 1"))
def a_pointer_network(p, x):
    x = jnp.tanh(x @ p["w"])
    logits = jnp.einsum("bqd,bkd->bqk", x @ p["query"], x @ p["key"])
    return cross_entropy(logits, jnp.zeros((B, T), int))


@program(TOKENS, embed=((V, D), "looked up"), pos=((T, D), "added"), cls=((1, 1, D), "joined"), w=((D, D), "0 | 1"),
         out=((D, 3), "head"))  # fmt: skip
def positions_and_a_class_token(p, t):
    x = p["embed"][t] + p["pos"]
    x = jnp.concatenate([jnp.broadcast_to(p["cls"], (B, 1, D)), x], 1)
    return cross_entropy(jnp.tanh(x @ p["w"])[:, 0] @ p["out"], t[:, 0])


@program(X, w=((D, D), "last product"))
def no_loss(p, x):
    return jnp.tanh(x) @ p["w"]


# Attention.

ATTENTION = dict.fromkeys(("q", "k", "v", "o"), ((D, D), "0 | 1"))


@program(X, sites=1, **ATTENTION, out=((D, 1), "head"))
def plain_attention(p, x):
    x = x + attend(heads(x @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])) @ p["o"]
    return jnp.mean((x @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    qkv=((D, 3 * D), "0 | 1 / 3 of 1"),
    b=((3 * D,), "added"),
    o=((D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def fused_attention(p, x):
    q, k, v = jnp.split(x @ p["qkv"] + p["b"], 3, -1)
    x = x + attend(heads(q), heads(k), heads(v)) @ p["o"]
    return jnp.mean((x @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    qkv=((D, 3, H, S), "0 | 2, 3; 0 | 3"),
    o=((H, S, D), "0, 1 | 2"),
    out=((D, 1), "head"),
)
def fused_attention_with_an_axis_of_three(p, x):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dzhs->btzhs", x, p["qkv"]), 2, 0)
    o = attend(q, k, v).reshape(B, T, H, S)
    return jnp.mean(((x + jnp.einsum("bths,hsd->btd", o, p["o"])) @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    qkv=((D, 3 * D), "0 | 1 / 3 of 1, 2 times; 0 | 1 / 6 of 1"),
    o=((D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def fused_attention_head_by_head(p, x):
    q, k, v = jnp.split((x @ p["qkv"]).reshape(B, T, H, 3 * S), 3, -1)
    return jnp.mean(((x + attend(q, k, v) @ p["o"]) @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    qkv=((D, D + 2 * S), "0 | 1 / 8, 4, 4 of 1"),
    o=((D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def multi_query_attention_in_one_kernel(p, x):
    q, k, v = jnp.split(x @ p["qkv"], (D, D + S), -1)
    k, v = (jnp.broadcast_to(a[:, :, None], (B, T, H, S)) for a in (k, v))
    return jnp.mean(((x + attend(heads(q), k, v) @ p["o"]) @ p["out"]) ** 2)


def rotated(x, at):
    c, s = jnp.cos(at)[:, None, None], jnp.sin(at)[:, None, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


@program(X, sites=1, **ATTENTION, out=((D, 1), "head"))
def rotary_attention(p, x):
    at = jnp.arange(T, dtype="float32")
    q, k = (rotated(heads(x @ p[n]), at) for n in "qk")
    return jnp.mean(((x + attend(q, k, heads(x @ p["v"])) @ p["o"]) @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    q=((D, D), "0 | 1"),
    k=((D, S), "0 | 1"),
    v=((D, S), "0 | 1"),
    o=((D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def shared_keys(p, x):
    q, k, v = heads(x @ p["q"]), x @ p["k"], x @ p["v"]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k))
    o = jnp.einsum("bhqk,bkd->bqhd", weights, v).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    q=((D, 2 * D), "0 | 1"),
    k=((D, D), "0 | 1"),
    v=((D, D), "0 | 1"),
    o=((2 * D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def grouped_keys(p, x):
    q, k, v = (x @ p["q"]).reshape(B, T, H, 2, S), heads(x @ p["k"]), heads(x @ p["v"])
    weights = jax.nn.softmax(jnp.einsum("bqhgd,bkhd->bhgqk", q, k))
    o = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(B, T, -1)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    q=((D, 2 * D), "0 | 1"),
    k=((D, D), "0 | 1"),
    v=((D, D), "0 | 1"),
    o=((2 * D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def repeated_keys(p, x):
    q = (x @ p["q"]).reshape(B, T, 2 * H, S)
    k, v = (jnp.repeat(heads(x @ p[n]), 2, axis=2) for n in "kv")
    return jnp.mean(((x + attend(q, k, v) @ p["o"]) @ p["out"]) ** 2)


@program(X, sites="integer_pow", **ATTENTION, out=((D, 1), "head"))
def normalized_queries(p, x):
    q, k = norm(heads(x @ p["q"])), norm(heads(x @ p["k"]))
    return jnp.mean(((x + attend(q, k, heads(x @ p["v"])) @ p["o"]) @ p["out"]) ** 2)


@program(X, sites="tanh", **ATTENTION, out=((D, 1), "head"))
def capped_logits(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    logits = 50 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 50)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites="(add)", bias=((H, T, T), "added"), **ATTENTION, out=((D, 1), "head"))
def a_learned_bias(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) + p["bias"]
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites=0, **ATTENTION, out=((D, 1), "head"))
def linear_attention(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.tril(jnp.ones((T, T)))
    o = jnp.einsum("bhqk,bkhd->bqhd", logits, v).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites=1, **ATTENTION, out=((D, 1), "head"))
def softmax_by_hand(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    e = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2)
    o = jnp.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites=1, **ATTENTION, out=((D, 1), "head"))
def sigmoid_attention(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    weights = jax.nn.sigmoid(jnp.einsum("bqhd,bkhd->bhqk", q, k) - 2.0)
    o = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites=1, **ATTENTION, out=((D, 1), "head"))
def online_softmax(p, x):
    """Blocks of keys one after the other, with a running maximum."""
    q, k, v = (heads(x @ p[n]).transpose(0, 2, 1, 3) for n in "qkv")
    blocks = tuple(a.reshape(B, H, 3, 2, S).transpose(2, 0, 1, 3, 4) for a in (k, v))

    def block(carry, kv):
        m, total, out = carry
        k, v = kv
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 2
        new = jnp.maximum(m, logits.max(-1))
        e = jnp.exp(logits - new[..., None])
        scale = jnp.exp(m - new)
        out = out * scale[..., None] + jnp.einsum("bhqk,bhkd->bhqd", e, v)
        return (new, total * scale + e.sum(-1), out), None

    start = jnp.full((B, H, T), -jnp.inf), jnp.zeros((B, H, T)), jnp.zeros((B, H, T, S))
    (_, total, out), _ = lax.scan(block, start, blocks)
    o = (out / total[..., None]).transpose(0, 2, 1, 3).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites=1, **ATTENTION, out=((D, 1), "head"))
def queries_in_chunks(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    chunks = q.reshape(B, 3, 2, H, S).swapaxes(0, 1)
    o = lax.map(lambda q: attend(q, k[:, :2], v[:, :2]), chunks)
    o = o.swapaxes(0, 1).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites="would not scale its logits alone", **ATTENTION, out=((D, 1), "head"))
def queries_that_are_a_gate_too(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    o = attend(q, k, v) * jax.nn.sigmoid(q.reshape(B, T, D))
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(
    X,
    sites=1,
    **{
        "q": ((D, D), "0 | 1"),
        "k": ((D, D), "0 | 1"),
        "o": ((D, D), "0 | 1"),
        "out": ((D, 1), "head"),
    },
)
def keys_that_are_values_too(p, x):
    q, k = heads(x @ p["q"]), heads(x @ p["k"])
    return jnp.mean(((x + attend(q, k, k) @ p["o"]) @ p["out"]) ** 2)


@program(
    X, sites=1, qa=((D, 4), "0 | 1"), qb=((4, H, S + 2), "0 | 1, 2"), kva=((D, 4 + 2), "0 | 1 / 4, 2 of 1"),
    kvb=((4, H, 2 * S), "0 | 1, 2 / 2 of 2"), scale=((4,), "multiplied"), o=((H, S, D), "0, 1 | 2"),
    out=((D, 1), "head"),
)  # fmt: skip
def latent_attention(p, x):
    at = jnp.arange(T, dtype="float32")
    q = jnp.einsum("btr,rhs->bths", norm(x @ p["qa"]) * p["scale"], p["qb"])
    latent, shared = jnp.split(x @ p["kva"], (4,), -1)
    k, v = jnp.split(jnp.einsum("btr,rhs->bths", norm(latent), p["kvb"]), 2, -1)
    q = jnp.concatenate([q[..., :S], rotated(q[..., S:], at)], -1)
    shared = jnp.broadcast_to(rotated(shared[:, :, None], at), (B, T, H, 2))
    weights = jax.nn.softmax(
        jnp.einsum("bqhd,bkhd->bhqk", q, jnp.concatenate([k, shared], -1))
    )
    o = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return jnp.mean(((x + jnp.einsum("bths,hsd->btd", o, p["o"])) @ p["out"]) ** 2)


@program(
    X, sites=1, latents=((3, D), "learned input"), **ATTENTION, out=((D, 1), "head")
)
def learned_queries(p, x):
    latents = jnp.broadcast_to(p["latents"], (B, 3, D))
    q, k, v = heads(latents @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    o = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, 3, D)
    return jnp.mean((jnp.tanh(o @ p["o"]) @ p["out"]) ** 2)


# Stacks, experts, combinations.


@program(
    X, up=((3, D, 2 * D), "1 | 2"), down=((3, 2 * D, D), "1 | 2"), out=((D, 1), "head")
)
def scanned_layers(p, x):
    def layer(x, w):
        return x + jax.nn.relu(x @ w[0]) @ w[1], None

    x, _ = lax.scan(jax.checkpoint(layer), x, (p["up"], p["down"]))
    return jnp.mean((x @ p["out"]) ** 2)


@program(
    X, up=((D, 3, 2 * D), "0 | 2"), down=((2 * D, 3, D), "0 | 2"), out=((D, 1), "head")
)
def layers_on_axis_one_by_index(p, x):
    for i in range(3):
        x = x + jax.nn.relu(x @ p["up"][:, i]) @ p["down"][:, i]
    return jnp.mean((x @ p["out"]) ** 2)


@program(X, w=((3, D, D), "1 | 2"), out=((D, 1), "head"))
def layers_by_a_counter(p, x):
    x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["w"][i]), x)
    return jnp.mean((x @ p["out"]) ** 2)


@program(
    X,
    gate=((D, 3), "0 | 1"),
    up=((3, D, 5), "1 | 2"),
    down=((3, 5, D), "1 | 2"),
    out=((D, 1), "head"),
)
def dense_experts(p, x):
    gate = jax.nn.softmax(x @ p["gate"])
    h = jax.nn.relu(jnp.einsum("btd,edf->betf", x, p["up"]))
    y = jnp.einsum("betf,efd,bte->btd", h, p["down"], gate)
    return jnp.mean(((x + y) @ p["out"]) ** 2)


@program(
    X,
    gate=((D, 3), "0 | 1"),
    up=((3, D, 5), "1 | 2"),
    down=((3, 5, D), "1 | 2"),
    out=((D, 1), "head"),
)
def sparse_experts(p, x):
    y = x.reshape(-1, D)
    probability, expert = lax.top_k(jax.nn.softmax(y @ p["gate"]), 1)
    order = jnp.argsort(expert[:, 0])
    sizes = jnp.bincount(expert[:, 0], length=3)
    h = lax.ragged_dot(y[order], p["up"], sizes)
    z = lax.ragged_dot(jax.nn.relu(h), p["down"], sizes)
    y = y + (z * probability[order])[jnp.argsort(order)]
    return jnp.mean((y @ p["out"]) ** 2)


@program(
    X, jax.ShapeDtypeStruct((B,), "int32"), w=((3, D, D), "1 | 2"), out=((D, 1), "head")
)
def an_adapter_by_sample(p, x, which):
    y = jnp.einsum("btd,bdf->btf", x, p["w"][which])
    return jnp.mean((jnp.tanh(y) @ p["out"]) ** 2)


@program(ROWS, w=((4, D, D), "1 | 2"), out=((4, D, 1), "head"))
def an_ensemble(p, x):
    h = jax.vmap(lambda w: jnp.tanh(x @ w))(p["w"])
    y = jax.vmap(lambda h, w: h @ w)(h, p["out"])
    return jnp.mean((y - 1) ** 2)


@program(
    ROWS,
    w=((D, D), "0 | 1"),
    a=((D, 2), "0 | 1"),
    b=((2, D), "0 | 1"),
    out=((D, 1), "head"),
)
def merged_adapters(p, x):
    return jnp.mean((jnp.tanh(x @ (p["w"] + p["a"] @ p["b"])) @ p["out"]) ** 2)


@program(
    ROWS,
    w=((D, D), "0 | 1"),
    a=((D, 2), "0 | 1"),
    b=((2, D), "0 | 1"),
    out=((D, 1), "head"),
)
def adapters_beside(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"] + (x @ p["a"]) @ p["b"]) @ p["out"]) ** 2)


@program(ROWS, KEY, mu=((D, D), "0 | 1"), sigma=((D, D), "added"), out=((D, 1), "head"))
def noisy_weights(p, x, key):
    w = p["mu"] + p["sigma"] * jax.random.normal(key, (D, D))
    return jnp.mean((jnp.tanh(x @ w) @ p["out"]) ** 2)


@program(
    ROWS,
    jax.ShapeDtypeStruct((D, D), "bool"),
    w=((D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def masked_weights(p, x, mask):
    return jnp.mean((jnp.tanh(x @ (p["w"] * mask)) @ p["out"]) ** 2)


@program(ROWS, KEY, w=((D, D), "0 | 1"), out=((D, 1), "head"))
def dropped_weights(p, x, key):
    w = jnp.where(jax.random.bernoulli(key, 0.9, (D, D)), p["w"], 0) / 0.9
    return jnp.mean((jnp.tanh(x @ w) @ p["out"]) ** 2)


@program(ROWS, v=((D, D), "0 | 1"), g=((D,), "multiplied"), out=((D, 1), "head"))
def weight_norm(p, x):
    w = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)
    return jnp.mean((jnp.tanh(x @ w) @ p["out"]) ** 2)


@program(
    X,
    x=((D, 4 * S), "0 | 1 / 4 of 1"),
    h=((S, 4 * S), "0 | 1 / 4 of 1"),
    b=((4 * S,), "added"),
    out=((S, 1), "head"),
)
def a_recurrent_cell(p, x):
    def step(carry, x):
        c, h = carry
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    _, h = lax.scan(step, (jnp.zeros((B, S)), jnp.zeros((B, S))), x.swapaxes(0, 1))
    return jnp.mean((h @ p["out"]) ** 2)


@program(
    X,
    i=((D, S), "0 | 1"),
    f=((D, S), "0 | 1"),
    g=((D, S), "0 | 1"),
    out=((S, 1), "head"),
)
def weights_joined_before_their_product(p, x):
    i, f, g = jnp.split(x @ jnp.concatenate([p["i"], p["f"], p["g"]], -1), 3, -1)
    return jnp.mean(
        ((jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f)) @ p["out"]) ** 2
    )


@program(X, a=((D, D), "0 | 1"), b=((D, D), "0 | 1"), out=((D, 1), "head"))
def weights_stacked_into_a_scan(p, x):
    x, _ = lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([p["a"], p["b"]])
    )
    return jnp.mean((x @ p["out"]) ** 2)


@program(
    X, w=((D, 2 * D), "0 | 1 / 2 of 1"), down=((D, D), "0 | 1"), out=((D, 1), "head")
)
def a_gated_layer_in_one_kernel(p, x):
    gate, up = jnp.split(x @ p["w"], 2, -1)
    return jnp.mean(((x + (jax.nn.silu(gate) * up) @ p["down"]) @ p["out"]) ** 2)


@program(
    ROWS,
    X,
    w=((D, 6 * D), "0 | 1 / 6 of 1"),
    mlp=((D, D), "0 | 1"),
    o=((D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def adaptive_norms(p, c, x):
    a, b, g, d, e, h = jnp.split(jax.nn.silu(c)[:, None] @ p["w"], 6, -1)
    x = x + g * jnp.tanh((norm(x) * (1 + a) + b) @ p["o"])
    x = x + h * jnp.tanh((norm(x) * (1 + d) + e) @ p["mlp"])
    return jnp.mean((x @ p["out"]) ** 2)


@program(X, w=((D, D), "0 | 1"), gain=((D,), "multiplied"), out=((D, 1), "head"))
def a_delay_of_seven_iterations(p, x):
    def step(line, row):
        return (row, *line[:-1]), jnp.tanh((line[-1] * p["gain"]) @ p["w"])

    _, y = jax.lax.scan(step, (jnp.zeros((B, D)),) * 7, x.swapaxes(0, 1))
    return jnp.mean((y @ p["out"]) ** 2)


@program(X, sites=1, q=((D, H, S), "0 | 1, 2"), k=((D, H, S), "0 | 1, 2"), v=((D, H, S), "0 | 1, 2"),
         o=((H, S, D), "0, 1 | 2"), out=((D, 1), "head"))  # fmt: skip
def an_output_projection_by_vmap_and_sum(p, x):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, p[n]) for n in "qkv")
    o = attend(q, k, v).reshape(B, T, H, S)
    y = jax.vmap(lambda o, w: o @ w, in_axes=(2, 0))(o, p["o"]).sum(0)
    return jnp.mean((jnp.tanh(y) @ p["out"]) ** 2)


@program(X, sites=1, q=((D, H, S), "0 | 1, 2"), k=((D, H, S), "0 | 1, 2"), v=((D, H, S), "0 | 1, 2"),
         o=((H, S, D), "0, 1 | 2"), out=((D, 1), "head"))  # fmt: skip
def an_output_projection_by_a_loop(p, x):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, p[n]) for n in "qkv")
    o = attend(q, k, v).reshape(B, T, H, S)
    y = sum(o[:, :, h] @ p["o"][h] for h in range(H))
    return jnp.mean((jnp.tanh(y) @ p["out"]) ** 2)


@program(X, w=((D, D), "0 | 1"), shared=((D, D), "0 | 1"), out=((D, 1), "head"))
def a_weight_used_twice(p, x):
    x = jnp.tanh(x @ p["shared"])
    x = jnp.tanh(x @ p["w"])
    return jnp.mean((jnp.tanh(x @ p["shared"]) @ p["out"]) ** 2)


@program(X, w=((D, D), "0 | 1"), out=((D, 1), "head"))
def a_weight_and_its_transpose(p, x):
    return jnp.mean(((jnp.tanh(x @ p["w"]) @ p["w"].T) @ p["out"]) ** 2)


@program(X, w=((D, D), "1 | 0"), out=((1, D), "head"))
def weights_stored_the_other_way(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"].T) @ p["out"].T) ** 2)


@program(X, w=((2 * D, D), "0 | 1"), out=((D, 1), "head"))
def rows_of_the_input_and_of_the_state(p, x):
    """A recurrent cell's kernel, cut."""
    return jnp.mean(jnp.tanh(x @ p["w"][:D] + jnp.tanh(x) @ p["w"][D:]) @ p["out"])


@program(X, w=((D, H, S), "refused"), out=((D, 1), "head"))
def one_weight_as_two_matrices(p, x):
    y = jnp.tanh(jnp.einsum("btd,dhs->bths", x, p["w"]))
    z = jnp.tanh(jnp.einsum("bths,dhs->bthd", y, p["w"]).sum(2))
    z = jnp.einsum("btd,dhs->bts", z, p["w"][:, :1])
    return jnp.mean((z[..., :1] * (x @ p["out"])) ** 2)


# Convolutions.

IMAGE = jax.ShapeDtypeStruct((B, 8, 8, 3), "float32")


def conv(x, w, stride=1, groups=1):
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@program(IMAGE, first=((3, 3, 3, 8), "0, 1, 2 | 3"), depthwise=((3, 3, 1, 8), "depthwise"),
         grouped=((3, 3, 4, 8), "0, 1, 2 | 3 / 2 of 3"), out=((8, 4), "head"))  # fmt: skip
def convolutions(p, x):
    x = jax.nn.relu(conv(x, p["first"]))
    x = jax.nn.relu(conv(x, p["depthwise"], groups=8))
    x = jax.nn.relu(conv(x, p["grouped"], groups=2))
    return cross_entropy(x.mean((1, 2)) @ p["out"], jnp.zeros(B, int))


@program(
    jax.ShapeDtypeStruct((B, 8, 8, 1), "float32"),
    first=((3, 3, 1, 8), "0, 1 | 3"),
    out=((8, 4), "head"),
)
def a_first_convolution_of_one_channel(p, x):
    return cross_entropy(
        jax.nn.relu(conv(x, p["first"])).mean((1, 2)) @ p["out"], jnp.zeros(B, int)
    )


@program(
    IMAGE, patches=((4, 4, 3, D), "patches"), w=((D, D), "0 | 1"), out=((D, 4), "head")
)
def patches_by_convolution(p, x):
    x = jnp.tanh(conv(x, p["patches"], stride=4).reshape(B, 4, D) @ p["w"])
    return cross_entropy(x.mean(1) @ p["out"], jnp.zeros(B, int))


@program(IMAGE, patches=((48, D), "patches"), w=((D, D), "0 | 1"), out=((D, 4), "head"))
def patches_by_reshape(p, x):
    x = x.reshape(B, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(B, 4, 48)
    x = jnp.tanh((x @ p["patches"]) @ p["w"])
    return cross_entropy(x.mean(1) @ p["out"], jnp.zeros(B, int))


@program(
    IMAGE, first=((1, 1, 3, D), "2 | 3"), w=((D, D), "0 | 1"), out=((D, 4), "head")
)
def a_first_convolution_of_one_pixel(p, x):
    x = jnp.tanh(conv(x, p["first"]) @ p["w"])
    return cross_entropy(x.mean((1, 2)) @ p["out"], jnp.zeros(B, int))


@program(
    IMAGE,
    **{
        "conv/kernel": (
            (3, 5, 8),
            "conv_general_dilated is not followed: hostile_programs.py:",
        )
    },
)
def a_convolution_whose_second_operand_is_data(p, x):
    y = lax.conv_general_dilated(
        p["conv"]["kernel"],
        x[:, 0],
        (1,),
        [(2, 2)],
        dimension_numbers=("HNC", "OIH", "HNC"),
    )
    return jnp.mean(jnp.tanh(y) ** 2)


# Parts that are normalized, gated or moved together.

PARTS: dict[str, Any] = {
    "w": ((D, 3 * D), "0 | 1 / 3 of 1"),
    "out": ((D, 1), "an output head"),
}
HEADS: dict[str, Any] = PARTS | {"w": ((D, 3 * D), "0 | 1 / 3 of 1; 0 | 1 / 6 of 1")}
TWO: dict[str, Any] = PARTS | {"w": ((D, 2 * D), "0 | 1 / 2 of 1")}
ONE: dict[str, Any] = {
    "w": ((D, D), "0 | 1"),
    "o": ((D, D), "0 | 1"),
    "out": ((D, 1), "an output head"),
}


def end(p, y):
    return jnp.mean(jnp.tanh(y @ p["out"]) ** 2)


@program(X, sites="integer_pow", **HEADS)
def queries_and_keys_normalized_together(p, x):
    z = (x @ p["w"]).reshape(B, T, 3, H, S)
    qk = norm(z[:, :, :2])
    return end(p, attend(qk[:, :, 0], qk[:, :, 1], z[:, :, 2]))


@program(X, sites="integer_pow", **HEADS)
def queries_and_keys_concatenated_to_be_normalized(p, x):
    q, k, v = map(heads, jnp.split(x @ p["w"], 3, -1))
    q, k = jnp.split(norm(jnp.concatenate([q, k], 2)), 2, 2)
    return end(p, attend(q, k, v))


@program(X, sites=None, **HEADS)
def a_shift_by_padding(p, x):
    z = x @ p["w"]
    z = 0.5 * z + 0.5 * lax.pad(z, 0.0, ((0, 0, 0), (1, -1, 0), (0, 0, 0)))
    return end(p, attend(*map(heads, jnp.split(z, 3, -1))))


@program(
    X,
    q=((D, H, 2 * S), "0 | 1, 2 / 2 of 2"),
    o=((H, S, D), "0, 1 | 2"),
    out=((D, 1), "head"),
)
def a_norm_of_queries_beside_their_gates(p, x):
    """Qwen3.5: a head's queries are normalized, its gates are not."""
    q, gate = jnp.split(jnp.einsum("btd,dhs->bths", x, p["q"]), 2, -1)
    return end(p, jnp.einsum("bths,hso->bto", norm(q) * jax.nn.sigmoid(gate), p["o"]))


def gated(p, i, f, g):
    return end(p, jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f))


@program(X, **PARTS)
def gates_of_one_norm_each(p, x):
    return gated(p, *jnp.moveaxis(norm((x @ p["w"]).reshape(B, T, 3, D)), 2, 0))


@program(X, **PARTS)
def gates_of_one_layer_norm_each(p, x):
    z = (x @ p["w"]).reshape(B, T, 3, D)
    z = z - z.mean(-1, keepdims=True)
    return gated(
        p, *jnp.moveaxis(z / jnp.sqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-6), 2, 0)
    )


@program(X, w=((D, 3 * D), "0 | 1"), out=((D, 1), "an output head"))
def gates_of_one_norm_for_all(p, x):
    return gated(p, *jnp.split(norm(x @ p["w"]), 3, -1))


@program(X, w=((D, 2 * D), "0 | 1"), out=((D, 1), "an output head"))
def a_gate_cut_through_normalized_heads(p, x):
    a, b = jnp.split(norm((x @ p["w"]).reshape(B, T, H, 2 * S)), 2, -1)
    return end(p, (a * jax.nn.sigmoid(b)).reshape(B, T, D))


@program(X, **PARTS)
def one_part_pooled_over_its_features(p, x):
    q, k, v = jnp.moveaxis((x @ p["w"]).reshape(B, T, 3, H, S), 2, 0)
    return end(p, (jnp.tanh(k) * v * q.max(-1, keepdims=True)).reshape(B, T, D))


@program(
    X, w=((D, D), "0 | 1"), o=((D // 2, D), "0 | 1"), out=((D, 1), "an output head")
)
def running_sums_over_the_features(p, x):
    a, b = jnp.split(jnp.cumsum(x @ p["w"], -1), 2, -1)
    return end(p, jax.nn.relu((jnp.tanh(a) * b) @ p["o"]))


@program(X, **TWO)
def running_sums_over_one_part(p, x):
    a, b = jnp.split(x @ p["w"], 2, -1)
    first, second = jnp.split(jnp.cumsum(a, -1), 2, -1)
    return end(p, jnp.tanh(b) * jnp.tile(jnp.tanh(first) * second, 2))


@program(X, **TWO)
def running_sums_over_time(p, x):
    a, b = jnp.split(jnp.cumsum(x @ p["w"], 1), 2, -1)
    return end(p, jnp.tanh(a) * b)


@program(X, **TWO, g=TWO["w"])
def two_sides_gated_before_they_part(p, x):
    """AlphaFold's fused triangle multiplication."""
    left, right = jnp.split((x @ p["w"]) * jax.nn.sigmoid(x @ p["g"]), 2, -1)
    return end(p, jnp.einsum("bid,bjd->bijd", left, right).sum(1))


@program(X, jax.ShapeDtypeStruct((B, T), "int32"), w=((D, 2 * D), "0 | 1 / 2 of 1, 8 times"),
         table=((3, 2 * D), "looked up"), out=((D, 1), "an output head"))  # fmt: skip
def two_parts_of_a_sum_with_looked_up_biases(p, x, which):
    """GPT-OSS's experts, whose biases are looked up, with gates beside values."""
    z = x @ p["w"] + p["table"][which]
    return end(p, jax.nn.sigmoid(z[..., ::2]) * jnp.minimum(z[..., 1::2], 7.0))


@program(X, **TWO)
def a_part_gated_by_what_the_other_makes(p, x):
    a, b = jnp.split(x @ p["w"], 2, -1)
    z = (a * jax.nn.sigmoid(b.mean(1, keepdims=True))).reshape(B, T, 2, D // 2)
    return end(p, jnp.tile(z[:, :, 0] * jnp.tanh(z[:, :, 1]), 2))


def convolved_in_parts(convolve):
    """Gated delta nets: queries, keys and values by one kernel, a depthwise convolution and SiLU before they part."""

    def fun(p, x):
        q, k, v = jnp.split(jax.nn.silu(convolve(x @ p["w"], p)), [D, D + S], -1)
        mixed = jnp.einsum("bds,btv->bsd", jnp.einsum("btd,bts->bds", q, k), v)
        return end(p, mixed @ p["o"])

    return fun


UNEQUAL: dict[str, Any] = ONE | {"w": ((D, 2 * D + S), "0 | 1 / 8, 4, 8 of 1")}


@program(X, conv=((3, 1, 2 * D + S), "depthwise"), **UNEQUAL)
def parts_that_are_cut_after_a_depthwise_convolution(p, x):
    def convolve(y, p):
        numbers = ("NTC", "TIO", "NTC")
        return lax.conv_general_dilated(
            y,
            p["conv"],
            (1,),
            "SAME",
            dimension_numbers=numbers,
            feature_group_count=y.shape[-1],
        )

    return convolved_in_parts(convolve)(p, x)


@program(X, add=((2 * D + S,), "multiplied"), **UNEQUAL)
def parts_that_are_cut_after_a_sum_over_time(p, x):
    return convolved_in_parts(lambda y, p: y + y[:, :1] * p["add"])(p, x)


LAYERS = [f"layer{i}" for i in range(8)]


@program(X, jax.ShapeDtypeStruct((D, 3 * D), "float32"), a=((D, 2), "0 | 1"), b=((2, 3 * D), "0 | 1 / 3 of 1"),
         **dict.fromkeys(LAYERS, ((D, D), "0 | 1")), **ONE)  # fmt: skip
def parts_that_are_cut_after_a_sum_with_data(p, x, frozen):
    """Gemma's adapters beside a frozen kernel, after many layers."""
    for name in LAYERS:
        x = x + jnp.tanh(x) @ p[name]
    q, k, v = jnp.split(x @ p["w"] @ p["a"] @ p["b"] + x @ frozen, 3, -1)
    return end(
        p, jnp.einsum("bqk,bkd->bqd", jnp.einsum("bqd,bkd->bqk", q, k), v) @ p["o"]
    )


def opposite_parts(p, y):
    """The first part of what is flipped is the last of the kernel."""
    q, k, v = jnp.split(y, [2 * D, 3 * D], -1)
    gate = jnp.einsum("bqd,bkd->bqk", q, jnp.concatenate([k, k], -1))
    return end(p, jnp.einsum("bqk,bkd->bqd", gate, v) @ p["o"])


OPPOSITE: dict[str, Any] = ONE | {"w": ((D, 4 * D), "0 | 1 / 8, 8, 16 of 1")}


@program(X, **OPPOSITE)
def parts_of_a_flipped_product(p, x):
    return opposite_parts(p, jnp.flip(x @ p["w"], -1))


@program(X, **OPPOSITE)
def parts_of_a_flipped_kernel(p, x):
    return opposite_parts(p, x @ jnp.flip(p["w"], 1))


@program(X, mix=((D, 2), "0 | 1"), **ONE)
def columns_that_are_used_one_by_one(p, x):
    """Gemma3n: coefficients of its streams."""
    mix = x @ p["mix"] + 1
    return end(
        p, (x * mix[..., :1] + jnp.roll(x, 1, 0) * mix[..., 1:]) @ p["w"] @ p["o"]
    )


@program(
    X,
    x=((D, 2 * S), "0 | 1 / 2 of 1"),
    w=((S, 3 * S), "0 | 1 / 8, 4 of 1"),
    out=((S, 1), "head"),
)
def gates_cut_before_their_products(p, x):
    """Haiku's GRU: the candidate's product comes after the gates' one."""

    def step(state, x):
        gates, new = jnp.split(p["w"], [2 * S], 1)
        update, reset = jnp.split(jax.nn.sigmoid(x @ p["x"] + state @ gates), 2, -1)
        state = (1 - update) * state + update * jnp.tanh((reset * state) @ new)
        return state, state

    return end(p, lax.scan(step, jnp.zeros((T, S)), x)[1])


# Mixtures of parameters.

BANK: dict[str, Any] = ONE | {"w": ((3, D, D), "1 | 2")}


@program(X, a=((3,), "multiplied entry by entry"), **BANK)
def a_learned_mixture_of_matrices(p, x):
    w = (jax.nn.softmax(p["a"])[:, None, None] * p["w"]).sum(0)
    return end(p, jax.nn.relu(x @ w) @ p["o"])


@program(X, g=((D, 3), "0 | 1"), **BANK)
def a_mixture_of_matrices_chosen_by_data(p, x):
    gate = jax.nn.softmax(jnp.tanh(x.mean(1)) @ p["g"])
    w = (gate[:, :, None, None] * p["w"]).sum(1)
    return end(p, jax.nn.relu(jnp.einsum("btd,bdf->btf", x, w)) @ p["o"])


@program(X, a=((3,), "multiplied entry by entry"), b=((3, D), "added"), **ONE)
def a_learned_mixture_of_biases(p, x):
    b = (jax.nn.softmax(p["a"])[:, None] * p["b"]).sum(0)
    return end(p, jax.nn.relu(x @ p["w"] + b) @ p["o"])


FACTORS: dict[str, Any] = {
    "u": ((D, 2), "0 | 1"),
    "v": ((D, 2), "1 | 0"),
    "o": ONE["o"],
    "out": ONE["out"],
}


@program(X, **FACTORS)
def two_factors_by_a_sum_of_products(p, x):
    return end(p, jax.nn.relu(x @ (p["u"][:, None, :] * p["v"][None]).sum(-1)) @ p["o"])


@program(X, g=((D,), "multiplied entry by entry"), **ONE)
def a_gain_before_a_mean_over_time(p, x):
    return end(p, jax.nn.relu((norm(x) * p["g"]).mean(1) @ p["w"]) @ p["o"])


@program(X, u=((D,), "added"), v=((5,), "added"), **ONE)
def a_column_and_a_row_added_up(p, x):
    gain = (p["u"][:, None] + p["v"][None]).sum(-1)
    return end(p, jax.nn.relu((x * gain) @ p["w"]) @ p["o"])


@program(X, g=((D,), "multiplied entry by entry"), **ONE)
def a_norm_before_tokens_are_sorted(p, x):
    """Mixtral in Levanter: tokens, in whose norm a parameter is a factor, are sorted by their expert."""
    y = norm(x) * p["g"]
    return end(p, jnp.take(y, jnp.argsort(y[:, 0, 0]), axis=0) @ p["w"] @ p["o"])


@program(X, w=((2, D, D), "1 | 2"))
def matrices_that_a_sum_takes_in_both_orders(p, x):
    def both(x, w):
        one, other = w
        return jnp.tanh(x @ one + x @ other), None

    return jnp.mean(lax.scan(both, x, (p["w"], p["w"][::-1]))[0])


@program(X, w=((D, 2 * D), "0 | 1"), out=((2 * D, 1), "head"))
def a_stack_of_one_kernel(p, x):
    return jnp.sum(jnp.tanh(x @ jnp.stack([p["w"]])[0]) @ p["out"])


# Padding that cuts, constant orders, few bits.


@program(X, **ONE)
def a_matrix_shifted_by_padding(p, x):
    return end(
        p, jax.nn.relu(x @ lax.pad(p["w"], 0.0, ((0, 0, 0), (-2, 2, 0)))) @ p["o"]
    )


@program(X, n=((D, D), "by names: pad"), **ONE)
def padding_that_cuts_all_of_it(p, x):
    nothing = lax.pad(p["n"], 0.0, ((0, 0, 0), (-D - 1, D + 1, 0)))
    return end(p, jax.nn.relu(x @ (p["w"] + nothing)) @ p["o"])


@program(X, **ONE)
def bits_of_an_activation(p, x):
    y = x @ p["w"]
    odd = lax.bitcast_convert_type(y, jnp.uint8).sum(-1) % 2  # four for each number
    return end(p, jax.nn.relu(y * odd.astype(y.dtype)) @ p["o"])


@program(X, jax.ShapeDtypeStruct((D, D // 2), "uint8"), **ONE)
def data_of_fewer_bits_in_larger_words(p, x, packed):
    frozen = (
        lax.bitcast_convert_type(packed, jnp.int4).reshape(D, D).astype(jnp.float32)
    )
    return end(p, jnp.tanh(x @ frozen + x @ p["w"]) @ p["o"])


ORDER = np.random.default_rng(0).permutation(D)


@program(
    X,
    **(ONE | {"w": ((D, D), "by names: gather is not followed: hostile_programs.py:")}),
)
def rows_in_a_constant_order(p, x):
    return end(p, jax.nn.relu(x @ p["w"][jnp.asarray(ORDER)]) @ p["o"])


@program(X, jax.ShapeDtypeStruct((D,), "int32"), **ONE | {"w": ((D, D), "looked up")})
def rows_in_an_order_of_data(p, x, order):
    return end(p, jax.nn.relu(p["w"][order]) @ p["o"])


def rounded(x, scale):
    return jnp.clip(jnp.round(x * scale), -127, 127).astype(jnp.int8)


@jax.custom_vjp
def in_eight_bits(x, w):
    """As in quantized training: what it gives goes on as whole numbers."""
    sums = lax.dot_general(
        rounded(x, 16),
        rounded(w, 64),
        (((x.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    return sums.astype(jnp.float32) / (16 * 64)


in_eight_bits.defvjp(
    lambda x, w: (in_eight_bits(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, jnp.einsum("...i,...o->io", saved[0], g)),
)


@program(X, **ONE)
def layers_of_eight_bits(p, x):
    y = in_eight_bits(jax.nn.relu(in_eight_bits(x, p["w"])), p["o"])
    return jnp.mean(in_eight_bits(jnp.tanh(y), p["out"]) ** 2)


@program(X, e=((7, D), "looked up"), h=((D, 7), "an output head"), **ONE)
def an_index_of_the_largest_ends_a_path(p, x):
    logits = jax.nn.relu(x @ p["w"]) @ p["h"]
    again = jax.nn.one_hot(jnp.argmax(logits, -1), 7) @ p["e"]
    return end(p, again @ p["o"]) - jnp.mean(jax.nn.log_softmax(logits)[..., 0])


# Left to names, since an operation is not followed, and others that were not.

IMAGES = jax.ShapeDtypeStruct((B, 5, 5, 4), "float32")


def convolved(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


@program(IMAGES, ROWS, w=((3, 3, 4, 8), "by names: conv_general_dilated is not followed: hostile_programs.py:"),
         style=((D, 4), "0 | 1"), out=((8, 2), "an output head"))  # fmt: skip
def a_kernel_for_each_example(p, x, z):
    """StyleGAN 2's fused convolution: its groups are the examples."""
    n, h, w, c = x.shape
    kernels = p["w"][None] * (z @ p["style"])[:, None, None, :, None]
    kernels = kernels.transpose(1, 2, 3, 0, 4).reshape(3, 3, c, -1)
    y = convolved(x.transpose(1, 2, 0, 3).reshape(1, h, w, n * c), kernels, n)
    return end(p, y.reshape(h, w, n, -1).transpose(2, 0, 1, 3).mean((1, 2)))


@program(
    IMAGES,
    w=((6, 3, 3, 4, 8), "by names: reshape: hostile_programs.py:"),
    out=((8, 2), "an output head"),
)
def an_ensemble_of_convolutions(p, x):
    return end(p, jax.vmap(convolved, (None, 0))(x, p["w"]).mean((2, 3)))


@program(
    X,
    qk=((2, H, S, S), "2 | 3"),
    v=((H, S, S), "1 | 2"),
    out=((D, 2), "an output head"),
)
def queries_and_keys_by_one_vmap(p, x):
    q, k = jax.vmap(lambda w: jnp.einsum("bthi,hij->bthj", heads(x), w))(p["qk"])
    logits, v = (
        jnp.einsum("bqhd,bkhd->bhqk", q, k),
        jnp.einsum("bthi,hij->bthj", heads(x), p["v"]),
    )
    return end(p, jnp.einsum("bhqk,bkhd->bqhd", logits, v).reshape(B, T, -1))


@program(X, w=((D, D), "0 | 1"), out=((D, 2), "an output head"))
def a_scope_of_the_users(p, x):
    with jax.named_scope("transpose(jvp(block))"):
        y = jnp.tanh(x @ p["w"])
    return end(p, y)


@program(X, w=((D, 5 * D), "0 | 1 / 8, 8, 24 of 1"), out=((D, 2), "an output head"))
def columns_of_no_use(p, x):
    a, b = jnp.split(x @ p["w"], 5, -1)[:2]
    return end(p, jax.nn.silu(a) * b)


@program(
    X,
    w=((D, D), "by names: pad: hostile_programs.py:"),
    out=((2 * D - 1, 2), "an output head"),
)
def zeros_between(p, x):
    return end(p, x @ lax.pad(p["w"], 0.0, [(0, 0, 0), (0, 0, 1)]))


@program(
    X,
    w=((D, 5 * D), "by names: dynamic_slice is not followed: hostile_programs.py:"),
    out=((D, 2), "an output head"),
)
def an_expert_cut_out_by_data(p, x):
    return end(p, x @ lax.dynamic_slice(p["w"], (0, D * jnp.argmax(x[0, 0])), (D, D)))


@program(
    X,
    a=((D, 2), "0 | 1"),
    b=((2, D), "0 | 1"),
    out=((D, 2), "an output head"),
)
def an_adapter_of_a_closed_over_kernel(p, x):
    return end(p, x @ (np.eye(D, dtype=np.float32) + p["a"] @ p["b"]))


@program(
    X,
    w=((D, 8), "by names: dynamic_slice: hostile_programs.py:"),
    out=((4, 2), "an output head"),
)
def blocks_of_columns_by_the_index_of_a_loop(p, x):
    def add(i, total):
        return total + x @ lax.dynamic_slice_in_dim(p["w"], 4 * i, 4, 1)

    return end(p, lax.fori_loop(0, 2, add, jnp.zeros((B, T, 4))))


@program(X, w=((D, 2 * D), "by names: select_n is not followed: hostile_programs.py:"),
         out=((D, 2), "an output head"))  # fmt: skip
def one_half_of_the_columns_of_a_product(p, x):
    first, second = jnp.split(x @ p["w"], 2, -1)
    return end(p, jnp.where(x[..., :1] > 0, first, second))


@program(
    X,
    w=((D, 2 * D), "by names: join is not followed: hostile_programs.py:"),
    out=((D, 2), "an output head"),
)
def one_half_of_the_columns_of_a_kernel(p, x):
    first, second = jnp.split(p["w"], 2, -1)
    return end(p, x @ lax.cond(x[0, 0, 0] > 0, lambda: first, lambda: second))


@program(X, w=((D, 3 * D), "0 | 1"), out=((3 * D, 1), "head"))
def a_kernel_that_is_rolled_before_its_product(p, x):
    return end(p, jnp.tanh(x @ jnp.roll(p["w"], D, 1)))


# What does not train, and what stands outside of the parameters.

FROZEN = {"head": (D, V), "up": (D, D), "down": (D, V)}


def sq(y: Any) -> Any:
    return jnp.mean(y**2)


def frozen(name: str) -> Any:
    """A matrix that the function closes over."""
    return (
        np.random.default_rng(len(name))
        .standard_normal(FROZEN[name])
        .astype(np.float32)
    )


@program(TOKENS, X, up=((D, D), "0 | 1"), down=((D, D), "0 | 1"))
def a_block_before_a_frozen_head(p, t, x):
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return cross_entropy(x @ frozen("head"), t)


@program(
    TOKENS,
    X,
    jax.ShapeDtypeStruct((D, V), "float32"),
    up=((D, D), "0 | 1"),
    down=((D, D), "0 | 1"),
)
def a_block_before_a_head_that_is_an_argument(p, t, x, head):
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return cross_entropy(x @ head, t)


@program(
    TOKENS,
    X,
    up=((D, D), "0 | 1"),
    down=((D, D), "0 | 1"),
    head=((D, V), "stop_gradient"),
)
def a_block_before_a_head_under_stop_gradient(p, t, x):
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return cross_entropy(x @ lax.stop_gradient(p["head"]), t)


@program(
    TOKENS,
    X,
    a=((D, 2), "0 | 1"),
    b=((2, D), "0 | 1"),
    c=((D, 2), "0 | 1"),
    d=((2, V), "head"),
)
def adapters_of_a_frozen_network_and_of_its_head(p, t, x):
    x = jnp.tanh(x @ frozen("up") + x @ p["a"] @ p["b"])
    return cross_entropy(x @ frozen("head") + x @ p["c"] @ p["d"], t)


@program(X, projector=((D, D), "0 | 1"))
def a_projector_into_a_frozen_tower(p, x):
    return sq(jnp.tanh(jnp.tanh(x @ p["projector"]) @ frozen("up")) @ frozen("down"))


@program(
    X,
    jax.ShapeDtypeStruct((T, T), "float32"),
    up=((D, D), "0 | 1"),
    out=((D, 3), "head"),
)
def a_head_before_an_adjacency_matrix(p, x, neighbors):
    x = jax.nn.relu(jnp.einsum("st,btd->bsd", neighbors, x @ p["up"]))
    return sq(jnp.einsum("st,btd->bsd", neighbors, x @ p["out"]))


@program(X, up=((D, D), "0 | 1"), out=((D, 4), "head"))
def a_head_before_the_values_of_its_classes(p, x):
    shares = jax.nn.softmax(jax.nn.relu(x @ p["up"]) @ p["out"])
    return sq(shares @ np.linspace(-1, 1, 4).astype(np.float32))


@program(X, up=((D, D), "0 | 1"), out=((D, 4), "head"))
def a_head_before_a_sum_that_the_function_writes_as_a_product(p, x):
    return sq(jax.nn.relu(x @ p["up"]) @ p["out"] @ jnp.tril(jnp.ones((4, 4))))


@program(
    ROWS,
    student=((D, D), "0 | 1"),
    out=((D, 4), "head"),
    teacher=((D, 4), "stop_gradient"),
)
def a_teacher_in_the_tree(p, x):
    target = x @ lax.stop_gradient(p["teacher"])
    return sq(jax.nn.relu(x @ p["student"]) @ p["out"] - target)


@program(ROWS, up=((D, D), "0 | 1"), out=((D, D), "head"))
def a_target_by_the_network_itself(p, x):
    def network(x):
        return jax.nn.relu(x @ p["up"]) @ p["out"]

    return sq(network(x) - lax.stop_gradient(network(network(x))))


@program(
    ROWS,
    fast=((D, D), "gradient"),
    value=((D, D), "gradient"),
    up=((D, D), "0 | 1"),
    out=((D, 3), "head"),
)
def a_layer_trained_inside_of_the_function(p, x):
    inner = jax.grad(lambda w: sq(x @ w - x @ p["value"]))
    w = p["fast"] - 0.1 * inner(p["fast"])
    return sq(jax.nn.relu(x @ w) @ p["up"] @ p["out"])


@program(
    X, q=((D, H, S), "stop_gradient"), k=((D, H, S), "stop_gradient"),
    v=((D, H, S), "0 | 1, 2; 0 | 2"),
    out=((D, 3), "head"),
)  # fmt: skip
def an_attention_of_frozen_queries_and_keys(p, x):
    q, k = (jnp.einsum("btd,dhs->bths", x, lax.stop_gradient(p[name])) for name in "qk")
    return sq(attend(q, k, jnp.einsum("btd,dhs->bths", x, p["v"])) @ p["out"])


# Products in other words.


@jax.custom_batching.custom_vmap
def with_a_rule_for_vmap(x, w):
    a, b = jnp.split(x @ w, 2, -1)
    return jax.nn.swish(a) * b


@with_a_rule_for_vmap.def_vmap
def _(size, batched, x, w):
    return jax.vmap(
        lambda x, w: with_a_rule_for_vmap(x, w),
        in_axes=[0 if b else None for b in batched],
    )(x, w), True


@program(X, w=((2, 3, D, 2 * D), "2 | 3 / 2 of 3"), out=((D, 3), "head"))
def a_gate_with_a_rule_for_vmap_in_two_scans(p, x):
    def inner(x, w):
        return x + with_a_rule_for_vmap(x, w), None

    return sq(
        lax.scan(lambda x, w: (lax.scan(inner, x, w)[0], None), x, p["w"])[0] @ p["out"]
    )


@program(X, pos=((T, D), "added"), up=((D, D), "0 | 1"), out=((D, 3), "head"))
def positions_by_one_hot(p, x):
    x = x + jnp.einsum(
        "...y,yz->...z", jax.nn.one_hot(jnp.arange(T)[None], T), p["pos"]
    )
    return sq(jax.nn.relu(x @ p["up"]) @ p["out"])


@program(X, pos=((T, D), "added"), up=((D, D), "0 | 1"), out=((D, 3), "head"))
def positions_by_an_identity_matrix(p, x):
    return sq(jax.nn.relu((x + jnp.eye(T) @ p["pos"]) @ p["up"]) @ p["out"])


def outer_product_mean(sequences: int) -> None:
    @program(
        *[jax.ShapeDtypeStruct((sequences, 4, D), "float32")] * 2,
        left=((D, D), "0 | 1"), right=((D, D), "0 | 1"), w=((D, D, 16), "0, 1 | 2"), out=((16, 3), "head"),
    )  # fmt: skip
    def an_outer_product_mean(p, x, y):
        x = jnp.einsum("abc,ade,cef->bdf", x @ p["left"], y @ p["right"], p["w"])
        return sq(x @ p["out"])


for sequences in (2, 200):  # in which order einsum multiplies depends on that
    outer_product_mean(sequences)


@program(X, X, w=((D, D, 16), "0, 1 | 2"), out=((16, 3), "head"))
def a_bilinear_layer(p, x, y):
    return sq(jnp.einsum("btd,bte,def->btf", x, y, p["w"]) @ p["out"])


@program(X, projector=((D, D), "0 | 1"))
def a_projector_into_a_frozen_tower_with_a_residual_stream(p, x):
    layers = np.stack([frozen("up"), frozen("up").T])
    return sq(
        lax.scan(
            lambda x, w: (x + jax.nn.relu(x @ w) @ w.T, None),
            x @ p["projector"],
            layers,
        )[0]
    )


@program(
    X, fast=((D, D), "loop that changes it"), key=((D, D), "0 | 1"), value=((D, D), "gradient"),
    query=((D, D), "0 | 1"), out=((D, 3), "head"),
)  # fmt: skip
def a_layer_trained_in_a_loop(p, x):
    def step(w, x):
        gradient = jax.grad(lambda w: sq(x @ p["key"] @ w - x @ p["value"]))(w)
        w = w - 0.1 * gradient
        return w, x @ p["query"] @ w

    return sq(
        jax.nn.relu(lax.scan(step, p["fast"], jnp.moveaxis(x, 1, 0))[1]) @ p["out"]
    )


@program(
    X,
    start=((D,), "loop that changes it"),
    w=((D, D), "0 | 1"),
    u=((D, D), "0 | 1"),
    out=((D, 3), "head"),
)
def a_state_that_begins_with_a_parameter(p, x):
    def step(h, x):
        h = jnp.tanh(h @ p["w"] + x @ p["u"])
        return h, h

    start = jnp.broadcast_to(p["start"], (B, D))
    return sq(lax.scan(step, start, jnp.moveaxis(x, 1, 0))[1] @ p["out"])
