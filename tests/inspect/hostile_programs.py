"""Small functions in which names, sizes and first appearances mislead, with what is right for each parameter.

A matrix is written by its axes, "0 | 1" (summed | given), with its parts behind a slash: "0 | 1 / 3 of 1" are three of
equal size along axis 1. Behind a semicolon are the matrices of each head. Everything else is a word of the reason why
Adam gets the parameter, or its name decides. A parameter with a shape alone may be anything.
"""

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


PROGRAMS = []
ANYTHING = "anything"
OUT = {"out": ((D, 1), "head")}
NORM = "by names: a norm of some of its columns before they are cut"
EINSUM = "by names: an einsum of three or more operands (split it) is not followed"


def program(
    *args,
    sites=0,
    to=PROGRAMS,
    logits=False,
    **parameters,
):
    """Adds a function to a list; each parameter is its shape and what is right for it.

    With `logits` the function returns its loss and the logits that a clip scales.
    """

    def register(fun):
        params = {}
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


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), labels[..., None], -1
    ).mean()


def sq(y):
    return jnp.mean(y**2)


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def heads(x):
    return x.reshape(*x.shape[:-1], H, S)


def attend(q, k, v):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -1e9)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), v)
    return out.reshape(*out.shape[:2], -1)


# Heads and lookups.


INDEX = jnp.int32(3)  # an array that the function closes over


@program(X, tasks=((T, D), "looked up"), w=((D, D), "0 | 1"), **OUT)
def one_task_of_several(p, x):
    return sq(jnp.tanh((x + p["tasks"][INDEX]) @ p["w"]) @ p["out"])


@program(TOKENS, embed=((V, D), "looked up"), w=((D, D), "0 | 1"))
def tied_embedding(p, t):
    x = jnp.tanh(p["embed"][t] @ p["w"])
    return cross_entropy(x @ p["embed"].T, t)


CHAIN = "by names: a product of parameters is not followed: hostile_programs.py:"


@program(TOKENS, embed=((V, 4), CHAIN), factor=((4, D), CHAIN), head=((D, V), "head"))
def a_factored_embedding(p, t):
    return cross_entropy(jnp.tanh((p["embed"] @ p["factor"])[t]) @ p["head"], t)


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


@program(X, sites=1, **ATTENTION, **OUT)
def plain_attention(p, x):
    x = x + attend(heads(x @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])) @ p["o"]
    return sq(x @ p["out"])


@program(
    X,
    sites=1,
    qkv=((D, 3 * D), "0 | 1 / 3 of 1"),
    b=((3 * D,), "added"),
    o=((D, D), "0 | 1"),
    **OUT,
)
def fused_attention(p, x):
    q, k, v = jnp.split(x @ p["qkv"] + p["b"], 3, -1)
    x = x + attend(heads(q), heads(k), heads(v)) @ p["o"]
    return sq(x @ p["out"])


def rotated(x, at):
    c, s = jnp.cos(at)[:, None, None], jnp.sin(at)[:, None, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


@program(X, sites="tanh", **ATTENTION, **OUT)
def capped_logits(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    logits = 50 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 50)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(B, T, D)
    return sq((x + o @ p["o"]) @ p["out"])


@program(
    X,
    sites="a learned bias is added",
    bias=((H, T, T), "added"),
    **ATTENTION,
    **OUT,
)
def a_learned_bias(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) + p["bias"]
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(B, T, D)
    return sq((x + o @ p["o"]) @ p["out"])


@program(X, sites="would not scale its logits alone", **ATTENTION, **OUT)
def queries_that_are_a_gate_too(p, x):
    q, k, v = (heads(x @ p[n]) for n in "qkv")
    o = attend(q, k, v) * jax.nn.sigmoid(q.reshape(B, T, D))
    return sq((x + o @ p["o"]) @ p["out"])


@program(
    X, sites=1, qa=((D, 4), "0 | 1"), qb=((4, H, S + 2), "0 | 1, 2"), kva=((D, 4 + 2), "0 | 1 / 4, 2 of 1"),
    kvb=((4, H, 2 * S), "0 | 1, 2 / 2 of 2"), scale=((4,), "multiplied"), o=((H, S, D), "0, 1 | 2"),
    **OUT,
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
    return sq((x + jnp.einsum("bths,hsd->btd", o, p["o"])) @ p["out"])


@program(X, sites=1, latents=((3, D), "learned input"), **ATTENTION, **OUT)
def learned_queries(p, x):
    latents = jnp.broadcast_to(p["latents"], (B, 3, D))
    q, k, v = heads(latents @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    o = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, 3, D)
    return jnp.mean((jnp.tanh(o @ p["o"]) @ p["out"]) ** 2)


@program(
    X, sites="it can't be followed", latents=((3, D), CHAIN),
    **ATTENTION | {"q": ((D, D), CHAIN)}, **OUT,
)  # fmt: skip
def learned_queries_token_by_token(p, x):
    """The product of a kernel and latents, in Equinox's order, that keys multiply: a factor of three columns."""
    q = heads(jax.vmap(lambda token: p["q"].T @ token)(p["latents"]))
    k, v = heads(x @ p["k"]), heads(x @ p["v"])
    o = jax.vmap(lambda k, v: jnp.einsum("hqk,khd->qhd",
        jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k)), v))(k, v)  # fmt: skip
    return jnp.mean((jnp.tanh(o.reshape(B, 3, D) @ p["o"]) @ p["out"]) ** 2)


