"""Attention in unusual spellings: a clip scales all logits of its head and no others, or is refused with a reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import muonjax
from tests.inspect.test_hostile_programs import answer

pytestmark = pytest.mark.promotes("the programs are spelled as users spell theirs")

B, T, D, H, S = 2, 6, 12, 4, 3
X = (B, T, D)
QKVO = {"q": (D, H * S), "k": (D, H * S), "v": (D, H * S), "o": (H * S, D)}


def draw(shape, seed):
    return jnp.asarray(0.5 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def heads(x, count=H):
    return x.reshape(*x.shape[:-1], count, -1)


def logits_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def read(logits, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(*v.shape[:2], -1)


def projected(p, x):
    return [heads(x @ p[name]) for name in "qkv"]


def attention(change=lambda q, k, p: (q, k), spell=lambda logits, p: logits, weights=lambda p: p):
    """A loss and its logits, with changes of queries and keys, of the logits, or of the parameters."""

    def fun(p, x):
        q, k, v = projected(weights(p), x)
        logits = spell(logits_of(*change(q, k, p)), p)
        return jnp.mean((read(logits, v) @ p["o"]) ** 2), logits

    return fun


def quantized(w):
    step = jnp.max(jnp.abs(w)) / 7
    return w + lax.stop_gradient(jnp.round(w / step) * step - w)


def two_branches(p, x):
    q, k, v = projected(p, x)
    logits = logits_of(q, k)
    local = jnp.tril(jnp.ones((T, T), bool)) & ~jnp.tril(jnp.ones((T, T), bool), -2)
    causal = jnp.tril(jnp.ones((T, T), bool))

    def attend(mask):
        return lambda logits, v: read(jnp.where(mask, logits, -1e9), v)

    y = lax.cond(x[0, 0, 0] < 0, attend(local), attend(causal), logits, v)
    mask = jnp.where(x[0, 0, 0] < 0, local, causal)
    return jnp.mean((y @ p["o"]) ** 2), jnp.where(mask, logits, -jnp.inf)


def carried_queries(p, x):
    """The queries of one position are read by the next."""

    def step(before, row):
        q, k, v = projected(p, row[:, None])
        logits = logits_of(q, k)
        return q.reshape(B, -1), (read(logits, v)[:, 0] + before, logits)

    _, (y, logits) = lax.scan(step, jnp.zeros((B, H * S)), x.swapaxes(0, 1))
    return jnp.mean((y @ p["o"]) ** 2), logits[0]


def turned(z):
    """As llama-2-jax rotates: halves in the opposite order, and joined again."""
    halves = z.reshape(*z.shape[:-2], 2, -1, z.shape[-1])[..., ::-1, :, :]
    return 0.6 * z + 0.8 * halves.reshape(z.shape)


R = draw((S, S), 9)
SHARED = {"bias": (S,), "w": (H, S, S), "e": (), "mix": (T, T)}  # each program uses one of these, or none
EXACT = {
    "plain": attention(),
    "negative": attention(spell=lambda a, p: -a),
    "zero_minus": attention(spell=lambda a, p: 0 - a),
    "a_rotation_by_a_matrix": attention(lambda q, k, p: (q @ R, k @ R)),
    "half_of_the_features_rotated_by_a_matrix": attention(
        lambda q, k, p: (jnp.concatenate([q[..., :2] @ R[:2, :2], q[..., 2:]], -1), k)
    ),
    "zeros_beside_the_features": attention(
        lambda q, k, p: tuple(jnp.concatenate([z, jnp.zeros_like(z)], -1) for z in (q, k))
    ),
    "masked_kernel": attention(weights=lambda p: p | {"q": jnp.tril(p["q"])}),
    "two_softmaxes_of_one_product": two_branches,
}
REFUSED = {
    "subtracted": (attention(spell=lambda a, p: 1.0 - a), "the logits are subtracted"),
    "weight_norm": (
        attention(weights=lambda p: p | {"q": p["q"] / jnp.linalg.norm(p["q"], axis=0)}),
        "a clip would not scale its logits alone: test_exact_or_refused.py:",
    ),
    "added_to_itself_in_another_order": (
        attention(lambda q, k, p: (turned(q), turned(k))),
        "its queries are in another order",
    ),
    "ones_beside_the_features": (
        attention(lambda q, k, p: tuple(jnp.concatenate([z, jnp.ones_like(z)], -1) for z in (q, k))),
        "its queries are put together with something else",
    ),
    "a_function_of_the_kernel": (
        attention(weights=lambda p: p | {"k": jnp.tanh(p["k"])}),
        "a clip would not scale its logits alone: test_exact_or_refused.py:",
    ),
    "quantized_straight_through": (
        attention(weights=lambda p: p | {"q": quantized(p["q"])}),
        "a clip would not scale its logits alone: test_exact_or_refused.py:",
    ),
    "added_to_a_frozen_kernel": (
        attention(weights=lambda p: p | {"q": p["q"] + R[0, 0] * jnp.ones((D, H * S))}),
        "a clip would not scale its logits alone: test_exact_or_refused.py:",
    ),
    "a_function_of_the_bias": (
        attention(lambda q, k, p: (q + jnp.exp(p["e"]) * jnp.ones((H, S)), k)),
        "its queries and keys are cut into heads or layers in several ways",
    ),
    "a_bias_that_heads_share": (
        attention(lambda q, k, p: (q, k + p["bias"])),
        "its queries and keys are cut into heads or layers in several ways",
    ),
    "keys_in_part_of_data": (
        attention(lambda q, k, p: (q, jnp.where((jnp.arange(T) < 2)[:, None, None], draw((T, H, S), 8), k))),
        "its keys are added to something else: test_exact_or_refused.py:",
    ),
    "keys_padded_with_ones": (
        attention(lambda q, k, p: (q, lax.pad(k[:, 1:], 1.0, [(0, 0, 0), (1, 0, 0), (0, 0, 0), (0, 0, 0)]))),
        "its keys are padded",
    ),
    "logits_in_part_learned": (
        attention(spell=lambda a, p: jnp.where(jnp.eye(T, dtype=bool), p["mix"], a)),
        "its logits are one of two kinds: test_exact_or_refused.py:",
    ),
    "one_matrix_for_each_head": (
        attention(lambda q, k, p: (jnp.einsum("bthi,hij->bthj", jnp.tanh(q), p["w"]), k)),
        "its queries and keys are cut into heads or layers in several ways",
    ),
    "keys_by_the_transposed_kernel": (
        attention(weights=lambda p: p | {"k": p["q"].T}),
        "a clip would not scale its logits alone",
    ),
    "queries_carried_by_a_loop": (
        carried_queries,
        "a clip would not scale its logits alone: test_exact_or_refused.py:",
    ),
}


def prepared(fun):
    shapes = QKVO | SHARED
    p = {name: draw(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    x = 2 * draw(X, 99)
    with pytest.warns(UserWarning, match="never used|no data"):
        program = muonjax.inspect(lambda p, x: fun(p, x)[0], p, x)
    return p, x, program


def check_exact(fun, p, x, program):
    """Each head's maximum is that of its logits, and a clip of one head halves its logits and no others'."""
    (_, maxima), _ = muonjax.value_and_grad(lambda p, x: fun(p, x)[0])(p, x)
    ((name, found),) = maxima.items()
    logits = np.asarray(jax.jit(fun)(p, x)[1])
    np.testing.assert_allclose(found, logits.max((0, 2, 3)), rtol=1e-5)
    for head in range(H):
        alone = {name: jnp.full(H, -jnp.inf).at[head].set(200.0)}
        clipped = muonjax.apply_qk_clip(p, alone, program.sites, 100.0)
        expected = np.where(np.arange(H)[:, None, None] == head, logits / 2, logits)
        np.testing.assert_allclose(jax.jit(fun)(clipped, x)[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_a_clip_scales_the_logits_of_its_head_alone(name):
    p, x, program = prepared(EXACT[name])
    assert [a.problem for a in program.attentions] == [""]
    check_exact(EXACT[name], p, x, program)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_clip_would_not_scale_is_refused(name):
    fun, reason = REFUSED[name]
    _, _, program = prepared(fun)
    (attention,) = program.attentions
    assert attention.problem.startswith(reason)


def on_two_devices(spell, w_specs, x_spec, out):
    """`spell(w, x)` -> queries, keys and values of one device."""
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def local(p, x):
        q, k, v = spell(p, x)
        return read(logits_of(q, k), v)

    def fun(p, x):
        return jnp.mean(jax.shard_map(local, mesh=mesh, in_specs=(w_specs, x_spec), out_specs=out)(p, x) ** 2)

    return fun


def of_another_device(p, x):
    q, k, v = (heads(x @ p[name], H // 2) for name in "qkv")
    return q, lax.ppermute(k, "m", [(0, 1), (1, 0)]), v


def side_by_side(p, x):
    """[H, 3, S]: queries, keys and values of a head together."""
    return [
        heads(x @ p["w"], p["w"].shape[1] // (3 * S)).reshape(*x.shape[:2], -1, 3, S)[..., i, :]
        for i in range(3)
    ]


def exchanged(p, x):
    """Ulysses: sequences are divided before, heads after."""
    return [lax.all_to_all(y, "m", 2, 1, tiled=True) for y in projected(p, x)]


def scattered(p, x):
    return [lax.psum_scatter(y, "m", scatter_dimension=2, tiled=True) for y in projected(p, x)]


ROWS, COLUMNS = PartitionSpec("m"), PartitionSpec(None, "m")
HEADS = PartitionSpec(None, None, "m")
DIVIDED = {
    "heads_side_by_side": (side_by_side, COLUMNS, PartitionSpec(), HEADS),
    "exchanged": (exchanged, PartitionSpec(), COLUMNS, HEADS),
    "scattered": (scattered, ROWS, HEADS, HEADS),
    "of_another_device": (of_another_device, COLUMNS, PartitionSpec(), HEADS),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_heads_divided_among_devices_are_refused(name):
    spell, specs, x_spec, out = DIVIDED[name]
    fun = on_two_devices(spell, specs, x_spec, out)
    p = {n: draw(QKVO[n], i) for i, n in enumerate("qkv")}
    p = {"w": draw((D, 3 * H * S), 0)} if spell is side_by_side else p
    (attention,) = muonjax.inspect(fun, p, draw(X, 99)).attentions
    assert attention.problem.startswith("a clip would not scale its logits alone: test_exact")


def test_heads_of_two_products_are_refused():
    def loss(p, x):
        q = jnp.concatenate([heads(x @ p[name], 2) for name in ("first", "last")], 2)
        k, v = (heads(x @ p[name]) for name in "kv")
        return jnp.mean((read(logits_of(q, k), v) @ p["o"]) ** 2)

    shapes = {n: QKVO[n] for n in "kvo"} | {"first": (D, 2 * S), "last": (D, 2 * S)}
    (attention,) = muonjax.inspect(
        loss, {n: draw(shape, 0) for n, shape in shapes.items()}, draw(X, 1)
    ).attentions
    assert attention.problem == "heads of its queries are put together from several products"


def test_a_product_of_two_activations_times_itself():
    """A Gram matrix of features, as in losses that decorrelate them: it had no message."""

    def loss(p, x):
        y = x @ p["w"]
        gram = jnp.einsum("btd,bte->bde", y, y)
        return jnp.mean(gram * gram)

    assert muonjax.inspect(loss, {"w": draw((D, D), 0)}, draw(X, 1)).attentions == ()


def test_data_of_fewer_bits_in_larger_words():
    def loss(p, x, packed):
        frozen = lax.bitcast_convert_type(packed, jnp.int4).reshape(D, D).astype(jnp.float32)
        return jnp.mean((jnp.tanh(x @ frozen + x @ p["w"]) @ p["out"]) ** 2)

    shapes = {"w": (D, D), "out": (D, D)}
    p = {name: draw(shape, 0) for name, shape in shapes.items()}
    numbers = muonjax.inspect(loss, p, draw(X, 1), jnp.zeros((D, D // 2), jnp.uint8)).dimension_numbers()
    assert numbers["w"] == muonjax.MuonDimensionNumbers(0, 1)


def attend(q, k, v):
    return read(logits_of(q, k), v)


def frozen(seed):
    return draw((D, H * S), seed)


def adapted(p):
    return frozen(0) + p["a"] @ p["b"]


def learned_queries(p, x):
    logits = jnp.einsum("qhd,bkhd->bhqk", p["queries"], heads(x @ p["k"]))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), heads(x @ p["v"]))


def learned_queries_of_raw_keys(p, x):
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("qd,bkd->bqk", p["latents"], x)), x @ p["v"])


def adapted_queries(p, x):
    return attend(*(heads(x @ w) for w in (adapted(p), frozen(1), frozen(2))))


def adapted_queries_by_a_product_each(p, x):
    return attend(heads(x @ frozen(0) + (x @ p["a"]) @ p["b"]), heads(x @ frozen(1)), heads(x @ frozen(2)))


def one_key_head_of_two_experts(p, x):
    """As pi-0 has it."""
    q = jnp.concatenate([heads(x @ p["q"]), heads(x @ p["k"])], 1)
    k, v = (jnp.concatenate([x @ p[a], x @ p[b]], 1) for a, b in (("k1", "k2"), ("v1", "v2")))
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k)), v)


def an_adapter_for_each_head(p, x):
    q, k, v = projected(p, x)
    return attend(q + jnp.einsum("bthr,hrs->bths", jnp.einsum("btd,hdr->bthr", x, p["a_h"]), p["b_h"]), k, v)


UNHEARD = "its queries, keys and values can't all be followed to parameters: test_exact_or_refused.py:"
LISTED = {
    learned_queries: UNHEARD,
    learned_queries_of_raw_keys: UNHEARD,
    adapted_queries: UNHEARD,
    adapted_queries_by_a_product_each: UNHEARD,
    one_key_head_of_two_experts: "its keys come from several products, of which heads share some",
    an_adapter_for_each_head: "its queries and keys are cut into heads or layers in several ways",
}


@pytest.mark.filterwarnings("ignore:.*meet no data")
@pytest.mark.parametrize("spell", LISTED, ids=lambda spell: spell.__name__)
def test_an_attention_that_is_not_followed_is_listed_with_a_true_reason(spell):
    shapes = QKVO | {"queries": (5, H, S), "latents": (5, D), "a": (D, 2), "b": (2, H * S)}
    shapes |= dict.fromkeys(("k1", "k2", "v1", "v2"), (D, S)) | {"a_h": (H, D, 2), "b_h": (H, 2, S)}
    p = {name: draw(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    (attention,) = muonjax.inspect(lambda p, x: jnp.mean(spell(p, x) ** 2), p, draw(X, 99)).attentions
    assert attention.problem.startswith(LISTED[spell])


def test_additive_attention_of_two_steps_has_no_product_of_queries_and_keys():
    """GATv2: a clip has nothing to scale."""

    def loss(p, x):
        for _ in range(2):
            q, k, _ = projected(p, x)
            logits = jnp.einsum("bqkhd,hd->bqkh", jax.nn.leaky_relu(q[:, :, None] + k[:, None]), p["a"])
            x = jnp.einsum("bqkh,bkhd->bqhd", jax.nn.softmax(logits, 2), k).reshape(x.shape) @ p["o"]
        return jnp.mean(x**2)

    shapes = {n: QKVO[n] for n in "qkvo"} | {"a": (H, S)}
    p = {name: draw(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    with pytest.warns(UserWarning, match="meet no data"):
        assert muonjax.inspect(loss, p, draw(X, 99)).attentions == ()


def convolved(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def a_kernel_for_each_example(p, x, z):
    """StyleGAN 2's fused convolution: its groups are the examples."""
    n, h, w, c = x.shape
    kernels = p["w"][None] * (z @ p["style"])[:, None, None, :, None]
    kernels = kernels.transpose(1, 2, 3, 0, 4).reshape(3, 3, c, -1)
    y = convolved(x.transpose(1, 2, 0, 3).reshape(1, h, w, n * c), kernels, n)
    return jnp.tanh(y.reshape(h, w, n, -1).transpose(2, 0, 1, 3)).mean((1, 2)) @ p["head"]


