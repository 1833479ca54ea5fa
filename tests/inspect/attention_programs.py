"""Attention in unusual spellings, in the format of `hostile_programs`: a clip of it is exact for each head, or refused.

Where a function returns its logits too, they are those that a clip scales: without what is added to them, and minus
infinity where they are masked.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.inspect.hostile_programs import norm
from tests.inspect.hostile_programs import program as add_program

B, T, D, H, S = 2, 8, 24, 4, 6
X = jax.ShapeDtypeStruct((B, T, D), "float32")
PROGRAMS = []
program = functools.partial(add_program, to=PROGRAMS)
attention = functools.partial(program, X, logits=True)
QKVO = dict.fromkeys("qkvo", (D, D))
MATRICES = dict.fromkeys("qkvo", ((D, D), "0 | 1"))
OUT = {"out": ((D, 1), "head")}
CAUSAL = np.tri(T, dtype=bool)
ELSE = "a clip would not scale its logits alone"

LOST_QUERIES = "its queries can't be followed to parameters that train"
IN_TURNS = "a clip would not give each of its logits the factor of its head"
NOT_ALL = "it can't be followed from parameters through queries and keys to its values: attention_programs.py:"
CHAIN = "by names: a product of parameters is not followed: attention_programs.py:"
SEVERAL = "its queries are cut into heads or layers in several ways"
GATHER = "by names: gather is not followed: attention_programs.py:"
ADDED = f"{ELSE}: attention_programs.py:"


def heads(x, count=H):
    return x.reshape(*x.shape[:-1], count, -1)


def projected(p, x, names="qkv"):
    return [heads(x @ p[name]) for name in names]


def logits_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def mixed(shares, v):
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(
        *shares.shape[:1], shares.shape[2], -1
    )


def attended(q, k, v):
    return mixed(jax.nn.softmax(logits_of(q, k)), v)


def loss_of(p, y):
    return jnp.mean((y @ p["o"]) ** 2)


def end(p, logits, v):
    return loss_of(p, mixed(jax.nn.softmax(logits), v)), logits


def layer(p, x, names="qkvo"):
    q, k, v, o = names
    shares = jax.nn.softmax(logits_of(*projected(p, x, q + k)) / np.sqrt(S))
    return x + jnp.tanh(mixed(shares, heads(x @ p[v])) @ p[o])


def constant(shape, seed=0):
    return 0.5 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# One attention, of which one thing is spelled in another way. `sites` as in `hostile_programs`.


def spelled(
    name,
    sites=1,
    change=lambda q, k, p, x: (q, k),
    spell=lambda logits, p: logits,
    softmax=lambda logits, p: jax.nn.softmax(logits),
    weights=lambda p: p,
    more=lambda q, k, p, x: 0.0,
    kept=None,
    **parameters,
):
    """Queries and keys are changed, then the logits are spelled; what comes then is no part of them."""

    def fun(p, x):
        w = weights(p)
        q, k, v = projected(w, x)
        logits = spell(logits_of(*change(q, k, p, x)), p)
        y = loss_of(w, mixed(softmax(logits, p), v)) + more(q, k, p, x)
        return y, logits if kept is None else jnp.where(kept, logits, -jnp.inf)

    fun.__name__ = name
    attention(sites=sites, **QKVO | parameters)(fun)


@attention(sites="the factor of its head", **QKVO)
def softmax_over_heads_and_keys(p, x):
    """A factor for each head would change to which head the only softmax attends."""
    q, k, v = projected(p, x)
    logits = logits_of(q, k)
    y = jnp.einsum("bhqk,bkhd->bqd", jax.nn.softmax(logits, (1, 3)), v)
    return loss_of(p, jnp.tile(y, H)), logits


@attention(sites="the factor of its head", **QKVO)
def softmax_over_heads_and_keys_for_values_of_each_head(p, x):
    q, k, v = projected(p, x)
    logits = logits_of(q, k)
    return loss_of(p, mixed(jax.nn.softmax(logits, (1, 3)), v)), logits


def top(logits):
    return logits.max(-1, keepdims=True)


def divided_by(sum_of):
    """A softmax by hand, that divides the exponentials by this sum of them."""

    def softmax(logits, p):
        e = jnp.exp(logits - top(logits))
        return e / sum_of(e)

    return softmax


def own_sum(e):
    return e.sum(-1, keepdims=True)


def sum_of_all(e):
    return e.sum((1, 3), keepdims=True)


def norm_1(e):
    return e / own_sum(e)


def sum_of_heads(e):
    """The sum over heads and keys, head by head."""
    start = jnp.zeros((B, T, 1))
    z, _ = lax.scan(lambda z, x: (z + own_sum(x), None), start, jnp.moveaxis(e, 1, 0))
    return z[:, None]


ONES = np.ones((T, T), np.float32)


def running_maxima(logits, moved=lambda m: m):
    """The largest logits of each query, as a loop carries them, and those that it had before."""
    start = jnp.zeros((B, H, T))
    return lax.scan(
        lambda m, _: (jnp.maximum(moved(m), logits.max(-1)), m), start, length=3
    )


OF_ALL = "the factor of its head"
NOT_ITS_SUM = "several softmaxes"
spelled("shifted_by_a_running_maximum",
        softmax=lambda x, p: jax.nn.softmax(x - running_maxima(x)[0][..., None]))  # fmt: skip
spelled("less_the_mean_over_heads",
        softmax=lambda x, p: (w := jax.nn.softmax(x)) - w.mean(1, keepdims=True))  # fmt: skip
spelled("divided_after_sums_of_a_head_and_of_all_are_added", OF_ALL,
        softmax=lambda x, p: norm_1(
            (e := jnp.exp(x)) + own_sum(e) + sum_of_all(e)))  # fmt: skip
spelled("divided_by_a_sum_of_each_head_that_is_repeated_first",
        softmax=divided_by(lambda e: jnp.broadcast_to(own_sum(e), e.shape) + 1e-9))  # fmt: skip
spelled("the_logarithm_of_a_sum_subtracted", OF_ALL,
        softmax=lambda x, p: jnp.exp(x - jax.nn.logsumexp(x, (1, 3), keepdims=True)))  # fmt: skip


def of_examples_and_heads(e):
    """The sum of all heads, where one axis has examples and heads."""
    total = e.reshape(B * H, T, T).sum(-1).reshape(B, H, T).sum(1)
    return jnp.repeat(total, H, 0).reshape(B, H, T, 1)


def divided_late(name, sites, divided, weights=lambda e, p: e, **parameters):
    """The sum divides weights @ values, as in MaxText."""

    def fun(p, x):
        q, k, v = projected(p, x)
        logits = logits_of(q, k)
        e = weights(jnp.exp(logits - top(logits)), p)
        y = jnp.broadcast_to(divided(heads(mixed(e, v)), e), (B, T, H, S))
        y = y.reshape(x.shape)
        if sites == 1:  # It is no exponential any more, which would be refused here.
            y = y @ x.mT @ x
        return loss_of(p, y), logits

    fun.__name__ = name
    attention(sites=sites, **QKVO | parameters)(fun)


def by(sum_of):
    return lambda y, e: y / jnp.moveaxis(sum_of(e), 1, 2)


for name, sites, sum_of in (
    ("a_sum", 1, own_sum),
    ("a_sum_and_numbers", 1, lambda e: jnp.maximum(own_sum(e), 1e-6) + 1e-6),
    ("a_sum_in_two_steps", OF_ALL, lambda e: own_sum(e).sum(1, keepdims=True)),
    ("a_sum_that_is_repeated_first", OF_ALL, lambda e: jnp.broadcast_to(sum_of_all(e), (B, H, T, 1)) + 1e-9),
    ("a_sum_in_a_loop_over_heads", NOT_ALL, sum_of_heads),
    ("a_sum_in_a_loop_without_gradient", NOT_ALL, lambda e: sum_of_heads(lax.stop_gradient(e))),
    ("the_largest_of_all_heads", OF_ALL, lambda e: e.max((1, 3), keepdims=True)),
    ("a_sum_without_gradient", OF_ALL, lambda e: lax.stop_gradient(sum_of_all(e))),
    ("products_with_ones", NOT_ITS_SUM, lambda e: jnp.einsum("bhqk,h->bqk", e @ ONES[:, :1], ONES[0, :H])[:, None]),
    ("the_sum_of_a_head_plus_that_of_all", OF_ALL, lambda e: own_sum(e) + sum_of_all(e)),
    ("a_sum_on_an_axis_of_examples_and_heads", OF_ALL, of_examples_and_heads),
    ("the_sums_of_other_heads", OF_ALL, lambda e: own_sum(e)[:, ::-1]),
    ("a_running_sum", NOT_ALL, lambda e: own_sum(e) + jnp.cumsum(own_sum(e), 1)),
):  # fmt: skip
    spelled(f"divided_by_{name}", sites, softmax=divided_by(sum_of))
    divided_late(
        f"divided_late_by_{name}", sites if sites == 1 else NOT_ITS_SUM, by(sum_of)
    )
divided_late("divided_late_by_a_root", NOT_ITS_SUM, by(lambda e: jnp.sqrt(own_sum(e))))
divided_late("divided_late_by_a_carried_sum", NOT_ITS_SUM, by(lambda e: lax.fori_loop(
    0, 2, lambda i, z: (own_sum(e), z[0]), (jnp.ones((B, H, T, 1)),) * 2)[1]))  # fmt: skip
divided_late("divided_late_by_sums_of_a_loop", NOT_ITS_SUM, by(lambda e: lax.map(
    lambda i: own_sum(e), jnp.arange(2)).sum(0)))  # fmt: skip
divided_late("all_heads_divided_late", NOT_ITS_SUM,
             lambda y, e: by(sum_of_all)(y.sum(2, keepdims=True), e))  # fmt: skip
divided_late("divided_late_twice", NOT_ITS_SUM, lambda y, e: by(
    lambda e: jnp.broadcast_to(sum_of_all(e), (B, H, T, S)) + 1e-9)(by(own_sum)(y, e), e))  # fmt: skip
divided_late("chosen_by_other_heads_and_divided_late", NOT_ITS_SUM, by(own_sum),
             lambda e, p: jnp.where(e > e.mean(1, keepdims=True), e, 1e-9))  # fmt: skip
divided_late("masked_and_divided_late", 1, by(own_sum), lambda e, p: e * CAUSAL)
divided_late("two_heads_added_and_divided_late", NOT_ITS_SUM, by(own_sum), lambda e, p: e + e[:, ::-1])  # fmt: skip


@attention(sites=1, **QKVO)
def weights_next_to_what_they_leave_over(p, x):
    """As where a query may attend to nothing."""
    q, k, v = projected(p, x)
    logits = logits_of(q, k)
    e = jnp.exp(logits)
    a = e / (1 + own_sum(e))
    a = jnp.concatenate([a, 1 - own_sum(a)], -1)
    v = jnp.concatenate([v, jnp.zeros((B, 1, H, S))], 1)
    return loss_of(p, mixed(a, v)), logits


def with_a_slot(sum_of):
    """Softmax of exponentials next to a sum of them, for a slot without values."""

    def softmax(logits, p):
        e = jnp.exp(logits)
        slot = jnp.broadcast_to(sum_of(e), (B, H, T, 1))
        return norm_1(jnp.concatenate([e, slot], -1))[..., :-1]

    return softmax


spelled("next_to_a_slot_of_its_head", softmax=with_a_slot(own_sum))  # fmt: skip
spelled("next_to_a_slot_of_all_heads", OF_ALL, softmax=with_a_slot(sum_of_all))  # fmt: skip
spelled("next_to_a_slot_of_all_heads_by_a_loop", NOT_ALL, softmax=with_a_slot(sum_of_heads))  # fmt: skip


@program(X, sites=(NOT_ALL, ""), **QKVO, r=(D, D), s=(D, D))
def queries_of_values_that_are_data(p, x):
    """The first attention mixes data, and is read by the second one's queries."""
    q, k, v, r = projected(p, x, "qkvr")
    mixture = jnp.einsum("bhqk,bkd->bqd", jax.nn.softmax(logits_of(q, k)), x)
    other = logits_of(r * mixture[:, :, None, :S], heads(x @ p["s"]))
    return loss_of(p, mixed(jax.nn.softmax(other), v))