# Stacks, experts, combinations.


@program(X, up=((D, 3, 2 * D), "0 | 2"), down=((2 * D, 3, D), "0 | 2"), **OUT)
def layers_on_axis_one_by_index(p, x):
    for i in range(3):
        x = x + jax.nn.relu(x @ p["up"][:, i]) @ p["down"][:, i]
    return sq(x @ p["out"])


EXPERTS = {
    "gate": ((D, 3), "0 | 1"),
    "up": ((3, D, 5), "1 | 2"),
    "down": ((3, 5, D), "1 | 2"),
    **OUT,
}


@program(X, **EXPERTS | {"up": ((3, D, 5), EINSUM), "down": ((3, 5, D), EINSUM)})
def dense_experts(p, x):
    gate = jax.nn.softmax(x @ p["gate"])
    h = jax.nn.relu(jnp.einsum("btd,edf->betf", x, p["up"]))
    y = jnp.einsum("betf,efd,bte->btd", h, p["down"], gate)
    return sq((x + y) @ p["out"])


@program(X, **EXPERTS)
def sparse_experts(p, x):
    y = x.reshape(-1, D)
    probability, expert = lax.top_k(jax.nn.softmax(y @ p["gate"]), 1)
    order = jnp.argsort(expert[:, 0])
    sizes = jnp.bincount(expert[:, 0], length=3)
    h = lax.ragged_dot(y[order], p["up"], sizes)
    z = lax.ragged_dot(jax.nn.relu(h), p["down"], sizes)
    y = y + (z * probability[order])[jnp.argsort(order)]
    return jnp.mean((y @ p["out"]) ** 2)


NOT_FOLLOWED = "by names: a sum over experts is not followed: "


@program(X, **EXPERTS | {"down": ((3, 5, D), NOT_FOLLOWED)})
def a_sum_over_experts_and_their_features(p, x):
    h = jax.nn.relu(jnp.einsum("btd,edf->btef", x, p["up"]))
    h = h * jax.nn.softmax(x @ p["gate"])[..., None]
    return sq((x + jnp.einsum("btef,efd->btd", h, p["down"])) @ p["out"])


@program(ROWS, KEY, mu=((D, D), "0 | 1"), sigma=((D, D), "added"), **OUT)
def noisy_weights(p, x, key):
    w = p["mu"] + p["sigma"] * jax.random.normal(key, (D, D))
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


CARRIED = {"w": ((D, D), "0 | 1"), "b": ((D,), "added"), **OUT}


@program(ROWS, **CARRIED)
def parameters_in_a_carry(p, x):
    """JAX does not see that the body, which has a jaxpr of its own, returns them as they are."""

    @jax.jit
    def body(carry):
        p, x = carry
        return p, jnp.tanh(x @ p["w"] + p["b"])

    (p, x), _ = lax.scan(lambda carry, _: (body(carry), None), (p, x), length=3)
    return jnp.mean((x @ p["out"]) ** 2)


@program(ROWS, **CARRIED)
def parameters_that_a_condition_reads(p, x):
    """A deep equilibrium model, whose loop ends near its fixed point."""

    def cell(p, z):
        return jnp.tanh(z @ p["w"] + p["b"] + x)

    def goes_on(carry):
        return jnp.abs(cell(*carry) - carry[1]).max() > 0.1

    p, z = lax.while_loop(goes_on, lambda carry: (carry[0], cell(*carry)), (p, x))
    return jnp.mean((z @ p["out"]) ** 2)