def an_ensemble_of_convolutions(p, x):
    return jnp.tanh(jax.vmap(convolved, (None, 0))(x, p["w"]).mean((2, 3))) @ p["head"]


def queries_and_keys_by_one_vmap(p, x):
    q, k = jax.vmap(lambda w: jnp.einsum("bthi,hij->bthj", heads(x), w))(p["qk"])
    y = jnp.einsum("bhqk,bkhd->bqhd", logits_of(q, k), jnp.einsum("bthi,hij->bthj", heads(x), p["v"]))
    return y.reshape(B, T, -1) @ p["head"]


def a_scope_of_the_users(p, x):
    with jax.named_scope("transpose(jvp(block))"):
        y = jnp.tanh(x @ p["w"])
    return y @ p["head"]


def columns_of_no_use(p, x):
    a, b = jnp.split(x @ p["w"], 5, -1)[:2]
    return jax.nn.silu(a) * b @ p["head"]


def zeros_between(p, x):
    w = lax.pad(p["w"], 0.0, [(0, 0, 0), (0, 0, 1)])
    return jnp.tanh(x @ w) @ p["head"]


def an_expert_cut_out_by_data(p, x):
    w = lax.dynamic_slice(p["w"], (0, D * jnp.argmax(x[0, 0])), (D, D))
    return jnp.tanh(x @ w) @ p["head"]


