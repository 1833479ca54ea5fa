"""Small functions in which names, sizes and first appearances mislead, with what is right for each parameter.

A matrix is written by its axes, "0 | 1" (summed | given), with its parts behind a slash: "0 | 1 / 3 of 1" are three of
equal size along axis 1. Everything else is a word of the reason why Adam gets the parameter; "refused" is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

B, T, D, H, S, V = 2, 6, 8, 2, 4, 12
TOKENS = jax.ShapeDtypeStruct((B, T), "int32")
X = jax.ShapeDtypeStruct((B, T, D), "float32")
ROWS = jax.ShapeDtypeStruct((B, D), "float32")
KEY = jax.eval_shape(lambda: jax.random.key(0))


class HostileProgram(NamedTuple):
    fun: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]
    expected: dict[str, str]
    sites: int | str  # how many attentions can be clipped; or a word of the reason why the only one can't


PROGRAMS: list[HostileProgram] = []


def program(
    *args: Any,
    sites: int | str = 0,
    to: list[HostileProgram] = PROGRAMS,
    **parameters: tuple[tuple[int, ...], str],
):
    """Adds a function to a list; each parameter is its shape and what is right for it."""

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (shape, _) in parameters.items()}
        expected = {name: answer for name, (_, answer) in parameters.items()}
        to.append(HostileProgram(fun, params, args, expected, sites))
        return fun

    return register


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


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
    TOKENS, embed=((V, D), "looked up"), up=((D, V), "0 | 1"), down=((V, D), "0 | 1"), head=((D, V), "head")
)
def a_width_that_is_the_vocabulary(p, t):
    x = p["embed"][t]
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return cross_entropy(x @ p["head"], t)


@program(TOKENS, embed=((V, D), "looked up"), w=((D, D), "0 | 1"))
def tied_embedding(p, t):
    x = jnp.tanh(p["embed"][t] @ p["w"])
    return cross_entropy(x @ p["embed"].T, t)


@program(TOKENS, embed=((V, D), "looked up"), w=((D, D), "0 | 1"), head=((D, V), "head"))
def a_lookup_by_one_hot(p, t):
    x = jax.nn.one_hot(t, V) @ p["embed"]
    return cross_entropy(jnp.tanh(x @ p["w"]) @ p["head"], t)


@program(TOKENS, embed=((V, 4), "looked up"), factor=((4, D), "0 | 1"), head=((D, V), "head"))
def a_factored_embedding(p, t):
    return cross_entropy(jnp.tanh((p["embed"] @ p["factor"])[t]) @ p["head"], t)


@program(TOKENS, embed=((V, D), "looked up"), w=((D, D), "0 | 1"), head=((D, V), "head"))
def a_loss_in_chunks(p, t):
    x = jnp.tanh(p["embed"][t] @ p["w"])

    def chunk(total, part):
        x, t = part
        return total + cross_entropy(x @ p["head"], t), None

    chunks = x.reshape(3, B, 2, D), t.reshape(3, B, 2)
    return lax.scan(chunk, 0.0, chunks)[0]


@program(TOKENS, embed=((V, D), "looked up"), policy=((D, V), "head"), value=((V, 1), "head"))
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
    penalty = jnp.vdot(p["out"], p["out"]) + jnp.sum((p["w"].T @ p["w"] - jnp.eye(D)) ** 2)
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["out"]) ** 2) + penalty


@program(ROWS, w=((D, D), "0 | 1"), out=((D, 1), "head"))
def forces(p, x):
    def energy(x):
        return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"])

    return jnp.mean((jax.grad(energy)(x) + x) ** 2)


@program(ROWS, w=((D, D), "0 | 1"), out=((D, 1), "head"))
def energy_and_forces(p, x):
    def energy(x):
        return jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"])

    e, f = jax.value_and_grad(energy)(x)
    return jnp.mean((f + x) ** 2) + (e - 1) ** 2


@program(ROWS, w=((D, D), "0 | 1"), out=((D, 4), "head"), unused_head=((D, 3), "never used"))
def dead_code(p, x):
    h = jnp.tanh(x @ p["w"])
    logits = h @ p["out"]
    _ = jnp.tanh(logits).sum()
    return cross_entropy(logits, jnp.zeros(B, int))


@program(ROWS, ROWS, left=((D, 4), "0 | 1"), right=((D, 4), "0 | 1"))
def two_towers(p, x, y):
    a, b = norm(jnp.tanh(x) @ p["left"]), norm(jnp.tanh(y) @ p["right"])
    return cross_entropy(a @ b.T, jnp.arange(B))


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


@program(X, sites=1, qkv=((D, 3, H, S), "0 | 2, 3"), o=((H, S, D), "0, 1 | 2"), out=((D, 1), "head"))
def fused_attention_with_an_axis_of_three(p, x):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dzhs->btzhs", x, p["qkv"]), 2, 0)
    o = attend(q, k, v).reshape(B, T, H, S)
    return jnp.mean(((x + jnp.einsum("bths,hsd->btd", o, p["o"])) @ p["out"]) ** 2)


@program(X, sites=1, qkv=((D, 3 * D), "0 | 1 / 3 of 1, 2 times"), o=((D, D), "0 | 1"), out=((D, 1), "head"))
def fused_attention_head_by_head(p, x):
    q, k, v = jnp.split((x @ p["qkv"]).reshape(B, T, H, 3 * S), 3, -1)
    return jnp.mean(((x + attend(q, k, v) @ p["o"]) @ p["out"]) ** 2)


@program(X, sites=1, qkv=((D, D + 2 * S), "0 | 1 / 8, 4, 4 of 1"), o=((D, D), "0 | 1"), out=((D, 1), "head"))
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


@program(X, sites="normalized", **ATTENTION, out=((D, 1), "head"))
def normalized_queries(p, x):
    q, k = norm(heads(x @ p["q"])), norm(heads(x @ p["k"]))
    return jnp.mean(((x + attend(q, k, heads(x @ p["v"])) @ p["o"]) @ p["out"]) ** 2)


@program(X, sites="capped", **ATTENTION, out=((D, 1), "head"))
def capped_logits(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    logits = 50 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 50)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(B, T, D)
    return jnp.mean(((x + o @ p["o"]) @ p["out"]) ** 2)


@program(X, sites="learned bias", bias=((H, T, T), "added"), **ATTENTION, out=((D, 1), "head"))
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
    sites="a clip would not scale its logits alone",
    **{"q": ((D, D), "0 | 1"), "k": ((D, D), "0 | 1"), "o": ((D, D), "0 | 1"), "out": ((D, 1), "head")},
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
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, jnp.concatenate([k, shared], -1)))
    o = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return jnp.mean(((x + jnp.einsum("bths,hsd->btd", o, p["o"])) @ p["out"]) ** 2)


@program(X, sites=1, latents=((3, D), "learned input"), **ATTENTION, out=((D, 1), "head"))
def learned_queries(p, x):
    latents = jnp.broadcast_to(p["latents"], (B, 3, D))
    q, k, v = heads(latents @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    o = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, 3, D)
    return jnp.mean((jnp.tanh(o @ p["o"]) @ p["out"]) ** 2)


# Stacks, experts, combinations.


@program(X, up=((3, D, 2 * D), "1 | 2"), down=((3, 2 * D, D), "1 | 2"), out=((D, 1), "head"))
def scanned_layers(p, x):
    def layer(x, w):
        return x + jax.nn.relu(x @ w[0]) @ w[1], None

    x, _ = lax.scan(jax.checkpoint(layer), x, (p["up"], p["down"]))
    return jnp.mean((x @ p["out"]) ** 2)


@program(X, up=((D, 3, 2 * D), "0 | 2"), down=((2 * D, 3, D), "0 | 2"), out=((D, 1), "head"))
def layers_on_axis_one_by_index(p, x):
    for i in range(3):
        x = x + jax.nn.relu(x @ p["up"][:, i]) @ p["down"][:, i]
    return jnp.mean((x @ p["out"]) ** 2)


@program(X, w=((3, D, D), "1 | 2"), out=((D, 1), "head"))
def layers_by_a_counter(p, x):
    x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["w"][i]), x)
    return jnp.mean((x @ p["out"]) ** 2)


@program(X, gate=((D, 3), "0 | 1"), up=((3, D, 5), "1 | 2"), down=((3, 5, D), "1 | 2"), out=((D, 1), "head"))
def dense_experts(p, x):
    gate = jax.nn.softmax(x @ p["gate"])
    h = jax.nn.relu(jnp.einsum("btd,edf->betf", x, p["up"]))
    y = jnp.einsum("betf,efd,bte->btd", h, p["down"], gate)
    return jnp.mean(((x + y) @ p["out"]) ** 2)


@program(X, gate=((D, 3), "0 | 1"), up=((3, D, 5), "1 | 2"), down=((3, 5, D), "1 | 2"), out=((D, 1), "head"))
def sparse_experts(p, x):
    y = x.reshape(-1, D)
    probability, expert = lax.top_k(jax.nn.softmax(y @ p["gate"]), 1)
    order = jnp.argsort(expert[:, 0])
    sizes = jnp.bincount(expert[:, 0], length=3)
    h = lax.ragged_dot(y[order], p["up"], sizes)
    z = lax.ragged_dot(jax.nn.relu(h), p["down"], sizes)
    y = y + (z * probability[order])[jnp.argsort(order)]
    return jnp.mean((y @ p["out"]) ** 2)


@program(X, jax.ShapeDtypeStruct((B,), "int32"), w=((3, D, D), "1 | 2"), out=((D, 1), "head"))
def an_adapter_by_sample(p, x, which):
    y = jnp.einsum("btd,bdf->btf", x, p["w"][which])
    return jnp.mean((jnp.tanh(y) @ p["out"]) ** 2)


@program(ROWS, w=((4, D, D), "1 | 2"), out=((4, D, 1), "head"))
def an_ensemble(p, x):
    h = jax.vmap(lambda w: jnp.tanh(x @ w))(p["w"])
    y = jax.vmap(lambda h, w: h @ w)(h, p["out"])
    return jnp.mean((y - 1) ** 2)


@program(ROWS, w=((D, D), "0 | 1"), a=((D, 2), "0 | 1"), b=((2, D), "0 | 1"), out=((D, 1), "head"))
def merged_adapters(p, x):
    return jnp.mean((jnp.tanh(x @ (p["w"] + p["a"] @ p["b"])) @ p["out"]) ** 2)


@program(ROWS, w=((D, D), "0 | 1"), a=((D, 2), "0 | 1"), b=((2, D), "0 | 1"), out=((D, 1), "head"))
def adapters_beside(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"] + (x @ p["a"]) @ p["b"]) @ p["out"]) ** 2)


@program(ROWS, KEY, mu=((D, D), "0 | 1"), sigma=((D, D), "added"), out=((D, 1), "head"))
def noisy_weights(p, x, key):
    w = p["mu"] + p["sigma"] * jax.random.normal(key, (D, D))
    return jnp.mean((jnp.tanh(x @ w) @ p["out"]) ** 2)


@program(ROWS, jax.ShapeDtypeStruct((D, D), "bool"), w=((D, D), "0 | 1"), out=((D, 1), "head"))
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


@program(X, i=((D, S), "0 | 1"), f=((D, S), "0 | 1"), g=((D, S), "0 | 1"), out=((S, 1), "head"))
def weights_joined_before_their_product(p, x):
    i, f, g = jnp.split(x @ jnp.concatenate([p["i"], p["f"], p["g"]], -1), 3, -1)
    return jnp.mean(((jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f)) @ p["out"]) ** 2)


@program(X, a=((D, D), "0 | 1"), b=((D, D), "0 | 1"), out=((D, 1), "head"))
def weights_stacked_into_a_scan(p, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([p["a"], p["b"]]))
    return jnp.mean((x @ p["out"]) ** 2)


@program(X, w=((D, 2 * D), "0 | 1 / 2 of 1"), down=((D, D), "0 | 1"), out=((D, 1), "head"))
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


@program(X, v=((D, H, S), "0 | 1, 2"), o=((H, S, D), "0, 1 | 2"), out=((D, 1), "head"))
def an_output_projection_by_einsum(p, x):
    y = jnp.tanh(jnp.einsum("btd,dhs->bths", x, p["v"]))
    return jnp.mean((jnp.tanh(jnp.einsum("bths,hsd->btd", y, p["o"])) @ p["out"]) ** 2)


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
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


@program(IMAGE, first=((3, 3, 3, 8), "0, 1, 2 | 3"), depthwise=((3, 3, 1, 8), "depthwise"),
         grouped=((3, 3, 4, 8), "0, 1, 2 | 3 / 2 of 3"), out=((8, 4), "head"))  # fmt: skip
def convolutions(p, x):
    x = jax.nn.relu(conv(x, p["first"]))
    x = jax.nn.relu(conv(x, p["depthwise"], groups=8))
    x = jax.nn.relu(conv(x, p["grouped"], groups=2))
    return cross_entropy(x.mean((1, 2)) @ p["out"], jnp.zeros(B, int))


@program(
    jax.ShapeDtypeStruct((B, 8, 8, 1), "float32"), first=((3, 3, 1, 8), "0, 1 | 3"), out=((8, 4), "head")
)
def a_first_convolution_of_one_channel(p, x):
    return cross_entropy(jax.nn.relu(conv(x, p["first"])).mean((1, 2)) @ p["out"], jnp.zeros(B, int))


@program(IMAGE, patches=((4, 4, 3, D), "patches"), w=((D, D), "0 | 1"), out=((D, 4), "head"))
def patches_by_convolution(p, x):
    x = jnp.tanh(conv(x, p["patches"], stride=4).reshape(B, 4, D) @ p["w"])
    return cross_entropy(x.mean(1) @ p["out"], jnp.zeros(B, int))


@program(IMAGE, patches=((48, D), "patches"), w=((D, D), "0 | 1"), out=((D, 4), "head"))
def patches_by_reshape(p, x):
    x = x.reshape(B, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(B, 4, 48)
    x = jnp.tanh((x @ p["patches"]) @ p["w"])
    return cross_entropy(x.mean(1) @ p["out"], jnp.zeros(B, int))


@program(IMAGE, first=((1, 1, 3, D), "2 | 3"), w=((D, D), "0 | 1"), out=((D, 4), "head"))
def a_first_convolution_of_one_pixel(p, x):
    x = jnp.tanh(conv(x, p["first"]) @ p["w"])
    return cross_entropy(x.mean((1, 2)) @ p["out"], jnp.zeros(B, int))