@program(
    ROWS,
    X,
    w=((D, 6 * D), "0 | 1 / 6 of 1"),
    mlp=((D, D), "0 | 1"),
    o=((D, D), "0 | 1"),
    **OUT,
)
def adaptive_norms(p, c, x):
    a, b, g, d, e, h = jnp.split(jax.nn.silu(c)[:, None] @ p["w"], 6, -1)
    x = x + g * jnp.tanh((norm(x) * (1 + a) + b) @ p["o"])
    x = x + h * jnp.tanh((norm(x) * (1 + d) + e) @ p["mlp"])
    return sq(x @ p["out"])


@program(X, sites=1, q=((D, H, S), "0 | 1, 2"), k=((D, H, S), "0 | 1, 2"), v=((D, H, S), "0 | 1, 2"),
         o=((H, S, D), "0, 1 | 2"), **OUT)  # fmt: skip
def an_output_projection_by_a_loop(p, x):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, p[n]) for n in "qkv")
    o = attend(q, k, v).reshape(B, T, H, S)
    y = sum(o[:, :, h] @ p["o"][h] for h in range(H))
    return jnp.mean((jnp.tanh(y) @ p["out"]) ** 2)


@program(X, w=((2 * D, D), "0 | 1"), **OUT)
def rows_of_the_input_and_of_the_state(p, x):
    """A recurrent cell's kernel, cut."""
    return jnp.mean(jnp.tanh(x @ p["w"][:D] + jnp.tanh(x) @ p["w"][D:]) @ p["out"])


@program(X, w=((D, H, S), "by names: multiplied along axis"), **OUT)
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


