"""What small programs showed that were written to mislead the clip: one for each cause."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax

pytestmark = pytest.mark.promotes("the functions are written as models are")

D, HEADS, SIZE, LENGTH = 12, 3, 4, 6
X = np.random.default_rng(0).standard_normal((2, LENGTH, D)).astype(np.float32)
NAMES = "qkvo"


def draw(*shape, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 0.5).astype(np.float32)


def weights(layers=0, suffix=""):
    shape = (layers, D, D) if layers else (D, D)
    return {n + suffix: draw(*shape, seed=k + 10 * len(suffix)) for k, n in enumerate(NAMES)}


def project(p, x, names, heads=HEADS):
    return [jnp.reshape(x @ p[n], (*x.shape[:2], heads, -1)) for n in names]


def logits_of(p, x, queries="q", keys="k"):
    """[batch, heads, queries, keys], in NumPy or JAX as `x` is."""
    q, k = (jnp.reshape(x @ p[n], (*x.shape[:2], HEADS, SIZE)) for n in (queries, keys))
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def by_hand(p, x):
    """The same in float64."""
    q, k = (np.reshape(np.float64(x) @ np.float64(p[n]), (*x.shape[:2], HEADS, SIZE)) for n in "qk")
    return np.einsum("bqhd,bkhd->bhqk", q, k)


def read(p, x, logits, softmax=jax.nn.softmax, values="v", out="o"):
    (v,) = project(p, x, values)
    return x + jnp.tanh(jnp.einsum("bhqk,bkhd->bqhd", softmax(logits), v).reshape(x.shape) @ p[out])


def measured(loss, p, *args):
    (_, maxima), _ = jax.jit(muonjax.value_and_grad(loss))(p, *args)
    return maxima


def problems(program):
    return [a.problem for a in program.attentions]


# As many layers as heads, in stacks that stand at the root, or in a module with a second attention.


def layer(x, w, seconds=False):
    x = read(w, x, logits_of(w, x))
    return read(w, x, logits_of(w, x, "q2", "k2"), values=["v2"], out="o2") if seconds else x


@pytest.mark.parametrize("seconds", [False, True])
@pytest.mark.parametrize("module", ["", "layers"])
def test_as_many_layers_as_heads(seconds, module):
    p = weights(HEADS) | (weights(HEADS, "2") if seconds else {})

    def loss(p, x):
        w = p[module] if module else p
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w, seconds), None), x, w)[0] ** 2)

    p = {module: p} if module else p
    program = muonjax.inspect(loss, p, X)
    assert len(program.attentions) == 1 + seconds
    assert max(program.check_clip(p, X).values()) < 1e-5
    tx = muonjax.muonclip(0.02, program, threshold=1.0)
    (_, maxima), grads = jax.jit(muonjax.value_and_grad(loss))(p, X)
    jax.jit(tx.update)(grads, tx.init(p), p, max_logits=maxima)


# Differential attention: two attentions of one projection, whose heads' features are halves of the projection's.


def test_two_attentions_of_disjoint_features_of_every_head():
    p = weights()

    def loss(p, x):
        q, k, v = project(p, x, "qkv")
        halves = [jnp.split(y, 2, -1) for y in (q, k)]
        one, two = (
            jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", *pair)) for pair in zip(*halves, strict=True)
        )
        y = jnp.einsum("bhqk,bkhd->bqhd", one - 0.3 * two, v).reshape(x.shape)
        return jnp.mean((y @ p["o"]) ** 2)

    program = muonjax.inspect(loss, p, X)
    assert [s.span for a in program.attentions for s in a.site.scales] == [(0, 2)] * 2 + [(2, None)] * 2
    clip = program.check_clip(p, X)
    assert len(clip) == 2
    assert max(clip.values()) < 1e-5


def test_sites_whose_features_overlap_are_refused():
    def site(signal, first, end):
        scales = [
            muonjax.Scale(path=n, rank=2, entries=HEADS, span=(first, end), factor=factor)
            for n, factor in (("q", "query"), ("k", "key"))
        ]
        return muonjax.Site(path="", scales=tuple(scales), signal=signal)

    p = {n: weights()[n] for n in "qk"}
    muonjax.qk_clip(1.0, [site("a", 0, 2), site("b", 2, None)]).init(p)
    with pytest.raises(ValueError, match="clipped twice"):
        muonjax.qk_clip(1.0, [site("a", 0, 3), site("b", 2, None)]).init(p)


# Largest logits where something is added to them.


def hides_the_largest(p):
    """A mask under which every head's largest logit is another one."""
    logits = by_hand(p, X)
    return logits < np.sort(logits.reshape(2, HEADS, -1))[..., -12, None, None]