@program(X, sites=(OF_ALL, NOT_ITS_SUM), **QKVO | dict.fromkeys("rs", (D, D)))
def divided_by_the_sum_of_two_attentions(p, x):
    q, k, v, r, s = projected(p, x, "qkvrs")
    e, f = jnp.exp(logits_of(q, k)), jnp.exp(logits_of(r, s))
    total = sum_of_all(e + f)
    return loss_of(p, mixed(e / total, v) + mixed(f / total, v))


@attention(sites=1, **QKVO)
def an_online_softmax(p, x):
    """A loop over blocks of keys, which carries the maximum, the sum and the weighted values."""
    q, k, v = projected(p, x)
    logits = logits_of(q, k)

    def block(carried, keys_and_values):
        largest, total, mixture = carried
        keys, values = keys_and_values
        scores = logits_of(q, keys)
        new = jnp.maximum(largest, scores.max(-1))
        e, faded = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
        mixture = mixture * faded[..., None] + jnp.einsum("bhqk,bkhd->bhqd", e, values)
        return (new, total * faded + e.sum(-1), mixture), None

    blocks = [jnp.moveaxis(y.reshape(B, 2, -1, H, S), 1, 0) for y in (k, v)]
    start = jnp.full((B, H, T), -jnp.inf), jnp.zeros((B, H, T)), jnp.zeros((B, H, T, S))
    (_, total, mixture), _ = lax.scan(block, start, blocks)
    y = jnp.moveaxis(mixture / total[..., None], 1, 2).reshape(x.shape)
    return loss_of(p, y), logits


@attention(
    sites=ELSE,
    w=((D, 2 * D), "0 | 1; 0 | 1 / 6, 6, 6, 6, 24 of 1"),
    more=((2 * D, D), "head"),
    **dict.fromkeys("kvo", (D, D)),
)
def queries_in_a_part_of_a_layer(p, x):
    """The other columns belong to no head, with a matrix for each."""
    y = x @ p["w"]
    k, v = projected(p, x, "kv")
    logits = logits_of(heads(y[..., :D]), k)
    return loss_of(p, mixed(jax.nn.softmax(logits), v)) + jnp.mean(
        (jnp.tanh(y) @ p["more"]) ** 2
    ), logits


def over_heads(shares, p):
    return jnp.einsum("bhqk,hg->bgqk", shares, p["mix"])


MIX = ((H, H), "0 | 1")
# DeepViT mixes heads after softmax, CaiT before it, too.
spelled("heads_mixed_after_softmax", softmax=lambda a, p: over_heads(jax.nn.softmax(a), p), mix=MIX)  # fmt: skip
divided_late(
    "heads_mixed_and_divided_late", NOT_ITS_SUM, by(own_sum), over_heads, mix=MIX
)
spelled("heads_mixed_before_the_division", OF_ALL, mix=MIX,
        softmax=lambda a, p: norm_1(over_heads(jnp.exp(a), p)))  # fmt: skip
spelled("heads_mixed_before_a_division_by_the_sums_of_heads", OF_ALL, mix=MIX,
        softmax=lambda a, p: over_heads(e := jnp.exp(a), p) / own_sum(e))  # fmt: skip
spelled("heads_mixed_between_two_divisions", mix=MIX,
        softmax=lambda a, p: norm_1(over_heads(jax.nn.softmax(a), p)))  # fmt: skip
spelled("heads_mixed_before_softmax", NOT_ALL, spell=over_heads, mix=MIX)
R, BIAS = constant((S, S), 9), constant((T, T), 3)
SPARSE = np.random.default_rng(5).random((B, H, T, T)) < 0.2
spelled("negative", spell=lambda a, p: -a)
spelled("zero_minus", ADDED, spell=lambda a, p: 0 - a)
spelled("subtracted", ELSE, spell=lambda a, p: 1.0 - a)
spelled("ones_beside_the_features", ELSE,
        lambda q, k, p, x: tuple(jnp.concatenate([z, jnp.ones_like(z)], -1) for z in (q, k)))  # fmt: skip
spelled("a_normalized_kernel", ELSE,
        weights=lambda p: p | {"q": p["q"] / jnp.linalg.norm(p["q"], axis=0)})  # fmt: skip
spelled(
    "a_function_of_the_kernel_of_the_keys",
    weights=lambda p: p | {"k": jnp.tanh(p["k"])},
)
spelled("a_function_of_the_kernel", ELSE,
        weights=lambda p: p | {"q": jnp.tanh(p["q"])})  # fmt: skip
spelled("added_to_a_frozen_kernel", ELSE,
        weights=lambda p: p | {"q": p["q"] + R[0, 0] * jnp.ones((D, D))})  # fmt: skip
spelled("keys_by_the_transposed_kernel", ELSE, weights=lambda p: p | {"k": p["q"].T})
ORDER = np.random.default_rng(0).permutation(D)
spelled("columns_in_a_constant_order", LOST_QUERIES,
        weights=lambda p: p | {"q": p["q"][:, ORDER]}, q=((D, D), GATHER))  # fmt: skip


def quantized(w):
    step = jnp.max(jnp.abs(w)) / 7
    return w + lax.stop_gradient(jnp.round(w / step) * step - w)


spelled("quantized_straight_through", ELSE,
        weights=lambda p: p | {"q": quantized(p["q"])})  # fmt: skip


def turned(z):
    """As llama-2-jax rotates: halves in the opposite order, and joined again."""
    halves = z.reshape(*z.shape[:-2], 2, -1, z.shape[-1])[..., ::-1, :, :]
    return 0.6 * z + 0.8 * halves.reshape(z.shape)


spelled("added_to_itself_in_another_order", IN_TURNS,
        lambda q, k, p, x: (turned(q), turned(k)))  # fmt: skip
spelled("a_function_of_the_bias", SEVERAL,
        lambda q, k, p, x: (q + jnp.exp(p["e"]) * jnp.ones((H, S)), k), e=())  # fmt: skip
