"""Programs written to mislead: a clip is exact for each head and changes nothing but through softmax, or is refused."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import muonjax
from muonjax._inspect.certificate import Certificate

pytestmark = [
    pytest.mark.promotes("the programs are spelled as users spell theirs"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

B, T, D, H, S = 2, 6, 12, 4, 3
SHAPES = {"c": (H, H, 3, 3), "q": (D, H * S), "k": (D, H * S), "v": (D, H * S), "o": (H * S, D)}


def draw(shape, seed):
    return jnp.asarray(0.5 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def heads(x):
    return x.reshape(*x.shape[:-1], H, S)


def projected(p, x):
    return [heads(x @ p[name]) for name in "qkv"]


def logits_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def read(p, shares, v):
    return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(B, T, -1) @ p["o"]) ** 2)


def plain(change=lambda q, k, p, x: (q, k), spell=lambda logits, p: logits, weights=lambda p: p, more=None):
    """A loss and its logits, with changes of queries and keys, logits or parameters, and with one `more` term."""

    def fun(p, x):
        w = weights(p)
        q, k, v = projected(w, x)
        logits = spell(logits_of(*change(q, k, p, x)), p)
        y = read(w, jax.nn.softmax(logits), v)
        return y if more is None else y + more(q, k, p, x), logits

    return fun


def turned_heads(order, merged):
    """Queries and keys with axes [batch, position, head, head, feature] in another order, and heads merged again."""

    def change(q, k, p, x):
        return [y.reshape(B, T, 2, 2, S).transpose(order).reshape(merged) for y in (q, k)]

    def fun(p, x):
        q, k, v = projected(p, x)
        q, k = change(q, k, p, x)
        v = v.reshape(B, T, 2, 2, S).swapaxes(2, 3).reshape(v.shape)
        logits = logits_of(q, k)
        return read(p, jax.nn.softmax(logits), v), logits

    return fun


def by_lax_reshape(p, x):
    """[B, T, H, S] from [B, T, S, H] by `dimensions`."""
    q, k, v = (
        lax.reshape((x @ p[n]).reshape(B, T, S, H), (B, T, H, S), dimensions=(0, 1, 3, 2)) for n in "qkv"
    )
    logits = logits_of(q, k)
    return read(p, jax.nn.softmax(logits), v), logits


def two_by_two_by_lax_reshape(p, x):
    q, k, v = (
        lax.reshape((x @ p[n]).reshape(B, T, 2, 2, S), (B, T, H, S), dimensions=(0, 1, 3, 2, 4))
        for n in "qkv"
    )
    logits = logits_of(q, k)
    return read(p, jax.nn.softmax(logits), v), logits


def mapped_by_index(p, x):
    q, k, v = projected(p, x)

    def head(i):
        a, b, c = (lax.dynamic_index_in_dim(y, i, 2, False) for y in (q, k, v))
        logits = jnp.einsum("bqd,bkd->bqk", a, b)
        return jax.nn.softmax(logits) @ c, logits

    y, logits = lax.map(head, jnp.arange(H))
    return jnp.mean((y.transpose(1, 2, 0, 3).reshape(B, T, -1) @ p["o"]) ** 2), logits.swapaxes(0, 1)


def chunks_of_heads(p, x):
    q, k, v = projected(p, x)

    def chunk(i):
        a, b, c = (lax.dynamic_slice_in_dim(y, 2 * i, 2, 2) for y in (q, k, v))
        logits = logits_of(a, b)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), c), logits

    y, logits = lax.map(chunk, jnp.arange(2))
    y = y.transpose(1, 2, 0, 3, 4).reshape(B, T, -1)
    return jnp.mean((y @ p["o"]) ** 2), logits.transpose(1, 0, 2, 3, 4).reshape(B, H, T, T)


def grouped_by_index(p, x):
    q = heads(x @ p["q"])
    k, v = ((x @ p[n])[..., : 2 * S].reshape(B, T, 2, S) for n in "kv")

    def head(i):
        a = lax.dynamic_index_in_dim(q, i, 2, False)
        b, c = (lax.dynamic_index_in_dim(y, i // 2, 2, False) for y in (k, v))
        logits = jnp.einsum("bqd,bkd->bqk", a, b)
        return jax.nn.softmax(logits) @ c, logits

    y, logits = lax.map(head, jnp.arange(H))
    return jnp.mean((y.transpose(1, 2, 0, 3).reshape(B, T, -1) @ p["o"]) ** 2), logits.swapaxes(0, 1)


def queries_of_two_inputs(p, x):
    q, k, v = projected(p, x)
    q = q + heads(jnp.tanh(x) @ p["q"])
    logits = logits_of(q, k)
    return read(p, jax.nn.softmax(logits), v), logits


def memory_and_tokens(p, x):
    q, k, v = projected(p, x)
    k, v = (jnp.concatenate([heads(jnp.tanh(x) @ p[n]), y], 1) for n, y in (("k", k), ("v", v)))
    logits = logits_of(q, k)
    return read(p, jax.nn.softmax(logits), v), logits


def stacked_one_by_one(p, x):
    q, k, v = (jnp.stack([(x @ p[n])[..., S * h : S * h + S] for h in range(H)], 2) for n in "qkv")
    logits = logits_of(q, k)
    return read(p, jax.nn.softmax(logits), v), logits


def stacked_from_kernels(shared):
    """Heads of a kernel each, which the parameter has one by one."""

    def fun(p, x):
        q, k, v = (jnp.stack([x @ p[f"{n}{h}"] for h in range(H)], 2) for n in "qkv")
        k = jnp.broadcast_to(k[:, :, :1], k.shape) if shared else k
        logits = logits_of(q, k)
        return read(p, jax.nn.softmax(logits), v), logits

    return fun


def split_heads_in_the_batch(p, x):
    """SASRec: heads are parts put together along the batch."""
    q, k, v = (jnp.concatenate(jnp.split(x @ p[n], H, -1), 0) for n in "qkv")
    logits = jnp.einsum("bqd,bkd->bqk", q, k)
    y = jax.nn.softmax(logits) @ v
    y = jnp.concatenate(jnp.split(y, H, 0), -1)
    return jnp.mean((y @ p["o"]) ** 2), logits.reshape(H, B, T, T).swapaxes(0, 1)


def rolled(q, k, p, x):
    return jnp.roll(q, 1, 2), jnp.roll(k, 1, 2)


def rolled_queries(q, k, p, x):
    return jnp.roll(q, 1, 2), k


def mixed_rotation(q, k, p, x):
    """A rotation of all features of all heads at once: it joins the halves of different heads."""

    def turn(y):
        y = y.reshape(B, T, H * S)
        first, second = jnp.split(y, 2, -1)
        return heads(0.6 * y + 0.8 * jnp.concatenate([-second, first], -1))

    return turn(q), turn(k)


def pipeline(p, x):
    """A layer for each device of a mesh; every device has the input and gives its share of the loss."""
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    layers = {n: jnp.stack([w, w[::-1]]) for n, w in p.items()} if p["q"].ndim == 2 else p

    def local(w, x):
        w = {n: y[0] for n, y in w.items()}
        q, k, v = projected(w, x)
        logits = logits_of(q, k)
        return read(w, jax.nn.softmax(logits), v)[None], logits[None]

    specs = (dict.fromkeys(layers, PartitionSpec("m")), PartitionSpec())
    y, logits = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec("m"), PartitionSpec("m"))
    )(layers, x)
    return jnp.mean(y), logits.reshape(2 * B, H, T, T)


def norm_of_own_weights(name):
    return lambda q, k, p, x: (q / jnp.linalg.norm(p[name]), k)


ROWS = {
    "lax_reshape": by_lax_reshape,
    "lax_reshape_of_two_axes": two_by_two_by_lax_reshape,
    "heads_mapped_by_index": mapped_by_index,
    "chunks_of_heads": chunks_of_heads,
    "grouped_keys_by_index": grouped_by_index,
    "one_kernel_on_two_inputs": queries_of_two_inputs,
    "memory_and_tokens": memory_and_tokens,
    "divided_by_the_norm_of_the_query_kernel": plain(norm_of_own_weights("q")),
    "divided_by_the_norm_of_the_key_kernel": plain(norm_of_own_weights("k")),
    "logits_divided_by_a_norm": plain(spell=lambda a, p: a / jnp.linalg.norm(p["q"])),
    "a_temperature_made_of_the_kernel": plain(spell=lambda a, p: a * jnp.mean(jnp.abs(p["q"]))),
    "a_temperature_of_each_heads_kernel": plain(
        spell=lambda a, p: a / jnp.linalg.norm(heads(p["q"]), axis=(0, 2))[:, None, None]
    ),
    "the_reciprocal_of_the_logits": plain(spell=lambda a, p: 1 / a),
    "a_quotient_by_the_logits": plain(spell=lambda a, p: 3.0 / (a + 0.0)),
    "queries_cast_to_int8": plain(lambda q, k, p, x: ((9 * q).astype(jnp.int8).astype(jnp.float32), k)),
    "logits_cast_to_int": plain(spell=lambda a, p: (9 * a).astype(jnp.int32).astype(jnp.float32)),
    "a_gate_by_the_sum_of_squares": plain(
        more=lambda q, k, p, x: jnp.mean(x * jnp.sum(q**2, (2, 3))[..., None])
    ),
    "a_gate_by_the_largest_query": plain(more=lambda q, k, p, x: jnp.mean(x * jnp.max(q, (2, 3))[..., None])),
    "a_gate_by_each_heads_norm": plain(more=lambda q, k, p, x: jnp.mean(jnp.sum(q**2, -1) * jnp.sum(x))),
    "a_penalty_on_the_queries": plain(more=lambda q, k, p, x: 1e-2 * jnp.sum(q**2)),
    "a_sum_of_the_keys": plain(more=lambda q, k, p, x: jnp.sum(k)),
    "heads_stacked_one_by_one": stacked_one_by_one,
    "heads_of_a_kernel_each": stacked_from_kernels(False),
    "heads_of_a_kernel_each_and_one_key": stacked_from_kernels(True),
    "sasrec": split_heads_in_the_batch,
    "rolled": plain(rolled),
    "rolled_queries": plain(rolled_queries),
    "flipped_queries": plain(lambda q, k, p, x: (jnp.flip(q, 2), k)),
    "a_rotation_across_heads": plain(mixed_rotation),
    "heads_added_up": plain(lambda q, k, p, x: (q + jnp.flip(q, 2), k)),
    "layers_as_a_pipeline": pipeline,
    "keys_in_another_order_by_gather": plain(lambda q, k, p, x: (q, k[:, :, jnp.array([1, 0, 3, 2])])),
    "the_square_of_the_logits": plain(spell=lambda a, p: a * a),
    "queries_times_their_sign": plain(lambda q, k, p, x: (q * jnp.sign(q), k)),
    "queries_relative_to_the_first_head": plain(lambda q, k, p, x: (q - q[:, :, :1], k)),
}
ORDERS = [(0, 1, 3, 2, 4), (0, 1, 2, 4, 3), (0, 1, 4, 3, 2), (0, 1, 4, 2, 3)]
ROWS |= {f"turned_{order}": turned_heads(order, (B, T, H, S)) for order in ORDERS}


def power_of_two(logits):
    shares = 2**logits
    return shares / shares.sum(-1, keepdims=True)


def convolved(groups):
    def fun(p, x):
        q, k, v = projected(p, x)
        kernel = p["c"][:, : H // groups]
        logits = lax.conv_general_dilated(logits_of(q, k), kernel, (1, 1), "SAME", feature_group_count=groups)
        return read(p, jax.nn.softmax(logits), v), logits

    return fun


def powers(p, x):
    q, k, v = projected(p, x)
    logits = logits_of(q, k) / 9
    return read(p, power_of_two(logits), v), logits


ROWS |= {"a_convolution_over_logits": convolved(1), "a_depthwise_one": convolved(H), "powers_of_two": powers}


def inspected(fun):
    p = {name: draw(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}
    p |= {"q": p["q"] * jnp.repeat(jnp.array([4.0, 1.0, 2.0, 0.5]), S)}  # hot heads and calm ones
    p |= {f"{n}{h}": p[n][:, S * h : S * h + S] for n in "qkv" for h in range(H)}
    x = 2 * draw((B, T, D), 99)
    return p, x, muonjax.inspect(lambda p, x: fun(p, x)[0], p, x)


def check_exact(fun, p, x, program):
    """Every head's maximum is its own, and each has the factor that a clip gives it; nothing else changes.

    The maxima are in the order of the projections, which may be another one than that of the logits.
    """
    (_, maxima), _ = jax.jit(muonjax.value_and_grad(lambda p, x: fun(p, x)[0]))(p, x)
    wanted = np.max(fun(p, x)[1], (0, 2, 3))
    found = np.concatenate([np.asarray(m).reshape(-1) for m in maxima.values()])
    np.testing.assert_allclose(np.sort(found), np.sort(wanted), rtol=1e-5)
    assert max(program.check_clip(p, x).values()) < 1e-4
    threshold = float(np.median(wanted))
    clipped = muonjax.apply_qk_clip(p, maxima, program, threshold)
    np.testing.assert_allclose(
        np.max(fun(clipped, x)[1], (0, 2, 3)), np.minimum(wanted, threshold), rtol=1e-4
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_clip_is_exact_for_each_head_or_refused(name):
    p, x, program = inspected(ROWS[name])
    assert program.attentions
    if any(a.site is not None for a in program.attentions):
        check_exact(ROWS[name], p, x, program)


@pytest.mark.parametrize(
    "name", ["a_gate_by_the_sum_of_squares", "a_penalty_on_the_queries", "a_sum_of_the_keys"]
)
def test_check_clip_sees_what_else_a_clip_changes(name):
    """Without the proof these are accepted."""
    follow = Certificate.failure
    with mock.patch.object(Certificate, "failure", lambda self: follow(self) and None):
        p, x, program = inspected(ROWS[name])
        assert program.check_clip(p, x)["max_logits"] > 1e-3
    p, x, program = inspected(plain())
    assert program.check_clip(p, x)["max_logits"] < 1e-5


@pytest.mark.parametrize("looped", [False, True])
def test_a_penalty_on_parameters_is_no_other_use(looped):
    def fun(p, x):
        loss, logits = plain()(p, x)
        if looped:
            return loss + lax.scan(lambda c, row: (c + jnp.sum(row**2), None), 0.0, p["q"])[0], logits
        return loss + 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)), logits

    _, _, program = inspected(fun)
    assert [a.problem for a in program.attentions] == [""]