@program(IMAGE, patches=((48, D), "patches"), w=((D, D), "0 | 1"), out=((D, 4), "head"))
def patches_by_reshape(p, x):
    x = x.reshape(B, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(B, 4, 48)
    x = jnp.tanh((x @ p["patches"]) @ p["w"])
    return cross_entropy(x.mean(1) @ p["out"], jnp.zeros(B, int))


@program(
    jax.ShapeDtypeStruct(IMAGE.shape, "uint8"),
    patches=((48, D), "patches"),
    w=((D, D), "0 | 1"),
    out=((D, 4), "head"),
)
def patches_of_bytes(p, x):
    return patches_by_reshape(p, x.astype(jnp.float32) / 255)


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

PARTS = {
    "w": ((D, 3 * D), "0 | 1 / 3 of 1"),
    "out": ((D, 1), "an output head"),
}
HEADS = PARTS | {"w": ((D, 3 * D), "0 | 1 / 3 of 1; 0 | 1 / 6 of 1")}
ONE = {
    "w": ((D, D), "0 | 1"),
    "o": ((D, D), "0 | 1"),
    "out": ((D, 1), "an output head"),
}


def end(p, y):
    return jnp.mean(jnp.tanh(y @ p["out"]) ** 2)


def gated(p, i, f, g):
    return end(p, jax.nn.sigmoid(i) * jnp.tanh(g) + jax.nn.sigmoid(f))


@program(X, w=((D, 3 * D), NORM), out=((D, 1), "an output head"))
def gates_of_one_norm_each(p, x):
    return gated(p, *jnp.moveaxis(norm((x @ p["w"]).reshape(B, T, 3, D)), 2, 0))


@program(X, w=((D, 2 * D), NORM), out=((D, 1), "an output head"))
def a_gate_cut_through_normalized_heads(p, x):
    a, b = jnp.split(norm((x @ p["w"]).reshape(B, T, H, 2 * S)), 2, -1)
    return end(p, (a * jax.nn.sigmoid(b)).reshape(B, T, D))


FACTORS = {
    "u": ((D, 2), "by names: reduce_sum: hostile_programs.py:"),
    "v": ((D, 2), "by names: reduce_sum: hostile_programs.py:"),
    "o": ONE["o"],
    "out": ONE["out"],
}


@program(X, **FACTORS)
def two_factors_by_a_sum_of_products(p, x):
    return end(p, jax.nn.relu(x @ (p["u"][:, None, :] * p["v"][None]).sum(-1)) @ p["o"])


ORDER = np.random.default_rng(0).permutation(D)


@program(
    X,
    **(ONE | {"w": ((D, D), "by names: gather is not followed: hostile_programs.py:")}),
)
def rows_in_a_constant_order(p, x):
    return end(p, jax.nn.relu(x @ p["w"][jnp.asarray(ORDER)]) @ p["o"])


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


# What does not train, and what stands outside of the parameters.

FROZEN = {"head": (D, V), "up": (D, D), "down": (D, V)}


def frozen(name):
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
    up=((D, D), "0 | 1"),
    down=((D, D), "0 | 1"),
    head=((D, V), "no gradient"),
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


@program(TOKENS, X, c=((D, 2), "0 | 1"), d=((2, V), "head"))
def an_adapter_added_to_a_frozen_head(p, t, x):
    return cross_entropy(jnp.tanh(x) @ (frozen("head") + p["c"] @ p["d"]), t)


ADAPTED = {
    f"{kernel}/{factor}": (shape, "0 | 1")
    for kernel in ("gate", "up", "down")
    for factor, shape in {"a": (D, 2), "b": (2, D)}.items()
}


@program(X, **ADAPTED, **OUT)
def a_merged_adapter_of_a_gated_layer(p, x):
    """SiLU has an exponential, and is no softmax whose weights multiply learned values."""

    def merged(kernel):
        return frozen("up") + p[kernel]["a"] @ p[kernel]["b"]

    hidden = jax.nn.silu(x @ merged("gate")) * (x @ merged("up"))
    return sq((x + hidden @ merged("down")) @ p["out"])


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
    teacher=((D, 4), "no gradient"),
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
    X, q=((D, H, S), "no gradient"), k=((D, H, S), "no gradient"),
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
def positions_by_an_identity_matrix(p, x):
    return sq(jax.nn.relu((x + jnp.eye(T) @ p["pos"]) @ p["up"]) @ p["out"])


@program(
    X, fast=((D, D), "loop that changes it"), key=((D, D), "gradient"), value=((D, D), "gradient"),
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


@program(
    jax.ShapeDtypeStruct((D,), "float32"),
    w=((D, 3, 4), "0 | 1, 2"),
    out=((3, 5), "head"),
)
def sums_of_some_columns_of_one_example(p, x):
    y = jnp.einsum("d,dab->ab", x, p["w"])
    return sq(jnp.tanh(y[:, :2].sum(1)) @ p["out"])


# In which order an einsum multiplies its operands depends on their sizes, and here on `order`; the answer does not.


def in_each_order(name, fun, *args, **parameters):
    for order in ((0, 1), (0, 2), (1, 2)):

        def ordered(p, *args, order=order):
            path = [order, (0, 1)]
            return sq(fun(functools.partial(jnp.einsum, optimize=path), p, *args))

        ordered.__name__ = f"{name}_{order[0]}{order[1]}"
        program(*args, **parameters)(ordered)


FORMS = jax.ShapeDtypeStruct((D, D, D), "float32")
in_each_order(
    "features_in_a_frozen_form",
    lambda einsum, p, x, c: einsum("bti,btj,ijk->btk", jnp.tanh(x @ p["w"]), x, c),
    X, FORMS, w=((D, D), EINSUM),
)  # fmt: skip
in_each_order(
    "log_shares_of_labels_inside_of_a_derivative",
    lambda einsum, p, x, y, m: jax.jvp(
        lambda x: einsum("btv, btv, bt -> bt", jnp.tanh(x) @ p["w"], y, m), [x], [x])[1],
    X, X, jax.ShapeDtypeStruct((B, T), "float32"), w=((D, D), EINSUM),
)  # fmt: skip

PARTS = "by names: a sum of its slices is not followed: hostile_programs.py:"


@program(
    X,
    **{f"up{i}": ((D, D), "0 | 1") for i in range(5)},
    **{f"c{i}": ((D, D, 2), PARTS) for i in range(5)},
    **OUT,
)
def complex_matrices_in_a_deep_residual_stream(p, x):
    """The real part of c h sums over both parts of c, and they are two columns of c x with a real x."""
    for i in range(5):
        h = jnp.tanh(x @ p[f"up{i}"])
        c = p[f"c{i}"][..., 0] + 1j * p[f"c{i}"][..., 1]
        x = x + jnp.einsum("hp,btp->bth", c, h * jnp.exp(1j * h)).real
    return sq(x @ p["out"])


@program(
    X,
    jax.ShapeDtypeStruct((0, T, D), "float32"),
    w=((D, D), "0 | 1"),
    **OUT,
)
def an_empty_memory_that_is_cut_into_heads(p, x, empty):
    y = jnp.concatenate([(z @ p["w"]).reshape(-1, T, 2, D // 2) for z in (empty, x)])
    return sq(jnp.tanh(y.reshape(-1, T, D)) @ p["out"])


@program(
    X,
    jax.ShapeDtypeStruct((0, T, D), "float32"),
    w=((D, D), "0 | 1"),
    **OUT,
)
def an_empty_batch_next_to_another(p, x, empty):
    """As a cache is before the first step."""
    return sq(jnp.tanh(jnp.concatenate([x @ p["w"], empty @ p["w"]])) @ p["out"])