spelled("a_bias_that_heads_share", SEVERAL,
        lambda q, k, p, x: (q + p["bias"], k), bias=(S,))  # fmt: skip
spelled(
    "a_bias_of_the_keys_that_heads_share",
    change=lambda q, k, p, x: (q, k + p["bias"]),
    bias=(S,),
)
spelled("queries_in_part_of_data", f"{ELSE}: attention_programs.py:", lambda q, k, p, x: (
        jnp.where((jnp.arange(T) < 2)[:, None, None], constant((T, H, S)), q), k))  # fmt: skip
spelled("keys_in_part_of_data", change=lambda q, k, p, x: (
        q, jnp.where((jnp.arange(T) < 2)[:, None, None], constant((T, H, S)), k)))  # fmt: skip
spelled("keys_padded_with_ones", change=lambda q, k, p, x: (
    q, lax.pad(k[:, 1:], 1.0, [(0, 0, 0), (1, 0, 0), (0, 0, 0), (0, 0, 0)])))  # fmt: skip
spelled("logits_in_part_learned", ADDED,
        spell=lambda a, p: jnp.where(jnp.eye(T, dtype=bool), p["mix"], a), mix=(T, T))  # fmt: skip
SHIFTED = "it can't be followed from parameters"
spelled(
    "without_the_maximum_of_other_heads",
    SHIFTED,
    spell=lambda a, p: a - a.max(1, keepdims=True),
)
spelled("without_a_multiple_of_the_maximum", SHIFTED,
        softmax=lambda a, p: jax.nn.softmax(a - 3 * top(a) * BIAS))  # fmt: skip


def of_halves(logits, p):
    """Softmax of the logits less their maximum, which differs from one half of the keys to the other."""
    halves = logits.reshape(B, H, T, 2, -1)
    powers = jnp.exp(halves - top(halves)).reshape(logits.shape)
    return norm_1(powers)


spelled("without_the_maximum_of_a_half", SHIFTED, softmax=of_halves)
spelled("a_maximum_under_a_mask", 1,
        softmax=lambda a, p: jax.nn.softmax(jnp.where(~CAUSAL, top(a), a)))  # fmt: skip
for name, change in {
    "logits_and_a_function_of_them": lambda a: a + jnp.tanh(a),
    "a_function_of_logits_and_them": lambda a: a[:, ::-1] + a,
    "few_bits": lambda a: lax.reduce_precision(a, 8, 3),
    "scaled_after_the_maximum": lambda a: (a - top(a)) / 2,
    "scaled_by_a_negative_number_after_a_mask": lambda a: (
        -(a + jnp.where(CAUSAL, 0.0, -1e9))
    ),
    "negative_after_a_choice": lambda a: -jnp.where(CAUSAL, a, -1e9),
    "the_maximum_less_them": lambda a: -(top(a) - a),
    "bounded_after_a_bias": lambda a: jnp.where(a + BIAS > 1, 1.0, a + BIAS),
}.items():
    spelled(name, ADDED, softmax=lambda a, p, f=change: jax.nn.softmax(f(a)))
spelled("cut_after_a_bias", ADDED, softmax=lambda a, p: jnp.concatenate([
    jax.nn.softmax(jnp.where(CAUSAL[:, :4], (a + BIAS)[..., :4], -1e9)), jnp.zeros((B, H, T, T - 4))], -1))  # fmt: skip
spelled("a_difference_of_two_softmaxes", ADDED,
        softmax=lambda a, p: jax.nn.softmax(a) - 0.5 * jax.nn.softmax((a + 1.0) * 2))  # fmt: skip
for power in (2, 1.5):
    spelled(f"the_weights_to_the_power_{power}", NOT_ALL,
            softmax=lambda a, p, y=power: jax.nn.softmax(a) ** y)  # fmt: skip
spelled(
    "powers_of_the_logits", 0, softmax=lambda a, p: norm_1(lax.pow(jnp.abs(a), 3.0))
)
spelled("a_power_beside", ADDED,
        softmax=lambda a, p: jax.nn.softmax(a) + lax.pow(jnp.full_like(a, 2.0), 5 * a))  # fmt: skip
spelled("another_softmax_after_a_change_in_place", ADDED,
        softmax=lambda a, p: jax.nn.softmax(a) + jax.nn.softmax(a.at[..., 0].add(-3.0)))  # fmt: skip
spelled(
    "a_learned_mask",
    spell=lambda a, p: jnp.where(p["mix"] > 0, a, -jnp.inf),
    mix=(T, T),
)
spelled("weights_put_together_of_their_halves", NOT_ALL, softmax=lambda a, p: jnp.concatenate(
    jnp.split(jax.nn.softmax(a), 2, 2), 2))  # fmt: skip
spelled("a_mask_that_was_rounded_to_bfloat16", kept=SPARSE, softmax=lambda a, p: (
    jax.nn.softmax(a + jnp.where(SPARSE, 0, -1e4).astype("bfloat16"))))  # fmt: skip


def by_powers_below_one(logits, p):
    logits = logits * np.log2(np.e)
    powers = jnp.exp2(logits - lax.stop_gradient(top(logits)))
    return norm_1(powers)


spelled("powers_of_two", ADDED, softmax=by_powers_below_one)


def by_a_maximum_with_a_floor(logits, p):
    largest = lax.stop_gradient(top(logits))
    weights = jnp.exp(logits - jnp.maximum(largest, -1000.0))
    return norm_1(weights)


spelled("a_maximum_with_a_floor", softmax=by_a_maximum_with_a_floor)
spelled("a_matrix_that_mixes_the_logits_of_heads", NOT_ALL, mix=(H, H),
        softmax=lambda a, p: jax.nn.softmax(jnp.einsum("bhtu,hg->bgtu", a, p["mix"])))  # fmt: skip


@attention(sites=1, **QKVO)
def masked_before_it_is_divided(p, x):
    q, k, v = projected(p, x)
    return end(p, (logits_of(q, k) + jnp.where(CAUSAL, 0.0, -jnp.inf)) / 2, v)


# What would change where a parameter is scaled: of the kernel, of the queries, of the logits.

spelled(
    "divided_by_the_norm_of_the_kernel",
    None,
    lambda q, k, p, x: (q / jnp.linalg.norm(p["q"]), k),
)
spelled(
    "logits_divided_by_a_norm", None, spell=lambda a, p: a / jnp.linalg.norm(p["q"])
)
spelled("the_reciprocal_of_the_logits", None, spell=lambda a, p: 1 / a)
spelled("rectified_logits", spell=lambda a, p: jax.nn.relu(a))
spelled("the_square_of_the_logits", None, spell=lambda a, p: a * a)
spelled(
    "logits_cast_to_int",
    0,  # No gradient comes back to queries and keys.
    spell=lambda a, p: (9 * a).astype(jnp.int32).astype(jnp.float32),
)
spelled("queries_cast_to_float8", None,
        lambda q, k, p, x: (q.astype(jnp.float8_e4m3fn).astype(jnp.float32), k))  # fmt: skip
spelled("queries_times_their_sign", None, lambda q, k, p, x: (q * jnp.sign(q), k))
spelled(
    "queries_relative_to_the_first_head", None, lambda q, k, p, x: (q - q[:, :, :1], k)
)
spelled("a_gate_by_the_sum_of_squares", ELSE,
        more=lambda q, k, p, x: jnp.mean(x * jnp.sum(q**2, (2, 3))[..., None]))  # fmt: skip
spelled("a_gate_by_the_largest_query", ELSE,
        more=lambda q, k, p, x: jnp.mean(x * jnp.max(q, (2, 3))[..., None]))  # fmt: skip
spelled("a_penalty_on_the_queries", ELSE, more=lambda q, k, p, x: 1e-2 * jnp.sum(q**2))
spelled("a_sum_of_the_keys", more=lambda q, k, p, x: jnp.sum(k))
spelled("a_sum_of_the_queries", ELSE, more=lambda q, k, p, x: jnp.sum(q))
spelled("a_penalty_on_parameters_in_a_loop", ELSE,
        more=lambda q, k, p, x: lax.scan(lambda c, row: (c + jnp.sum(row**2), None), 0.0, p["q"])[0])  # fmt: skip


# Keys that a clip can't scale leave the whole factor to the queries, if these alone can take it.

spelled("normalized_keys", change=lambda q, k, p, x: (q, norm(k)))
spelled("keys_normalized_over_all_heads", change=lambda q, k, p, x: (
    q, heads(norm(k.reshape(x.shape)))))  # fmt: skip
spelled("normalized_keys_and_a_penalty_on_the_queries", ELSE,
        lambda q, k, p, x: (q, norm(k)), more=lambda q, k, p, x: jnp.mean(q**2))  # fmt: skip
spelled("queries_normalized_over_all_heads", "all columns of a parameter", lambda q, k, p, x: (
    heads(norm((y := q.reshape(x.shape)) - y.mean(-1, keepdims=True))), k))  # fmt: skip
spelled(
    "normalized_queries_and_keys", "integer_pow", lambda q, k, p, x: (norm(q), norm(k))
)
spelled("keys_that_are_a_gate_too", more=lambda q, k, p, x: jnp.mean(jax.nn.sigmoid(k)))
spelled("keys_made_of_queries", "integer_pow", lambda q, k, p, x: (q, k + norm(q)))
spelled("keys_of_the_kernel_of_the_queries", "integer_pow",
        lambda q, k, p, x: (q, norm(heads(x @ p["q"]))))  # fmt: skip