def an_adapter_of_a_closed_over_kernel(p, x):
    return jnp.tanh(x @ adapted(p)) @ p["head"]


# Leaves with their shapes and answers: the right one, AdamW with a line, or left to names since an operation is not
# followed.
HEAD, BY_NAMES, IMAGE = "no product after it, an output head: test_exact", "by names: ", (2, 5, 5, 4)
MATRICES = [
    (a_kernel_for_each_example, [IMAGE, (2, D)], {
        "w": ((3, 3, 4, 8), BY_NAMES + "conv_general_dilated: test_exact"), "style": ((D, 4), "0 | 1"),
        "head": ((8, 2), HEAD)}),
    (an_ensemble_of_convolutions, [IMAGE], {
        "w": ((6, 3, 3, 4, 8), BY_NAMES + "reshape: test_exact"), "head": ((8, 2), HEAD)}),
    (queries_and_keys_by_one_vmap, [X], {
        "qk": ((2, H, S, S), "2 | 3"), "v": ((H, S, S), "1 | 2"), "head": ((D, 2), HEAD)}),
    (a_scope_of_the_users, [X], {"w": ((D, D), "0 | 1"), "head": ((D, 2), HEAD)}),
    (columns_of_no_use, [X], {"w": ((D, 5 * D), "0 | 1 / 12, 12, 36 of 1"), "head": ((D, 2), HEAD)}),
    (zeros_between, [X], {"w": ((D, D), BY_NAMES + "pad: test_exact"), "head": ((2 * D - 1, 2), HEAD)}),
    (an_expert_cut_out_by_data, [X], {"w": ((D, 5 * D), "looked up: test_exact"), "head": ((D, 2), HEAD)}),
    (an_adapter_of_a_closed_over_kernel, [X], {
        "a": ((D, 2), "a learned input: test_exact"), "b": ((2, D), "0 | 1"), "head": ((D, 2), HEAD)}),
]  # fmt: skip


@pytest.mark.parametrize(("fun", "inputs", "leaves"), MATRICES, ids=[fun.__name__ for fun, *_ in MATRICES])
def test_matrices_in_unusual_spellings(fun, inputs, leaves):
    params = {name: draw(shape, i) for i, (name, (shape, _)) in enumerate(leaves.items())}
    program = muonjax.inspect(lambda p, *x: jnp.mean(fun(p, *x) ** 2), params, *(draw(s, 9) for s in inputs))
    for name, (_, expected) in leaves.items():
        decision = program.decision(name)
        assert decision.by_names == expected.startswith(BY_NAMES)
        assert answer(decision, expected.removeprefix(BY_NAMES)) == expected.removeprefix(BY_NAMES)