@pytest.mark.parametrize("number", [-1e4, -1e9])
def test_a_mask_that_was_rounded_to_bfloat16(number):
    p = weights()
    kept = hides_the_largest(p)

    def loss(p, x):
        logits = logits_of(p, x) + jnp.where(kept, 0, number).astype(jnp.bfloat16)
        return jnp.mean(read(p, x, logits) ** 2)

    expected = np.where(kept, by_hand(p, X), -np.inf).max((0, 2, 3))
    np.testing.assert_allclose(measured(loss, p, X)["max_logits"], expected, rtol=1e-5)


def masked_after_bias(p, x, move):
    """A bias, then a mask; in between `move` gives the logits other axes."""
    q, (k,), (v,) = project(p, x, "q", 4)[0], project(p, x, "k", 2), project(p, x, "v", 2)
    q = q.reshape(*q.shape[:2], 2, 2, -1)
    logits = jnp.einsum("bqgrd,bkgd->bgrqk", q, k) + 5.0 * jnp.arange(LENGTH)
    weights = jax.nn.softmax(jnp.where(np.tri(LENGTH, dtype=bool), move(logits), -1e9))
    weights = weights.reshape(len(x), 2, 2, LENGTH, LENGTH)
    y = jnp.einsum("bgrqk,bkgd->bqgrd", weights, v)
    return jnp.mean((y.reshape(*x.shape[:2], -1) @ p["o"]) ** 2)


GROUPED = {"q": draw(D, 16), "k": draw(D, 8, seed=1), "v": draw(D, 8, seed=2), "o": draw(16, D, seed=3)}


def test_a_bias_before_a_reshape_is_not_measured():
    loss = functools.partial(masked_after_bias, move=lambda x: x.reshape(x.shape[0], 4, LENGTH, LENGTH))
    q, k = (np.float64(X) @ np.float64(GROUPED[n]) for n in "qk")
    q, k = q.reshape(2, LENGTH, 4, 4), np.repeat(k.reshape(2, LENGTH, 2, 4), 2, 2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k)
    expected = np.where(np.tri(LENGTH, dtype=bool), logits, -np.inf).max((0, 2, 3))
    np.testing.assert_allclose(measured(loss, GROUPED, X)["max_logits"], expected, rtol=1e-5)


def test_a_bias_before_a_transpose_is_refused():
    loss = functools.partial(masked_after_bias, move=lambda x: x.swapaxes(1, 2))
    (problem,) = problems(muonjax.inspect(loss, GROUPED, X))
    assert problem == "something is added to its logits before their axes change order"


def test_a_bias_inside_of_another_function_is_refused():
    """There the logits without the bias are no result of it."""

    @jax.jit
    def biased(p, x):
        return logits_of(p, x) + 5.0 * jnp.arange(LENGTH)

    def loss(p, x):
        logits = jnp.where(np.tri(LENGTH, dtype=bool), biased(p, x), -1e9)
        return jnp.mean(read(p, x, logits) ** 2)

    (problem,) = problems(muonjax.inspect(loss, weights(), X))
    assert problem == "something is added to its logits in a function that does not return them without it"


@pytest.mark.parametrize("causal", [False, True])
def test_a_softmax_of_powers_of_two(causal):
    p = weights()
    mask = np.where(np.tri(LENGTH, dtype=bool), 0.0, -1e9) if causal else np.zeros((LENGTH, LENGTH))

    def softmax(logits):
        powers = jnp.exp2(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
        return powers / powers.sum(-1, keepdims=True)

    def loss(p, x):
        return jnp.mean(read(p, x, logits_of(p, x) * np.log2(np.e) + mask, softmax) ** 2)

    expected = (by_hand(p, X) + mask).max((0, 2, 3))
    np.testing.assert_allclose(measured(loss, p, X)["max_logits"], expected, rtol=1e-5)
    assert max(muonjax.inspect(loss, p, X).check_clip(p, X).values()) < 1e-5


# A scan over a stack in another order than its own.


def scanned(p, x, change=lambda w: w, reverse=False):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, change(p), reverse=reverse)[0] ** 2)