spelled(
    "keys_of_queries_with_a_bias",
    "(add)",
    lambda q, k, p, x: (q + p["b"], k + q),
    b=(H, S),
)
spelled("normalized_keys_and_a_bias_of_the_queries", 1,
        lambda q, k, p, x: (q + p["b"], norm(k)), b=(H, S))  # fmt: skip
spelled("normalized_keys_and_a_constant_beside_the_queries", ELSE, lambda q, k, p, x: (
    jnp.concatenate([q, jnp.ones_like(q)], -1), jnp.concatenate([norm(k), norm(k)], -1)))  # fmt: skip


@attention(sites=1, qkv=((D, 3 * D), "0 | 1 / 3 of 1"), o=(D, D))
def a_fused_kernel_with_normalized_keys(p, x):
    q, k, v = map(heads, jnp.split(x @ p["qkv"], 3, -1))
    return end(p, logits_of(q, norm(k)), v)


# Padded to a length of its own, as for a kernel or for blocks.


def longer(y, before=1, after=2, value=0.0):
    """Tokens of this value before and after."""
    return jnp.pad(y, ((0, 0), (before, after), (0, 0), (0, 0)), constant_values=value)


def padded(name, sites, queries, keys, kept=None, **parameters):
    """`queries` and `keys` pad those of T tokens; the loss takes T of the values that are mixed."""

    def fun(p, x):
        q, k, v = projected(p, x)
        q, k = queries(q, p), keys(k, p)
        logits = logits_of(q, k)
        shares = jax.nn.softmax(
            logits if kept is None else jnp.where(kept, logits, -1e9)
        )
        y = mixed(shares, longer(v, 1, k.shape[1] - T - 1) if k.shape[1] > T else v)
        return loss_of(p, y[:, :T]), logits if kept is None else jnp.where(
            kept, logits, -jnp.inf
        )

    fun.__name__ = name
    attention(sites=sites, **QKVO | parameters)(fun)


THERE = (np.arange(T + 3) >= 1) & (np.arange(T + 3) < T + 1)
padded(
    "padded_queries_and_keys_under_a_mask",
    1,
    lambda q, p: longer(q),
    lambda k, p: longer(k),
    THERE,
)
padded(
    "a_bias_after_the_padding",
    1,
    lambda q, p: longer(q) + p["b"],
    lambda k, p: longer(k),
    b=(H, S),
)
padded(
    "a_zero_key",
    1,
    lambda q, p: q,
    lambda k, p: jnp.concatenate([0 * k[:, :1], k, 0 * k[:, :1]], 1),
)
padded(
    "keys_padded_with_ones_under_a_mask",
    1,
    lambda q, p: q,
    lambda k, p: longer(k, value=1.0),
    THERE,
)
padded(
    "queries_padded_with_ones",
    IN_TURNS,
    lambda q, p: longer(q, value=1.0),
    lambda k, p: k,
)
padded(
    "a_number_after_the_padding", "(add)", lambda q, p: longer(q) + 1.0, lambda k, p: k
)
padded("queries_beside_others", IN_TURNS, lambda q, p: (
    jnp.concatenate([q, jnp.broadcast_to(p["b"], (B, 3, H, S))], 1)), lambda k, p: k, b=(3, H, S))  # fmt: skip


@attention(sites=1, **QKVO)
def blocks_of_padded_queries(p, x):
    q, k, v = projected(p, x)
    blocks = longer(q, 0, 4).reshape(B, 3, 4, H, S).swapaxes(0, 1)
    y, logits = lax.map(lambda q: (attended(q, k, v), logits_of(q, k)), blocks)
    y, logits = y.swapaxes(0, 1).reshape(B, 12, D)[:, :T], jnp.concatenate([*logits], 2)
    return loss_of(p, y), logits[:, :, :T]


@attention(sites=1, **QKVO)
def a_zero_logit(p, x):
    """Softmax with a one in its denominator."""
    q, k, v = projected(p, x)
    logits = jnp.pad(logits_of(q, k), ((0, 0), (0, 0), (0, 0), (0, 1)))
    return loss_of(p, mixed(jax.nn.softmax(logits)[..., :-1], v)), logits


# Heads and features in another order.

GATHERED = jnp.array([1, 0, 3, 2])
CUT = dict.fromkeys("qkv", ((D, D), "0 | 1; 0 | 1 / 4 of 1"))
spelled(
    "rolled", None, lambda q, k, p, x: (jnp.roll(q, 1, 2), jnp.roll(k, 1, 2)), **CUT
)
spelled("flipped_queries", None, lambda q, k, p, x: (jnp.flip(q, 2), k))
spelled("heads_added_up", None, lambda q, k, p, x: (q + jnp.flip(q, 2), k))
# Queries take the whole factor where the keys do not train.
spelled("keys_without_gradient", 1, lambda q, k, p, x: (q, lax.stop_gradient(k)))
spelled("keys_of_a_constant_kernel", 1,
        lambda q, k, p, x: (q, heads(x @ constant((D, D)))))  # fmt: skip
spelled(
    "keys_written_into_a_cache",
    1,
    lambda q, k, p, x: (q, lax.dynamic_update_slice(0 * k, k, (0, 0, 0, 0))),
)
spelled("queries_without_gradient", LOST_QUERIES,
        lambda q, k, p, x: (lax.stop_gradient(q), k))  # fmt: skip
spelled(
    "keys_in_another_order_by_gather",
    None,
    lambda q, k, p, x: (q, k[:, :, GATHERED]),
    k=((D, D), GATHER),
)


def across_heads(y):
    """A rotation of all features of all heads at once: it joins the halves of different heads."""
    y = y.reshape(B, T, H * S)
    first, second = jnp.split(y, 2, -1)
    return heads(0.6 * y + 0.8 * jnp.concatenate([-second, first], -1))


def rotated(x, count):
    """A rotary embedding of neighboring features, of the first `count`."""
    angles = np.arange(x.shape[1])[:, None] / np.arange(1, count // 2 + 1)
    cos, sin = (
        np.repeat(np.cos(angles), 2, -1)[:, None],
        np.repeat(np.sin(angles), 2, -1)[:, None],
    )
    first, rest = x[..., :count], x[..., count:]
    half = jnp.stack([-first[..., 1::2], first[..., ::2]], -1).reshape(first.shape)
    return jnp.concatenate([first * cos + half * sin, rest], -1)


spelled(
    "a_rotation_across_heads",
    None,
    lambda q, k, p, x: (across_heads(q), across_heads(k)),
)
for count in (S, 4):  # RoFormer; GPT-J, which rotates some of them
    spelled(f"a_rotation_of_{count}_neighboring_features",
            change=lambda q, k, p, x, n=count: (rotated(q, n), rotated(k, n)))  # fmt: skip
spelled("a_rotation_of_all_tokens_but_the_first", change=lambda q, k, p, x: (  # DINOv3
    jnp.concatenate([z[:, :1], rotated(z, S)[:, 1:]], 1) for z in (q, k)))  # fmt: skip


def turned_heads(order):
    """Queries and keys with axes [batch, position, head, head, feature] in another order, and heads merged again."""

    def change(q, k, p, x):
        return [
            y.reshape(B, T, 2, 2, S).transpose(order).reshape(B, T, H, S)
            for y in (q, k)
        ]

    return change


for order in [(0, 1, 2, 4, 3), (0, 1, 4, 3, 2)]:
    spelled(
        f"heads_in_the_order_{''.join(map(str, order[2:]))}", None, turned_heads(order)
    )


@attention(sites=None, **QKVO)
def an_order_by_reshape(p, x):
    """A reshape with `dimensions` merges two axes of heads."""
    q, k, v = (
        lax.reshape(
            (x @ p[n]).reshape(B, T, 2, 2, S), (B, T, H, S), dimensions=(0, 1, 3, 2, 4)
        )
        for n in "qkv"
    )
    return end(p, logits_of(q, k), v)


# Something else reads the logits.


def reading(term, name, sites=ADDED):
    """A loss with a further term, made of the logits."""

    def fun(p, x):
        q, k, v = projected(p, x)
        logits = logits_of(q, k)
        return end(p, logits, v)[0] + term(logits), logits

    fun.__name__ = name
    attention(sites=sites, **QKVO)(fun)


reading(lambda x: x.max(-1).std(), "a_penalty_on_the_largest")
reading(
    lambda x: lax.fori_loop(0, 2, lambda _, m: m / 2, x.max(-1)).std(),
    "a_penalty_in_a_loop",
)
reading(lambda x: running_maxima(x)[1].std(), "a_penalty_on_running_maxima")
reading(
    lambda x: running_maxima(lax.stop_gradient(x))[1].std(),
    "running_maxima_for_a_log",
    sites=1,
)
reading(
    lambda x: running_maxima(lax.stop_gradient(x), lambda m: m[..., ::-1])[0].std(),
    "maxima_that_a_loop_reverses",
    sites=1,
)
reading(lambda x: jax.nn.softmax(x + x.mT).std(), "the_next_layer_adds_them")
reading(lambda x: jax.nn.log_softmax(x / 2).mean(), "another_temperature")
reading(lambda x: lax.stop_gradient(x.max()), "a_number_for_a_log", sites=1)


@attention(sites=1, **QKVO)
def a_statistic_of_the_weights(p, x):
    """It sums weights over heads and keys, and no softmax divides by that."""
    q, k, v = projected(p, x)
    logits = logits_of(q, k)
    shares = jax.nn.softmax(logits)
    return loss_of(p, mixed(shares, v)) + shares.std(), logits


TEACHER = "a clip would change a copy of its parameters under stop_gradient too: "


@attention(sites=TEACHER, **QKVO)
def a_teacher_of_the_same_parameters(p, x):
    def attend(p, x):
        q, k, v = projected(p, x)
        return attended(q, k, v), logits_of(q, k)

    y, logits = attend(p, x)
    target, _ = attend(lax.stop_gradient(p), x[::-1])
    return jnp.mean((y @ p["o"] - target) ** 2), logits


# Heads one by one, in the batch, in pairs.


def of_each_head(p, y, logits):
    """From [heads, batch, ...]."""
    y = y.transpose(1, 2, 0, 3).reshape(B, T, -1)
    return loss_of(p, y), logits.swapaxes(0, 1)


@attention(sites="a loop goes over a part of an axis of its parameter", **QKVO)
def heads_scanned_with_their_columns(p, x):
    w = [p[n].reshape(D, H, S).swapaxes(0, 1) for n in "qkv"]

    def head(_, w):
        q, k, v = (x @ y for y in w)
        return None, (jax.nn.softmax(q @ k.mT) @ v, q @ k.mT)

    return of_each_head(p, *lax.scan(head, None, w)[1])


@attention(sites=None, **QKVO)
def heads_mapped_two_by_two(p, x):
    q, k, v = projected(p, x)

    def pair(i):
        a, b, c = (lax.dynamic_slice_in_dim(y, 2 * i, 2, 2) for y in (q, k, v))
        logits = logits_of(a, b)
        return mixed(jax.nn.softmax(logits), c), logits

    y, logits = lax.map(pair, jnp.arange(2))
    y = jnp.moveaxis(y, 0, 2).reshape(B, T, -1)
    return loss_of(p, y), jnp.moveaxis(logits, 0, 1).reshape(B, H, T, T)


KERNELS = {"o": (D, D), **{f"{n}{h}": (D, S) for n in "qkv" for h in range(H)}}


@attention(sites=None, **KERNELS)
def heads_of_a_kernel_each_and_one_key(p, x):
    q, k, v = (jnp.stack([x @ p[f"{n}{h}"] for h in range(H)], 2) for n in "qkv")
    return end(p, logits_of(q, jnp.broadcast_to(k[:, :, :1], k.shape)), v)


def of_one_head_each(name, count, put_together):
    """Kernels of one head each: put together into heads, or into the features of one."""

    def fun(p, x):
        q, k, v = (
            put_together([x @ p[f"{n}{i}"] for i in range(count)]) for n in "qkv"
        )
        logits = logits_of(q, k)
        return jnp.mean(mixed(jax.nn.softmax(logits), v) ** 2), logits

    fun.__name__ = f"{name}_of_{count}"
    attention(sites=None, **{f"{n}{i}": (D, S) for n in "qkv" for i in range(count)})(
        fun
    )


of_one_head_each(
    "concatenated_kernels", 3, lambda y: jnp.concatenate(y, -1).reshape(B, T, 3, S)
)
for name, put_together in {
    "concatenated_kernels_side_by_side": lambda y: (
        jnp.stack(y, -1).reshape(B, T, -1).reshape(B, T, S, -1).mT
    ),
    "features_of_a_kernel_each": lambda y: jnp.concatenate(y, -1)[:, :, None],
}.items():
    of_one_head_each(name, 3, put_together)


@attention(sites=1, b=(), **QKVO)
def one_head_with_a_bias_of_one_number(p, x):
    q, k, v = (heads(x @ p[name], 1) for name in "qkv")
    return end(p, logits_of(q + p["b"], k), v)


@attention(sites=1, q=(1, 1, D, D), k=(1, 1, D, D), v=(D, D), o=(D, D))
def queries_by_convolutions(p, x):
    """As in the autoencoder of Stable Diffusion."""

    def convolved(kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x.reshape(B, 2, T // 2, D),
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=numbers,
        )
        return heads(y.reshape(B, T, D))

    return end(p, logits_of(convolved(p["q"]), convolved(p["k"])), heads(x @ p["v"]))


@attention(
    sites=1, qa=(D, H * 4), qb=(D, H * 2), a=(D, H * 4), b=(D, 2), v=(D, D), o=(D, D)
)
def features_of_a_kernel_each(p, x):
    """Some of the keys' features belong to a head, and all heads share the others."""
    q = jnp.concatenate([heads(x @ p["qa"]), heads(x @ p["qb"])], -1)
    k = jnp.concatenate([heads(x @ p["a"]), jnp.repeat(heads(x @ p["b"], 1), H, 2)], -1)
    return end(p, logits_of(q, k), heads(x @ p["v"]))


@attention(sites=1, **QKVO)
def heads_and_batch_in_one_axis(p, x):
    """As ported from `torch.bmm`: products with one axis for examples and heads."""
    q, k, v = (y.swapaxes(1, 2).reshape(B * H, T, S) for y in projected(p, x))
    logits = jnp.where(CAUSAL, q @ k.mT, -1e9)
    y = (jax.nn.softmax(logits) @ v).reshape(B, H, T, S).swapaxes(1, 2)
    logits = jnp.where(CAUSAL, logits.reshape(B, H, T, T), -jnp.inf)
    return loss_of(p, y.reshape(x.shape)), logits


@attention(sites=2, **QKVO)
def two_attentions_of_disjoint_features_of_every_head(p, x):
    """Differential attention."""
    q, k, v = projected(p, x)
    one, two = (
        logits_of(a, b)
        for a, b in zip(jnp.split(q, 2, -1), jnp.split(k, 2, -1), strict=True)
    )
    y = mixed(jax.nn.softmax(one) - 0.3 * jax.nn.softmax(two), v)
    return loss_of(p, y), jnp.concatenate([one, two], 1)


# Queries that share a key head: side by side, or in turns.


@attention(sites=1, q=(D, D), k=(D, D // 2), v=(D, D // 2), o=(D, D))
def tiled_keys(p, x):
    q, k, v = (heads(x @ p[n], H if n == "q" else H // 2) for n in "qkv")
    k, v = (jnp.tile(y, (1, 1, 2, 1)) for y in (k, v))
    return end(p, logits_of(q, k), v)


def grouped(
    p, x, turn=lambda q: q, move=lambda a: a, soften=jax.nn.softmax, gate=1.0, kept=None
):
    """Two queries for each key head, whose logits have one axis of heads."""
    q, k, v = (jnp.einsum("btd,dhs->bths", x, p[name]) for name in "qkv")
    q = turn(q).reshape(B, T, 2, 2, S)
    products = jnp.einsum("btkgs,buks->bkgtu", q, turn(k))
    logits = move(products)
    shares = soften(logits.reshape(B, H, *logits.shape[-2:])).reshape(products.shape)
    y = jnp.einsum("bkgtu,buks->btkgs", shares, v).reshape(B, T, H, S) * gate
    loss = jnp.mean((jnp.einsum("bths,hsd->btd", y, p["o"]) @ p["out"]) ** 2)
    logits = products.reshape(B, H, T, T)
    return loss, logits if kept is None else jnp.where(kept, logits, -jnp.inf)


GROUPED = {
    "q": ((D, H, S), "0 | 1, 2; 0 | 2"),
    "k": ((D, 2, S), "0 | 1, 2; 0 | 2"),
    "v": (D, 2, S),
    "o": ((H, S, D), "0, 1 | 2"),
    **OUT,
}


@attention(sites=1, **GROUPED)
def a_mask_after_a_reshape(p, x):
    """Tunix's Llama."""
    return grouped(
        p, x, soften=lambda a: jax.nn.softmax(jnp.where(CAUSAL, a, -1e9)), kept=CAUSAL
    )


@attention(sites="something is added to its logits before their axes change", **GROUPED)
def a_bias_before_a_transpose(p, x):
    return grouped(
        p,
        x,
        move=lambda a: (a + 5.0 * jnp.arange(T)).swapaxes(1, 2),
        soften=lambda a: jax.nn.softmax(jnp.where(CAUSAL, a, -1e9)),
    )


SINKS = GROUPED | {"sinks": ((H,), "")}


def beside(logits, sinks):
    return jnp.concatenate(
        [logits, jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))], -1
    )


@attention(sites=1, **SINKS)
def sinks_beside_the_logits(p, x):
    """gpt-oss: a learned logit for each head, next to those of the keys."""
    return grouped(
        p, x, soften=lambda a: jax.nn.softmax(beside(a, p["sinks"]))[..., :-1]
    )


@attention(sites=1, **SINKS)
def sinks_in_the_sum(p, x):
    """Its kernels: the sink takes part in the maximum and in the sum."""

    def soften(logits):
        sinks = p["sinks"][:, None, None]
        largest = jnp.maximum(top(logits), sinks)
        shares = jnp.exp(logits - largest)
        return shares / (own_sum(shares) + jnp.exp(sinks - largest))

    return grouped(p, x, soften=soften)


@attention(sites="integer_pow", **GROUPED)
def normalized_queries_of_shared_keys(p, x):
    """Qwen3: a norm of each head's queries differs along heads and not along features, as an expert's gate does."""
    return grouped(p, x, turn=norm)


@attention(sites=1, gate=((D, H), "0 | 1"), **GROUPED)
def a_sum_of_each_head_that_divides_last(p, x):
    """As in MaxText: `o` stays one matrix."""
    return grouped(p, x, gate=1 / jnp.abs(x @ p["gate"])[..., None])


@attention(sites=1, **QKVO | dict.fromkeys("qk", (D, S, H)))
def heads_last(p, x):
    q, k = (jnp.einsum("btd,dsh->bths", x, p[n]) for n in "qk")
    return end(p, logits_of(q, k), heads(x @ p["v"]))


# One kernel of queries, keys and values.


def fused_groups(name, groups, count, turn=0, sites=1):
    """Falcon and Megatron: `count` queries, a key and a value for each group, in turns; `turn` puts others first."""

    def fun(p, x):
        y = jnp.roll(
            (x @ p["qkv"] + p["b"]).reshape(B, T, groups, count + 2, S), -turn, 3
        )
        q, k, v = y[..., :count, :], y[..., count, :], y[..., count + 1, :]
        logits = jnp.einsum("bqgnd,bkgd->bgnqk", q, k)
        z = jnp.einsum("bgnqk,bkgd->bqgnd", jax.nn.softmax(logits), v).reshape(B, T, -1)
        return jnp.mean((z @ p["o"]) ** 2), logits.reshape(B, groups * count, T, T)

    fun.__name__ = name
    width = groups * (count + 2) * S
    attention(sites=sites, qkv=(D, width), b=(width,), o=(groups * count * S, D))(fun)


fused_groups("fused_groups", 2, 2)
fused_groups("fused_groups_of_three", 3, 3)
fused_groups("fused_groups_with_the_key_first", 2, 2, 2)
fused_groups("fused_groups_with_the_key_last", 2, 3, 1)


@attention(sites=1, qkv=((D, 3, H, S), "0 | 2, 3; 0 | 3"))
def parts_taken_by_an_index(p, x):
    """Haliax unbinds them by `jnp.take`, a gather whose index is compared with zero first."""
    qkv = jnp.einsum("btd,dnhs->btnhs", x, p["qkv"])
    q, k, v = (jnp.take(qkv, i, axis=2) for i in (-3, 1, 2))
    return jnp.mean(attended(q, k, v) ** 2), logits_of(q, k)


def cut_before_products(p, x, count):
    """PyTorch's `in_proj_weight`: a slice that has a product of its own is a matrix."""
    width = D // count
    q, k, v = (
        jnp.concatenate(
            [x @ p["qkv"][i * D + h * width :][:width].T for h in range(count)], -1
        )
        for i in range(3)
    )
    return end(p, logits_of(heads(q), heads(k)), heads(v))


@attention(sites=1, qkv=((3 * D, D), "1 | 0 / 3 of 0"), o=(D, D))
def parts_cut_before_their_products(p, x):
    return cut_before_products(p, x, 1)


@attention(sites=None, qkv=((3 * D, D), "1 | 0 / 12 of 0"), o=(D, D))
def heads_cut_before_their_products(p, x):
    return cut_before_products(p, x, H)


# Several inputs, several products, several uses.


@attention(sites=1, **QKVO)
def one_kernel_on_two_inputs(p, x):
    q, k, v = projected(p, x)
    return end(p, logits_of(q + heads(jnp.tanh(x) @ p["q"]), k), v)


@program(X, sites=ADDED, c=(D, D), **QKVO)
def one_softmax_of_two_products(p, x):
    """Keys of two kinds, such as local and compressed ones."""
    q, k, v, c = projected(p, x, "qkvc")
    logits = jnp.concatenate([logits_of(q, keys) for keys in (k, c)], -1)
    return end(p, logits, jnp.concatenate([v, v], 1))[0]


def relative_positions(p, x, shift, terms="bqhd,khd->bhqk"):
    """Transformer-XL."""
    q, k, v = projected(p, x)
    r = heads(jnp.sin(jnp.arange(T)[:, None] * jnp.arange(1.0, D + 1)) @ p["r"])
    by_place = shift(jnp.einsum(terms, q + p["w"], r))
    return end(p, logits_of(q + p["u"], k) + by_place, v)


RELATIVE = {"r": (D, D), "u": (H, S), "w": (H, S)} | QKVO


@attention(sites=1, **RELATIVE)
def relative_positions_shifted_by_a_reshape(p, x):
    def shift(a):
        padded = jnp.pad(a, [(0, 0)] * 3 + [(1, 0)])
        return padded.reshape(B, H, T + 1, T)[:, :, 1:].reshape(a.shape)

    return relative_positions(p, x, shift)


@attention(sites=ADDED, **RELATIVE)
def relative_positions_by_a_roll(p, x):
    return relative_positions(p, x, lambda a: jnp.roll(a, 1, -1))


@attention(sites=1, qv=((D, 2 * D), "0 | 1 / 2 of 1"), k=(D, D), r=(D, D), o=(D, D))
def queries_and_values_of_one_kernel_and_two_keys(p, x):
    """The same columns meet both keys: they are one part, and the values another one."""
    q, v = jnp.split(heads(x @ p["qv"], 2 * H), 2, 2)
    k, r = projected(p, x, "kr")
    return end(p, logits_of(q, k) + logits_of(q, r), v)


@program(X, X, sites="takes derivatives of it", **QKVO)
def a_derivative_of_an_attention(p, x, v):
    """MeanFlow's: the logits' derivative gets the factor too."""
    y, derivative = jax.jvp(lambda x: layer(p, x), (x,), (v,))
    return jnp.mean((y - lax.stop_gradient(derivative)) ** 2)


@program(
    X,
    sites=1,
    qkv=((D, 3 * H, S), "0 | 1, 2 / 3 of 1; 0 | 2"),
    o=((D, D), "0 | 1"),
    out=((D, 1), "head"),
)
def queries_keys_and_values_along_the_axis_of_heads(p, x):
    q, k, v = jnp.split(jnp.einsum("btd,dhs->bths", x, p["qkv"]), 3, 2)
    y = attended(q, k, v)
    return jnp.mean((y @ p["o"] @ p["out"]) ** 2)


MINUS_ONES = np.full((1, H, 1, 1), -1, np.float32)
spelled("a_mask_before_negative_factors", ELSE,
        spell=lambda a, p: (a + jnp.where(CAUSAL, 0.0, -1e9)) * MINUS_ONES)  # fmt: skip
spelled("a_choice_before_negative_factors", ELSE,
        spell=lambda a, p: jnp.where(CAUSAL, a, -1e9) / MINUS_ONES)  # fmt: skip


TERMS = [f"w{i}" for i in range(8)]


@program(
    X, sites=f"{ELSE}: attention_programs.py:", **dict.fromkeys(TERMS, (D, D)), **QKVO
)
def queries_that_end_a_long_sum(p, x):
    q, k, v = projected(p, x)
    total = sum(x @ p[name] for name in TERMS) + q.reshape(x.shape)
    return end(p, logits_of(q, k), v)[0] + loss_of(p, total)


@program(X, sites=1, v2=(D, D), k2=(D, D), **QKVO)
def a_kernel_of_the_queries_of_two_attentions(p, x):
    """Its statistic is the larger one of both, and it takes the whole factor."""
    q, k, v = projected(p, x)
    k2, v2 = projected(p, x, ("k2", "v2"))
    y = attended(q, k, v) + attended(q, k2, v2)
    return loss_of(p, y)


@program(X, sites=("", "(exp)"), v2=(D, D), q2=(D, D), **QKVO)
def keys_of_one_attention_that_are_queries_of_another(p, x):
    q, k, v = projected(p, x)
    q2, v2 = projected(p, x, ("q2", "v2"))
    y = attended(q, k, v) + attended(k, q2, v2)
    return loss_of(p, y)


@attention(sites=1, **QKVO)
def a_mask_in_one_branch(p, x):
    q, k, v = projected(p, x)
    hide = lambda s: jnp.where(CAUSAL, s, -jnp.inf)  # noqa: E731
    logits = lax.cond(x[0, 0, 0] > 0, hide, lambda s: s, logits_of(q, k))
    return end(p, logits, v)


@program(X, sites=1, K=(D, D), **QKVO)
def queries_of_both_branches(p, x):
    """Each has keys of its own."""
    return loss_of(
        p, lax.cond(x[0, 0, 0] > 0, layer, lambda p, x: layer(p, x, "qKvo"), p, x)
    )


@program(X, sites="(gt)", **QKVO)
def a_branch_that_queries_choose(p, x):
    return loss_of(p, lax.cond((x @ p["q"])[0, 0, 0] > 1, layer, lambda p, x: x, p, x))


@program(X, sites="of unknown length", **QKVO)
def a_loop_of_unknown_length(p, x):
    y = lax.while_loop(lambda y: y[0, 0, 0] > 1, lambda y: layer(p, y), x)
    return loss_of(p, y)


@program(X, sites=("learned bias", "learned bias"), bias=(H, T, T),
         **{f"layer{i}/{n}": (D, D) for i in range(2) for n in "qkvo"})  # fmt: skip
def attentions_of_one_line(p, x):
    """T5's layers: one line of code for all of them."""
    for name in ("layer0", "layer1"):
        q, k, v = projected(p[name], x)
        x = x + mixed(jax.nn.softmax(logits_of(q, k) + p["bias"]), v) @ p[name]["o"]
    return jnp.mean(x**2)


@program(
    X,
    sites=1,
    v=(D, D),
    o=(D, D),
    **{"q/kernel": (D, D), "q/gate": (D, D), "k/kernel": (D, D)},
)
def a_gate_beside_the_kernel_of_the_queries(p, x):
    """As of two towers in one dictionary: it is not refused by its name."""
    flat = {"q": p["q"]["kernel"], "k": p["k"]["kernel"], "v": p["v"], "o": p["o"]}
    return jnp.mean((layer(flat, x) * jax.nn.silu(x @ p["q"]["gate"])) ** 2)


@program(
    X, sites=NOT_ALL, query=((D,), CHAIN), **MATRICES | {"q": ((D, D), CHAIN)}, **OUT
)
def one_learned_query_of_all_examples(p, x):
    """Pooling by attention: queries made of parameters alone, with no axis that counts them."""
    shares = jax.nn.softmax(
        jnp.einsum("d,bkd->bk", p["query"] @ p["q"], x @ p["k"]) / np.sqrt(D)
    )
    return jnp.mean(
        (jnp.einsum("bk,bkd->bd", shares, x @ p["v"]) @ p["o"] @ p["out"]) ** 2
    )


@program(
    X,
    sites=NOT_ALL,
    table=((5, D), CHAIN),
    **MATRICES | dict.fromkeys("kv", ((D, D), CHAIN)),
    **OUT,
)
def a_table_without_its_mean(p, x):
    """DeBERTa's relative positions: the mean that is subtracted is no parameter of its own."""
    table = p["table"] - jnp.mean(p["table"], -1, keepdims=True)
    q, k, v = heads(x @ p["q"]), heads(table @ p["k"]), heads(table @ p["v"])
    shares = jax.nn.softmax(jnp.einsum("bqhd,khd->bhqk", q, k))
    y = jnp.einsum("bhqk,khd->bqhd", shares, v).reshape(x.shape)
    return jnp.mean((y @ p["o"] @ p["out"]) ** 2)


@attention(
    sites="something is added to its logits in a function that does not return them without it",
    **QKVO,
)
def a_bias_inside_of_another_function(p, x):
    q, k, v = projected(p, x)
    biased = jax.jit(lambda q, k: logits_of(q, k) + 5.0 * jnp.arange(T))
    return end(p, jnp.where(CAUSAL, biased(q, k), -1e9), v)


@program(X, sites="takes derivatives of it", **QKVO)
def the_local_energy_of_an_attention(p, x):
    """Psiformer: the loss is made of derivatives by the input."""
    slope = jax.grad(lambda x: jnp.sum(layer(p, x)))
    return jnp.sum(slope(x) ** 2) + jnp.sum(
        jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]
    )


# No attention is left out: where its logits are lost, it is listed with the line that multiplies its values.

LOST = "it can't be followed from parameters through queries and keys to its values: attention_programs.py:"


@program(X, sites=LOST_QUERIES, **QKVO)
def queries_written_in_place(p, x):
    q, k, v = projected(p, x)
    buffer = jnp.zeros_like(q)
    for h in range(H):
        buffer = buffer.at[:, :, h].set(q[:, :, h])
    return end(p, logits_of(buffer, k), v)[0]


@program(X, sites=LOST, **QKVO)
def queries_and_keys_multiplied_entry_by_entry(p, x):
    q, k, v = projected(p, x)
    return end(p, jnp.moveaxis((q[:, :, None] * k[:, None]).sum(-1), 3, 1), v)[0]


ALPHA = jnp.float32(0.5)  # an array that the function closes over
KERNELS_OF_DATA = [constant((D, D), seed) for seed in range(3)]
ADAPTER = {"a": ((D, 2), "0 | 1"), "b": ((2, D), "0 | 1")}


@program(X, sites="all columns of a parameter", **ADAPTER)
def adapted_queries(p, x):
    kernel, *others = KERNELS_OF_DATA
    q, k, v = (heads(x @ w) for w in (kernel + ALPHA * (p["a"] @ p["b"]), *others))
    return jnp.mean(attended(q, k, v) ** 2)


@program(X, sites=ELSE, c=(D, 2), d=(2, D), **ADAPTER)
def adapted_queries_and_keys_of_a_frozen_block(p, x):
    """No softmax takes the values' features."""
    q, k, v = (heads(x @ w) for w in KERNELS_OF_DATA)
    q, k = q + heads(x @ p["a"] @ p["b"]), k + heads(x @ p["c"] @ p["d"])
    y = attended(q, k, v) @ KERNELS_OF_DATA[0]
    return jnp.mean(jnp.tanh(y) ** 2)


@program(X, sites=NOT_ALL, a=(H, S), **QKVO)
def additive_attention_of_two_steps(p, x):
    """GATv2: there is no product of queries and keys, so a clip has nothing to scale."""
    for _ in range(2):
        q, k = projected(p, x, "qk")
        logits = jnp.einsum(
            "bqkhd,hd->bqkh", jax.nn.leaky_relu(q[:, :, None] + k[:, None]), p["a"]
        )
        x = (
            jnp.einsum("bqkh,bkhd->bqhd", jax.nn.softmax(logits, 2), k).reshape(x.shape)
            @ p["o"]
        )
    return jnp.mean(x**2)


# Stacks of layers.

STACK = dict.fromkeys("qkvo", ((3, D, D), "1 | 2"))
AS_MANY = dict.fromkeys("qkvo", (H, D, D))


def scanned(p, x, reverse=False):
    """A loss and the logits of each layer's heads."""

    def step(x, w):
        return layer(w, x), logits_of(*projected(w, x, "qk")) / np.sqrt(S)

    x, logits = lax.scan(step, x, p, reverse=reverse)
    return jnp.mean(x**2), jnp.moveaxis(logits, 0, 1).reshape(B, -1, T, T)


@attention(sites=1, **STACK)
def layers_in_their_order(p, x):
    return scanned({n: w[::-1][::-1] for n, w in p.items()}, x)


@attention(sites=1, **STACK)
def layers_from_the_last_one(p, x):
    return scanned(p, x, reverse=True)


@program(X, sites=IN_TURNS, **QKVO | {"q": (2, D, D)})
def queries_of_the_last_iteration(p, x):
    """A second attention takes them outside of the scan."""
    k, v = projected(p, x, "kv")

    def step(_, w):
        q = heads(x @ w)
        return q, attended(q, k, v)

    q, y = lax.scan(step, jnp.zeros((B, T, H, S)), p["q"])
    return loss_of(p, y.sum(0) + attended(q, k, v))


@attention(sites=1, **AS_MANY)
def as_many_layers_as_heads(p, x):
    return scanned(p, x)


@attention(sites=1, **AS_MANY | {"k": (D, H, D)})
def layers_of_keys_along_another_axis(p, x):
    """A site has one `scan_axis` for all of its parameters: only the queries are scaled."""
    return scanned(p | {"k": jnp.moveaxis(p["k"], 1, 0)}, x)


CHANGES = {
    "one_after_the_other": (lambda w: jnp.concatenate([w, w]), "concatenate"),
    "padded": (lambda w: jnp.pad(w, [(0, 1), (0, 0), (0, 0)]), "scan_slice"),
}
for name, (change, operation) in CHANGES.items():
    fun = functools.partial(
        lambda p, x, change: scanned(jax.tree.map(change, p), x)[0], change=change
    )
    fun.__name__ = f"layers_{name}"
    reason = f"by names: {operation}: attention_programs.py:"
    program(X, sites=NOT_ALL, **dict.fromkeys("qkvo", ((3, D, D), reason)))(fun)


@attention(sites=1, **STACK)
def layers_with_normalized_keys(p, x):
    def one(x, w):
        q, k, v = projected(w, x)
        logits = logits_of(q, norm(k))
        return x + jnp.tanh(mixed(jax.nn.softmax(logits), v) @ w["o"]), logits

    y, logits = lax.scan(one, x, p)
    return jnp.mean(y**2), logits.transpose(1, 0, 2, 3, 4).reshape(B, -1, T, T)


@attention(sites=f"{ELSE}: attention_programs.py:", **STACK)
def layers_taken_by_the_number_of_the_iteration(p, x):
    """AlphaFold's layer_stack: parameters stay outside of the scan, which goes over 0, 1, 2."""

    def step(x, i):
        w = {name: w[i] for name, w in p.items()}
        return layer(w, x), logits_of(*projected(w, x, "qk")) / np.sqrt(S)

    x, logits = lax.scan(step, x, jnp.arange(3))
    return jnp.mean(x**2), jnp.moveaxis(logits, 0, 1).reshape(B, -1, T, T)


@program(
    X,
    sites=1,
    **dict.fromkeys("qkv", ((3, D, D), "1 | 0, 2")),
    o=((3, D, D), "0, 1 | 2"),
    out=(3, D, 5),
)
def heads_of_an_axis_of_vmap(p, x):
    """GPT-J's mesh transformer: each entry of a mapped axis has its own heads, and their results are added up."""

    @jax.custom_vjp
    def add(x):
        return lax.psum(x, "shard")

    add.defvjp(lambda x: (add(x), None), lambda _, g: (g,))

    def shard(w):
        q, k, v = projected(w, x)
        y = x + add(attended(q, k, v) @ w["o"])
        y = y / lax.pmax(lax.stop_gradient(abs(y).max()), "shard")
        return jnp.mean(jnp.tanh(y @ w["out"]) ** 2)

    return jnp.mean(jax.vmap(shard, axis_name="shard")(p))


# Heads and layers divided among devices.


def on_two_devices(local, w_specs, x_spec, out):
    mesh = jax.make_mesh(
        (2,),
        ("m",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:2],
    )
    return jax.shard_map(local, mesh=mesh, in_specs=(w_specs, x_spec), out_specs=out)


@program(jax.ShapeDtypeStruct((B, D, D), "float32"), sites=ELSE, **QKVO)
def queries_of_each_device_in_a_penalty(p, x):
    """An untiled `all_gather` adds an axis, here in front of axes of equal sizes."""
    q, k, v = (x @ p[name] for name in "qkv")
    gather = on_two_devices(lambda _, q: lax.all_gather(q, "m"), P(), P("m"), P("m"))
    gathered = gather(x, q)
    penalty = jnp.mean(jnp.einsum("nbtd,nbtd->nbt", gathered, gathered))
    return loss_of(p, attended(heads(q), heads(k), heads(v))) + penalty


@program(X, sites=NOT_ALL, **QKVO)
def exchanged_heads(p, x):
    """Ulysses: sequences are divided before, heads after; keys are those of another device."""

    def attend(p, x):
        q, k, v = (lax.all_to_all(y, "m", 2, 1, tiled=True) for y in projected(p, x))
        keys = lax.ppermute(k, "m", [(0, 1), (1, 0)])
        return attended(q, keys, v)

    along = P(None, "m"), P(None, None, "m")
    return loss_of(p, on_two_devices(attend, P(), *along)(p, x))


# Masks that add numbers far below zero; one of small numbers, as a Swin transformer's windows add, can't be told from a
# bias.
TOLD = "can't be told from a bias; add -jnp.inf: attention_programs.py:"

ADD_MASK = {
    "a_table": lambda c: np.where(CAUSAL, 0, c).astype(np.float32),
    "a_choice": lambda c: jnp.where(CAUSAL, 0.0, c),
    "a_multiple_of_a_comparison": lambda c: (
        c * (1 - (jnp.arange(T)[:, None] >= jnp.arange(T)).astype("float32"))
    ),
}
SLOPES = -np.abs(np.arange(T)[:, None] - np.arange(T)).astype(np.float32)
for kind, table in ADD_MASK.items():
    for name, change, sites in [
        ("a_mask_of_a_hundred", lambda a, table: a + table(-1e2), TOLD),
        ("a_mask_that_is_subtracted", lambda a, table: a - -1.0 * table(-50.0), TOLD),
        ("two_masks", lambda a, table: a + table(-1e4) + table(-1e9), 1),
        ("a_bias_and_a_mask_of_1e4", lambda a, table: a + SLOPES + table(-1e4), 1),
    ]:
        spelled(f"{name}_by_{kind}", sites, kept=CAUSAL if sites == 1 else None,
                softmax=lambda a, p, f=change, table=table: jax.nn.softmax(f(a, table)))  # fmt: skip
spelled("a_mask_that_a_jitted_function_closes_over", TOLD,
        softmax=lambda a, p: jax.jit(lambda a: jax.nn.softmax(a + ADD_MASK["a_table"](-1e2)))(a))  # fmt: skip
spelled("a_bias_of_several_numbers", softmax=lambda a, p: jax.nn.softmax(a + SLOPES))


def under(name, add, kept=None, sites=1):
    """With masks made of data: which keys are seen, and the same as 0.0 and 1.0 in floats that are not known."""

    def fun(p, x):
        q, k, v = projected(p, x)
        seen, ones = x[:, None, None, :, 0] > 0, jnp.sign(jax.nn.relu(x[..., 0]))
        logits, added = logits_of(q, k), add(seen, ones[:, None, None])
        y = mixed(jax.nn.softmax(logits + added), v)
        hidden = -jnp.inf if kept is None else jnp.where(kept(seen), 0.0, -jnp.inf)
        return loss_of(p, y), logits + (0.0 if kept is None else hidden)

    fun.__name__ = name
    attention(sites=sites, **QKVO)(fun)


NARROW = ADD_MASK["a_table"](-1e2)
under(
    "a_wide_mask_of_floats",
    lambda seen, ones: (1 - ones) * -1e9,
    lambda seen: seen,
)
REFUSED = {
    "two_masks_summed_before": lambda seen, ones: jnp.where(seen, 0.0, -1e2) + NARROW,
    "a_logarithm_of_a_mask": lambda seen, ones: jnp.log(
        seen.astype(jnp.float32) + 1e-9
    ),
    "rows_of_a_table": lambda seen, ones: jnp.asarray(NARROW)[jnp.arange(T)[::-1]],
    "a_wide_mask_of_floats_and_a_narrow_one": lambda seen, ones: (
        1e9 * (ones - 1) + NARROW
    ),
    "small_numbers_next_to_a_mask": lambda seen, ones: NARROW - 5 * np.eye(T),
    "positions_next_to_a_mask": lambda seen, ones: jnp.where(
        CAUSAL, -1.0 * jnp.arange(T), -1e2
    ),
}
for name, add in REFUSED.items():
    under(name, add, sites=TOLD)
# These may be masks or biases: they are measured as biases, and a warning says so.
DOUBTED = {
    "a_narrow_mask_of_floats": lambda seen, ones: (1 - ones) * -1e2,
    "a_narrow_mask_of_integers": lambda seen, ones: (1 - ones.astype(int)) * -1e2,
    "a_narrow_mask_of_pairs": lambda seen, ones: (1 - ones * ones.mT) * -1e2,
    "a_mask_that_is_an_argument": lambda seen, ones: ones,
    "a_logarithm_of_floats": lambda seen, ones: jnp.log(ones + 1e-9),
}
for name, add in DOUBTED.items():
    under(name, add)


# An einsum of three operands, in whichever order it multiplies them.


@program(X, sites=NOT_ALL, scale=(H,), **QKVO)
def logits_of_an_einsum_of_three(p, x):
    q, k, v = projected(p, x)
    logits = jnp.einsum("bqhd,bkhd,h->bhqk", q, k, p["scale"])
    return loss_of(p, mixed(jax.nn.softmax(logits), v))


@program(X, sites="an einsum of three or more", scale=(H,), **QKVO)
def values_in_an_einsum_of_three(p, x):
    q, k, v = projected(p, x)
    shares = jax.nn.softmax(logits_of(q, k))
    y = jnp.einsum("bhqk,bkhd,h->bqhd", shares, v, p["scale"])
    return loss_of(p, y.reshape(B, T, D))


@program(X, sites=1, w=(D, 2), **QKVO | dict.fromkeys(("v2", "in"), (D, D)))
def layers_after_a_product_of_two_activations(p, x):
    """A pooling of slots, as TokenLearner's, is no attention, and what follows it is."""
    x = jnp.tanh(x @ p["in"])
    for _ in range(2):
        values = x[:, :2] @ p["v2"]
        x = layer(p, x + jnp.einsum("btn,bnd->btd", jax.nn.sigmoid(x @ p["w"]), values))
    return jnp.mean(x**2)


# DeepSeek's latent attention with its logits as the sum of two products, as Google's JAX examples write it.


def latent(name, sites=1, scale=1.0):
    def fun(p, x):
        q, k, r = heads(x @ p["q"]), heads(x @ p["k"]), x @ p["r"]
        by_place = jnp.einsum("bqhd,bkd->bhqk", q[..., 4:], r)
        logits = (scale * logits_of(q[..., :4], k) + by_place) / np.sqrt(S)
        logits = jnp.where(CAUSAL, logits, -jnp.inf)
        return loss_of(p, mixed(jax.nn.softmax(logits), heads(x @ p["v"]))), logits

    fun.__name__ = name
    latents = {"k": ((D, 16), "0 | 1"), "r": ((D, 2), "0 | 1"), "o": ((D, D), "head")}
    attention(sites=sites, **MATRICES | latents)(fun)


latent("logits_of_two_products")
latent("logits_of_two_products_of_other_scales", scale=0.5)