def of_all(move):
    return lambda p: jax.tree.map(move, p)


@pytest.mark.parametrize(
    "change",
    [
        of_all(lambda w: w[::-1]),
        lambda p: p | {"k": p["k"][::-1]},
        of_all(lambda w: jnp.concatenate([w, w])),
        of_all(lambda w: jnp.repeat(w, 2, 0)),
        of_all(lambda w: jnp.pad(w, [(0, 1), (0, 0), (0, 0)])),
    ],
    ids=["reversed", "reversed keys", "one after the other", "repeated", "padded"],
)
def test_layers_in_another_order_are_refused(change):
    program = muonjax.inspect(functools.partial(scanned, change=change), weights(2), X)
    (problem,) = problems(program)
    assert problem.endswith(" are in another order than the parameter's")
    assert program.dimension_numbers()["q"] == muonjax.MuonDimensionNumbers(1, 2)


def test_matrices_that_a_sum_takes_in_both_orders():
    def loss(p, x):
        def both(x, w):
            one, other = w
            return jnp.tanh(x @ one + x @ other), None

        return jnp.mean(jax.lax.scan(both, x, (p, p[::-1]))[0])

    program = muonjax.inspect(loss, draw(2, D, D), X)
    assert program.dimension_numbers() == muonjax.MuonDimensionNumbers(1, 2)


@pytest.mark.parametrize("change", [lambda w: w, of_all(lambda w: w[::-1][::-1])], ids=["", "twice"])
@pytest.mark.parametrize("reverse", [False, True])
def test_layers_in_their_order_and_a_scan_from_the_last_one(change, reverse):
    p, x, expected = weights(2), X, {}
    for i in [1, 0] if reverse else [0, 1]:
        w = {n: v[i] for n, v in p.items()}
        expected[i] = by_hand(w, x).max((0, 2, 3))
        x = np.asarray(jax.jit(layer)(x, w))
    loss = functools.partial(scanned, change=change, reverse=reverse)
    assert problems(muonjax.inspect(loss, p, X)) == [""]
    found = measured(loss, p, X)["max_logits"]
    np.testing.assert_allclose(found, [expected[0], expected[1]], rtol=1e-4)


def test_a_reversed_bias_is_refused():
    def loss(p, x):
        q, k, v = project(p, x, "qkv")
        logits = jnp.einsum("bqhd,bkhd->bhqk", q + p["b"][::-1], k)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(x.shape)
        return jnp.mean((y @ p["o"]) ** 2)

    program = muonjax.inspect(loss, weights() | {"b": draw(HEADS, SIZE, seed=9)}, X)
    assert problems(program) == ["its queries are in another order than the parameter's"]


def test_layers_put_together_inside_of_the_function_are_refused():
    """A scan over a stack of several parameters: its largest logits would be those of all of them."""
    layers = [weights(), weights(suffix="")]

    def loss(layers, x):
        return scanned(jax.tree.map(lambda *w: jnp.stack(w), *layers), x)

    program = muonjax.inspect(loss, layers, X)
    assert problems(program) == ["its queries are in another order than the parameter's"]
    assert program.dimension_numbers()[1]["q"] == muonjax.MuonDimensionNumbers(0, 1)


@pytest.mark.parametrize("of_keys", [False, True])
def test_a_kernel_whose_columns_have_a_constant_order_is_refused(of_keys):
    order = np.random.default_rng(0).permutation(D)
    name, what = ("k", "keys") if of_keys else ("q", "queries")

    def loss(p, x):
        p = p | {name: p[name][:, order]}
        return jnp.mean(read(p, x, logits_of(p, x)) ** 2)

    (problem,) = problems(muonjax.inspect(loss, weights(), X))
    assert problem == f"its {what} are in another order than the parameter's"


@pytest.mark.parametrize("use", ["values", "gain", "other half"])
def test_a_bias_that_is_used_for_something_else_is_refused(use):
    def loss(p, x):
        q = (x @ p["q"] + p["b"][:D]).reshape(*x.shape[:2], HEADS, SIZE)
        k, v = project(p, x, "kv")
        if use == "values":
            v = v + p["b"][:D].reshape(HEADS, SIZE)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(x.shape)
        return jnp.mean((y * {"gain": p["b"][:D]}.get(use, p["b"][D:]) @ p["o"]) ** 2)

    program = muonjax.inspect(loss, weights() | {"b": draw(2 * D, seed=9)}, X)
    (problem,) = problems(program)
    if use == "other half":
        assert problem == ""
        assert max(program.check_clip(weights() | {"b": draw(2 * D, seed=9)}, X).values()) < 1e-5
    else:
        assert problem.startswith("a clip would not scale its logits alone: test_found_by_hunting_clips.py:")


# Queries that share a key head: beside each other, or in turns.

PAIRS = 2


def grouped_logits(p, x, spelling):
    """[batch, heads, queries, keys]; query head h reads key head h // 2, or h % 2, which is refused."""
    q = x @ p["q"]
    k = jnp.reshape(x @ p["k"], (*x.shape[:2], PAIRS, SIZE))
    if spelling == "in turns":
        q = q.reshape(*x.shape[:2], PAIRS, PAIRS, SIZE)
        return jnp.einsum("bqgnd,bknd->bgnqk", q, k).reshape(x.shape[0], 2 * PAIRS, LENGTH, LENGTH)
    k = jnp.tile(k, (1, 1, 2, 1)) if spelling == "tiled" else jnp.repeat(k, 2, 2)
    return jnp.einsum("bqhd,bkhd->bhqk", q.reshape(*x.shape[:2], 2 * PAIRS, SIZE), k)


@pytest.mark.parametrize("shared_keys", ["query", "balanced", "group"])
@pytest.mark.parametrize("spelling", ["repeated", "tiled", "in turns"])
def test_each_query_head_is_clipped_with_the_key_head_that_it_reads(spelling, shared_keys):
    p = {"q": draw(D, 16), "k": draw(D, 8, seed=1), "v": draw(D, 16, seed=2), "o": draw(16, D, seed=3)}

    def loss(p, x):
        v = jnp.reshape(x @ p["v"], (*x.shape[:2], 2 * PAIRS, SIZE))
        weights = jax.nn.softmax(grouped_logits(p, x, spelling))
        return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], 16) @ p["o"]) ** 2)

    program = muonjax.inspect(loss, p, X)
    if spelling != "repeated":
        assert problems(program)[0].startswith(("the heads of its logits are not", "a clip would not scale"))
        return
    assert problems(program) == [""]
    logits = jax.jit(functools.partial(grouped_logits, spelling=spelling))
    before = logits(p, X)
    maxima = measured(loss, p, X)
    np.testing.assert_allclose(maxima["max_logits"], before.max((0, 2, 3)), rtol=1e-5)
    threshold = float(jnp.median(before.max((0, 2, 3))))
    after = logits(muonjax.apply_qk_clip(p, maxima, program, threshold, shared_keys=shared_keys), X)
    factor = np.minimum(1, threshold / before.max((0, 2, 3)))
    if shared_keys == "group":  # the whole group as its hottest head
        for heads in [[0, 1], [2, 3]]:
            factor[heads] = factor[heads].min()
    np.testing.assert_allclose(after, factor[:, None, None] * before, rtol=1e-4, atol=1e-5)


# No attention is left out: where its logits are lost, it is listed with the line that multiplies its values.


def written_in_place(p, x):
    q, k, v = project(p, x, "qkv")
    buffer = jnp.zeros_like(q)
    for h in range(HEADS):
        buffer = buffer.at[:, :, h].set(q[:, :, h])
    return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", buffer, k)), v


def changed_in_place(p, x):
    return jax.nn.softmax(logits_of(p, x).at[..., 0].add(-3.0)), project(p, x, "v")[0]


def multiplied_entry_by_entry(p, x):
    q, k, v = project(p, x, "qkv")
    return jax.nn.softmax(jnp.moveaxis((q[:, :, None] * k[:, None]).sum(-1), 3, 1)), v


def largest_three(p, x):
    largest, where = jax.lax.top_k(logits_of(p, x), 3)
    chosen = jax.nn.one_hot(where, LENGTH)
    return jnp.einsum("bhqn,bhqnk->bhqk", jax.nn.softmax(largest), chosen), project(p, x, "v")[0]


@pytest.mark.parametrize("by_product", [True, False])
@pytest.mark.parametrize(
    "spell",
    [written_in_place, changed_in_place, multiplied_entry_by_entry, largest_three, None],
    ids=lambda spell: getattr(spell, "__name__", "plain"),
)
def test_no_attention_is_left_out(spell, by_product):
    def loss(p, x):
        weights, v = spell(p, x) if spell else (jax.nn.softmax(logits_of(p, x)), project(p, x, "v")[0])
        if by_product:
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        else:
            y = (jnp.moveaxis(weights, 1, -1)[..., None] * v[:, None]).sum(2)
        return jnp.mean((y.reshape(x.shape) @ p["o"]) ** 2)

    (problem,) = problems(muonjax.inspect(loss, weights(), X))
    if spell is None and by_product:
        assert problem == ""
    else:
        assert problem.startswith(
            "its queries, keys and values can't all be followed to parameters: test_found_by"
        )


def kernels_of_features(p, x):
    """Linear attention."""
    q, k, v = project(p, x, "qkv")
    return jnp.einsum("bqhd,bkhd,bkhe->bqhe", jnp.exp(q), jax.nn.softmax(k, 1), v)


def decayed_state(p, x):
    """A state-space product: the exponential is the decay's."""
    q, k, v = project(p, x, "qkv")
    time = jnp.cumsum(jax.nn.softplus(x @ p["o"])[..., :HEADS], 1)
    decay = jnp.exp(jnp.minimum(time[:, :, None] - time[:, None], 0))
    return jnp.einsum("bqhd,bkhd,bqkh,bkhe->bqhe", q, k, decay, v)


def rectified(p, x):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.relu(logits_of(p, x)), project(p, x, "v")[0])


def two_towers(p, x):
    q, k, v = (y.reshape(-1, D) for y in project(p, x, "qkv"))
    soft = jax.nn.softmax(q @ k.T)
    return jnp.sum(soft * jax.nn.log_softmax(k @ q.T)) + v


def pooled_after_a_product(p, x):
    """Of products of queries and keys nothing is left but what a layer made of them."""
    y = rectified(p, x).reshape(x.shape) @ p["o"]
    return y + jnp.einsum("bth,btd->bhd", jax.nn.softmax(y[..., :1], 1), y)


@pytest.mark.parametrize("spell", [decayed_state, rectified, two_towers])
def test_no_softmax_of_keys_is_no_attention(spell):
    program = muonjax.inspect(
        lambda p, x: jnp.mean((spell(p, x).reshape(x.shape) @ p["o"]) ** 2), weights(), X
    )
    assert problems(program) == []


@pytest.mark.parametrize("spell", [kernels_of_features, pooled_after_a_product])
def test_a_softmax_over_positions_has_learned_queries(spell):
    """The columns of a matrix; nothing tells them from queries that a model learns."""
    program = muonjax.inspect(
        lambda p, x: jnp.mean((spell(p, x).reshape(x.shape) @ p["o"]) ** 2), weights(), X
    )
    (problem,) = problems(program)
    assert problem.startswith(
        "its queries, keys and values can't all be followed to parameters: test_found_by"
    )


def test_queries_that_read_keys_and_their_means():
    """Two attentions of the same projections are one: its largest logit is that of both."""

    def both(p, x):
        q, k, v = project(p, x, "qkv")
        means = [y.reshape(x.shape[0], LENGTH // 2, 2, HEADS, SIZE).mean(2) for y in (k, v)]
        pairs = [(jnp.einsum("bqhd,bkhd->bhqk", q, keys), values) for keys, values in ((k, v), means)]
        y = sum(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(a), values) for a, values in pairs)
        return jnp.mean((y.reshape(x.shape) @ p["o"]) ** 2), jnp.concatenate([a for a, _ in pairs], -1)

    p = weights()
    program = muonjax.inspect(lambda p, x: both(p, x)[0], p, X)
    assert problems(program) == [""]
    maxima = measured(lambda p, x: both(p, x)[0], p, X)
    before = jax.jit(both)(p, X)[1]
    np.testing.assert_allclose(maxima["max_logits"], before.max((0, 2, 3)), rtol=1e-5)
    threshold = 0.7 * float(before.max((0, 2, 3)).min())
    after = jax.jit(both)(muonjax.apply_qk_clip(p, maxima, program, threshold), X)[1]
    factor = (threshold / before.max((0, 2, 3)))[:, None, None]
    np.testing.assert_allclose(after, factor * before, rtol=1e-4, atol=1e-5)
