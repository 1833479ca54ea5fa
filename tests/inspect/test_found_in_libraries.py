"""What models of public libraries showed: one small function for each cause."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax

pytestmark = pytest.mark.promotes("the functions are written as the libraries' are")

D, HEADS, SIZE = 16, 2, 8
X = jax.ShapeDtypeStruct((3, 5, D), jnp.float32)


def weights(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


QKV = weights(q=(D, D), k=(D, D), v=(D, D), o=(D, D))


def attend(p, x, turn=lambda q: q, weigh=lambda a: a, bias=0.0):
    """Attention of two heads; `turn` is applied to queries and keys, `weigh` to softmax's result."""
    q, k, v = (jnp.reshape(x @ p[name], (*x.shape[:2], HEADS, SIZE)) for name in "qkv")
    logits = jnp.einsum("bqhd,bkhd->bhqk", turn(q), turn(k)) / np.sqrt(SIZE)
    read = jnp.einsum("bhqk,bkhd->bqhd", weigh(jax.nn.softmax(logits + bias)), v)
    return x + read.reshape(x.shape) @ p["o"]


def entries(program):
    """Path, heads, size and span of what each attention scales, or the problem."""
    return [
        a.problem or {(s.path, s.factor): (s.entries, s.start, s.size, s.span) for s in a.site.scales}
        for a in program.attentions
    ]


FOUND = {("q", "query"): (HEADS, 0, D, (0, None)), ("k", "key"): (HEADS, 0, D, (0, None))}


def test_a_mask_of_heads_by_einsum_leaves_attention_as_it_is():
    """BERT: `einsum("...hqk,h->...hqk", weights, head_mask)`."""

    def loss(p, x, mask):
        y = attend(p, x, weigh=lambda a: jnp.einsum("bhqk,h->bhqk", a, mask))
        return jnp.mean(y**2)

    assert entries(muonjax.inspect(loss, QKV, X, jax.ShapeDtypeStruct((HEADS,), jnp.float32))) == [FOUND]


def test_logits_multiplied_by_data_by_einsum():
    def loss(p, x, scale):
        q, k, v = (jnp.reshape(x @ p[name], (*x.shape[:2], HEADS, SIZE)) for name in "qkv")
        logits = jnp.einsum("bhqk,h->bhqk", jnp.einsum("bqhd,bkhd->bhqk", q, k), scale)
        read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
        return jnp.mean((read.reshape(x.shape) @ p["o"]) ** 2)

    scale, x, p = jnp.array([0.5, 2.0]), jnp.ones(X.shape), jax.tree.map(lambda s: jnp.ones(s.shape), QKV)
    assert entries(muonjax.inspect(loss, p, x, scale)) == [FOUND]
    (_, maxima), _ = jax.jit(muonjax.value_and_grad(loss))(p, x, scale)
    (found,) = maxima.values()
    np.testing.assert_allclose(found, [0.5 * D**2 * SIZE, 2.0 * D**2 * SIZE])


def test_refused_attentions_on_one_line_are_counted_apart():
    """T5's layers: one line of code for all of them."""
    shapes = {"layer0": QKV, "layer1": QKV, "bias": weights(b=(HEADS, 5, 5))["b"]}

    def loss(p, x):
        for name in ("layer0", "layer1"):
            x = attend(p[name], x, bias=p["bias"])
        return jnp.mean(x**2)

    program = muonjax.inspect(loss, shapes, X)
    assert [a.name for a in program.attentions] == ["layer0", "layer1"]
    assert all(a.problem.startswith("a learned bias") for a in program.attentions)


def rotated(x, count=SIZE):
    """A rotary embedding of neighbouring features, of the first `count`."""
    angles = np.arange(x.shape[1])[:, None] / np.arange(1, count // 2 + 1)
    cos, sin = np.repeat(np.cos(angles), 2, -1)[:, None], np.repeat(np.sin(angles), 2, -1)[:, None]
    first, rest = x[..., :count], x[..., count:]
    half = jnp.stack([-first[..., 1::2], first[..., ::2]], -1).reshape(first.shape)
    return jnp.concatenate([first * cos + half * sin, rest], -1)


@pytest.mark.parametrize("count", [SIZE, SIZE // 2])
def test_a_rotation_of_neighbouring_features(count):
    """RoFormer, and GPT-J, which rotates some of them."""
    program = muonjax.inspect(
        lambda p, x: jnp.mean(attend(p, x, turn=lambda q: rotated(q, count)) ** 2), QKV, X
    )
    assert entries(program) == [FOUND]


def test_a_rotation_by_einsum_with_constants_is_no_other_use_and_no_head():
    """RoFormer: `einsum("bslh,...slh->bslh", query, cos)`."""

    def turn(q):
        cos = np.cos(np.arange(q.shape[1]))[None, :, None, None] * np.ones((1, 1, HEADS, SIZE))
        return jnp.einsum("blhd,...lhd->blhd", q, cos[0].astype(np.float32))

    program = muonjax.inspect(lambda p, x: jnp.mean(attend(p, x, turn=turn) ** 2), QKV, X)
    assert entries(program) == [FOUND]
    assert program.dimension_numbers(attention="heads")["q"] == muonjax.FusedDimensionNumbers(0, 1, HEADS, 1)


def test_a_scalar_times_a_product():
    """CLIP: `logit_scale * text @ image.T`, then transposed."""

    def loss(p, x, y):
        pairs = jnp.exp(p["scale"]) * ((x @ p["text"]) @ (y @ p["image"]).T)
        return -jnp.mean(jax.nn.log_softmax(pairs.T) + jax.nn.log_softmax(pairs).T)

    shapes = weights(scale=(), text=(D, 4), image=(D, 4))
    x = jax.ShapeDtypeStruct((3, D), jnp.float32)
    numbers = muonjax.inspect(loss, shapes, x, x).dimension_numbers()
    assert numbers["scale"] is None
    assert numbers["text"] is not None
    assert numbers["image"] is not None


def test_a_repeated_parameter():
    """CLIP: `tile(class_embedding, (batch, 1, 1))` before the patches."""

    def loss(p, x):
        first = jnp.tile(p["first"], (x.shape[0], 1, 1))
        return jnp.mean(attend(p, jnp.concatenate([first, x @ jnp.tile(p["w"], (1, 2))], 1)) ** 2)

    shapes = {**QKV, **weights(first=(1, 1, D), w=(D, D // 2))}
    program = muonjax.inspect(loss, shapes, X)
    assert program.why("first").startswith("joined with data")
    assert program.dimension_numbers()["w"] is not None


def test_queries_that_share_a_key_head_are_heads_of_their_own():
    def loss(p, x):
        q = jnp.einsum("btd,hds->bths", x, p["q"]).reshape(*x.shape[:2], 2, 2, SIZE)
        k, v = (jnp.einsum("btd,hds->bths", x, p[name]) for name in "kv")
        a = jax.nn.softmax(jnp.einsum("btkgs,buks->bkgtu", q, k))
        return jnp.mean(jnp.einsum("bkgtu,buks->btkgs", a, v) ** 2)

    shapes = weights(q=(4, D, SIZE), k=(2, D, SIZE), v=(2, D, SIZE))
    numbers = muonjax.inspect(loss, shapes, X).dimension_numbers(attention="heads")
    assert numbers["q"] == numbers["k"] == muonjax.MuonDimensionNumbers(1, 2)


def test_a_matrix_for_each_head_of_an_interleaved_kernel():
    """Bloom: queries, keys and values of a head side by side."""

    def loss(p, x):
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], HEADS, 3 * SIZE), 3, -1)
        a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        y = jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(x.shape)
        return jnp.mean((y @ p["o"]) ** 2)

    shapes = weights(qkv=(D, 3 * D), o=(D, D))
    numbers = muonjax.inspect(loss, shapes, X).dimension_numbers(attention="heads")
    assert numbers["qkv"] == muonjax.FusedDimensionNumbers(0, 1, 3 * HEADS, 1)


@pytest.mark.parametrize("spelling", ["slices", "slices of each head"])
def test_a_kernel_that_is_cut_before_its_products(spelling):
    """PyTorch's `in_proj_weight`; heads that are computed one by one are no matrices of their own."""
    count = 1 if spelling == "slices" else HEADS

    def loss(p, x):
        width = D // count
        q, k, v = (
            jnp.concatenate([x @ p["in"][i * D + h * width :][:width].T for h in range(count)], -1)
            for i in range(3)
        )
        q, k, v = (jnp.reshape(z, (*x.shape[:2], HEADS, SIZE)) for z in (q, k, v))
        a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        y = jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(x.shape)
        return jnp.mean((y @ p["out"].T) ** 2)

    shapes = weights(**{"in": (3 * D, D), "out": (D, D)})
    numbers = muonjax.inspect(loss, shapes, X).dimension_numbers()
    assert numbers["in"] == muonjax.FusedDimensionNumbers(1, 0, 3, 0)


def test_gates_cut_before_their_products():
    """Haiku's GRU: the candidate's product comes after the gates' one."""

    def loss(p, x):
        def step(state, x):
            gates, new = jnp.split(p["w"], [2 * SIZE], 1)
            update, reset = jnp.split(jax.nn.sigmoid(x @ p["x"] + state @ gates), 2, -1)
            state = (1 - update) * state + update * jnp.tanh((reset * state) @ new)
            return state, state

        return jnp.mean(jax.lax.scan(step, jnp.zeros((x.shape[1], SIZE)), x)[1] ** 2)

    shapes = weights(x=(D, 2 * SIZE), w=(SIZE, 3 * SIZE))
    numbers = muonjax.inspect(loss, shapes, X).dimension_numbers()
    assert numbers["w"] == muonjax.FusedDimensionNumbers(0, 1, (2 * SIZE, SIZE), 1)


@pytest.mark.parametrize("of_parameter", [False, True])
def test_queries_keys_and_values_unpacked_along_an_axis(of_parameter):
    """NNX with `q, k, v = jnp.moveaxis(qkv, 2, 0)`: an operation of its own in JAX 0.12."""

    def loss(p, x):
        if of_parameter:
            q, k, v = (jnp.einsum("btd,dhs->bths", x, w) for w in jnp.moveaxis(p["qkv"], 1, 0))
        else:
            q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhs->btnhs", x, p["qkv"]), 2, 0)
        return jnp.mean(jax.nn.dot_product_attention(q, k, v) ** 2)

    program = muonjax.inspect(loss, weights(qkv=(D, 3, HEADS, SIZE)), X)
    assert program.dimension_numbers()["qkv"] == muonjax.MuonDimensionNumbers(0, (2, 3))
    assert program.dimension_numbers(attention="heads")["qkv"] == muonjax.MuonDimensionNumbers(0, 3)
    if of_parameter:
        several = "its queries and keys are cut into heads or layers in several ways"
        assert [a.problem for a in program.attentions] == [several]
        return
    (scales,) = (a.site.scales for a in program.attentions)
    assert [(s.factor, s.entries, s.start, s.size) for s in scales] == [
        ("query", HEADS, 0, D),
        ("key", HEADS, D, D),
    ]


GROUPED = weights(
    q=(D, 4, SIZE),
    k=(D, 2, SIZE),
    v=(D, 2, SIZE),
    o=(4, SIZE, D),
    sinks=(4,),
    mix=(4, 4),
    gate=(D, 4),
    last=(D, D),
)


def grouped(p, x, turn=lambda q: q, soften=jax.nn.softmax, gate=lambda x: 1.0):
    """Two queries for each key head, whose logits have one axis of heads."""
    q, k, v = (jnp.einsum("btd,dhs->bths", x, p[name]) for name in "qkv")
    q = turn(q).reshape(*x.shape[:2], 2, 2, SIZE)
    logits = jnp.einsum("btkgs,buks->bkgtu", q, turn(k)) / np.sqrt(SIZE)
    shares = soften(logits.reshape(x.shape[0], 4, *logits.shape[3:])).reshape(logits.shape)
    y = jnp.einsum("bkgtu,buks->btkgs", shares, v).reshape(*x.shape[:2], 4, SIZE) * gate(x)
    return jnp.mean((jnp.einsum("bths,hsd->btd", y, p["o"]) @ p["last"]) ** 2)


def of_grouped(**settings):
    """A program, whose settings are functions of the parameters, and what `check_clip` says of it."""

    def loss(p, x):
        return grouped(p, x, **{name: setting(p) for name, setting in settings.items()})

    rng = np.random.default_rng(0)
    p, x = jax.tree.map(lambda s: jnp.float32(rng.normal(size=s.shape)), (GROUPED, X))
    with pytest.warns(UserWarning, match="never used"):
        program = muonjax.inspect(loss, p, x)
    return program, lambda: program.check_clip(p, x)


def causal(logits):
    return jnp.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -1e9)


def with_a_mask(p):
    """Tunix's Llama: the mask comes after the reshape."""
    return lambda logits: jax.nn.softmax(causal(logits))


def with_sinks(p):
    """gpt-oss: a learned logit for each head beside those of the keys."""

    def soften(logits):
        sinks = jnp.broadcast_to(p["sinks"][:, None, None], (*logits.shape[:3], 1))
        return jax.nn.softmax(jnp.concatenate([logits, sinks], -1))[..., :-1]

    return soften


def with_sinks_in_the_sum(p):
    """Its kernels: the sink takes part in the maximum and in the sum."""

    def soften(logits):
        sinks = p["sinks"][:, None, None]
        largest = jnp.maximum(logits.max(-1, keepdims=True), sinks)
        shares = jnp.exp(logits - largest)
        return shares / (shares.sum(-1, keepdims=True) + jnp.exp(sinks - largest))

    return soften


@pytest.mark.parametrize("soften", [with_a_mask, with_sinks, with_sinks_in_the_sum])
def test_a_sink_is_no_logit_of_the_keys(soften):
    program, check = of_grouped(soften=soften)
    found = {("q", "query"): (4, 0, 4 * SIZE, (0, None)), ("k", "key"): (2, 0, 2 * SIZE, (0, None))}
    assert entries(program) == [found]
    assert max(map(abs, check().values())) < 1e-5
    assert program.dimension_numbers()["sinks"] is None
    assert program.dimension_numbers()["o"] == muonjax.MuonDimensionNumbers((0, 1), 2)


def test_heads_that_are_mixed_before_softmax_are_refused():
    """Talking heads."""
    program, _ = of_grouped(
        soften=lambda p: lambda logits: jax.nn.softmax(jnp.einsum("bhtu,hg->bgtu", logits, p["mix"]))
    )
    (problem,) = entries(program)
    assert problem.startswith("a product mixes its logits: test_found_in_libraries.py")


def test_heads_that_are_mixed_after_softmax_are_found():
    program, check = of_grouped(
        soften=lambda p: lambda logits: jnp.einsum("bhtu,hg->bgtu", jax.nn.softmax(logits), p["mix"])
    )
    assert [set(found) for found in entries(program)] == [{("q", "query"), ("k", "key")}]
    assert max(map(abs, check().values())) < 1e-5


def test_a_mask_after_a_sink_is_refused():
    """The largest logit would be the sink's, or one that is masked."""

    def soften(p):
        def masked(logits):
            sinks = jnp.broadcast_to(p["sinks"][:, None, None], (*logits.shape[:3], 1))
            joined = jnp.concatenate([logits, sinks], -1)
            keep = np.tril(np.ones(joined.shape[-2:], bool), 1)
            return jax.nn.softmax(jnp.where(keep, joined, -1e9))[..., :-1]

        return masked

    program, _ = of_grouped(soften=soften)
    (problem,) = entries(program)
    assert problem == "the heads of its logits are not those of its projections"


def test_one_softmax_of_two_products_is_refused():
    """Keys of two kinds, such as local and compressed ones."""

    def loss(p, x):
        q, k, v, c = (jnp.reshape(x @ p[name], (*x.shape[:2], HEADS, SIZE)) for name in "qkvc")
        logits = [jnp.einsum("bqhd,bkhd->bhqk", q, keys) for keys in (k, c)]
        y = jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.concatenate(logits, -1)), jnp.concatenate([v, v], 1)
        )
        return jnp.mean((y.reshape(x.shape) @ p["o"]) ** 2)

    (problem,) = entries(muonjax.inspect(loss, QKV | weights(c=(D, D)), X))
    assert problem.startswith("its logits are joined with others: test_found_in_libraries.py")


def test_normalized_queries_of_shared_keys_are_no_experts():
    """Qwen3: a norm of each head's queries differs along heads and not along features, as an expert's gate does."""

    def turn(p):
        return lambda q: q * jax.lax.rsqrt(jnp.mean(q**2, -1, keepdims=True) + 1e-6)

    program, _ = of_grouped(turn=turn)
    assert entries(program)[0].startswith("its queries are normalized")
    assert program.dimension_numbers()["q"] == muonjax.MuonDimensionNumbers(0, (1, 2))


@pytest.mark.parametrize("function", [jax.nn.sigmoid, lambda x: 1 / jnp.abs(x)])
def test_a_factor_of_each_head_counts_no_experts(function):
    """A gate of heads, and a softmax's sum that divides last, as in MaxText: `o` stays one matrix."""
    program, _ = of_grouped(gate=lambda p: lambda x: function(x @ p["gate"])[..., None])
    assert program.dimension_numbers()["o"] == muonjax.MuonDimensionNumbers((0, 1), 2)


def test_an_index_that_stands_in_the_program():
    """Haliax unbinds queries, keys and values by `jnp.take`, a gather whose index is compared with zero first."""

    def loss(p, x):
        qkv = jnp.einsum("btd,dnhs->btnhs", x, p["qkv"])
        q, k, v = (jnp.take(qkv, i, axis=2) for i in (-3, 1, 2))
        return jnp.mean(jax.nn.dot_product_attention(q, k, v) ** 2)

    program = muonjax.inspect(loss, weights(qkv=(D, 3, HEADS, SIZE)), X)
    assert program.dimension_numbers()["qkv"] == muonjax.MuonDimensionNumbers(0, (2, 3))
    (scales,) = (a.site.scales for a in program.attentions)
    assert [(s.factor, s.entries, s.start, s.size) for s in scales] == [
        ("query", HEADS, 0, D),
        ("key", HEADS, D, D),
    ]


@pytest.mark.parametrize("merged", ["products", "logits"])
def test_heads_and_batch_in_one_axis(merged):
    """As ported from `torch.bmm`: queries, or logits, with one axis for examples and heads."""

    def loss(p, x):
        b, t, _ = x.shape
        q, k, v = ((x @ p[name]).reshape(b, t, HEADS, SIZE).swapaxes(1, 2) for name in "qkv")
        if merged == "products":
            q, k, v = (z.reshape(b * HEADS, t, SIZE) for z in (q, k, v))
        logits = (q @ k.swapaxes(-1, -2) / np.sqrt(SIZE)).reshape(b * HEADS, t, t)
        shares = jax.nn.softmax(causal(logits))
        y = (shares.reshape(*q.shape[:-1], t) @ v).reshape(b, HEADS, t, SIZE).swapaxes(1, 2)
        return jnp.mean((y.reshape(x.shape) @ p["o"]) ** 2)

    rng = np.random.default_rng(0)
    p, x = jax.tree.map(lambda s: jnp.float32(rng.normal(size=s.shape)), (QKV, X))
    program = muonjax.inspect(loss, p, x)
    assert entries(program) == [FOUND]
    assert max(map(abs, program.check_clip(p, x).values())) < 1e-5


def test_a_norm_before_tokens_are_sorted_is_no_table():
    """Mixtral in Levanter: the tokens, in whose norm a parameter is a factor, are sorted by their expert."""

    def loss(p, x):
        y = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) * p["norm"]
        return jnp.mean((jnp.take(y, jnp.argsort(y[:, 0, 0]), axis=0) @ p["w"] @ p["last"]) ** 2)

    program = muonjax.inspect(loss, weights(norm=(D,), w=(D, D), last=(D, D)), X)
    assert program.why("norm").startswith("multiplied entry by entry")


def test_one_learned_query_of_all_examples():
    """Pooling by attention: queries made of parameters alone, with no axis that counts them."""

    def loss(p, x):
        shares = jax.nn.softmax(jnp.einsum("d,bkd->bk", p["query"] @ p["q"], x @ p["k"]) / np.sqrt(D))
        return jnp.mean((jnp.einsum("bk,bkd->bd", shares, x @ p["v"]) @ p["o"]) ** 2)

    rng = np.random.default_rng(0)
    p, x = jax.tree.map(lambda s: jnp.float32(rng.normal(size=s.shape)), (QKV | weights(query=(D,)), X))
    program = muonjax.inspect(loss, p, x)
    assert program.why("query").startswith("a learned input")
    assert program.dimension_numbers()["q"] == muonjax.MuonDimensionNumbers(0, 1)
    assert max(map(abs, program.check_clip(p, x).values())) < 1e-5


def test_a_head_of_one_column_is_no_matrix_of_its_own():
    """Gated delta nets: a rate for each head, by one kernel."""

    def loss(p, x):
        q, k, v = (jnp.reshape(x @ p[name], (*x.shape[:2], HEADS, SIZE)) for name in "qkv")
        rate = jax.nn.sigmoid(x @ p["rate"])
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k * rate[..., None])
        return jnp.mean((jnp.einsum("bhqk,bkhd->bqhd", logits, v).reshape(x.shape) @ p["o"]) ** 2)

    numbers = muonjax.inspect(loss, QKV | weights(rate=(D, HEADS)), X).dimension_numbers(attention="heads")
    assert numbers["rate"] == muonjax.MuonDimensionNumbers(0, 1)
    assert numbers["q"] == muonjax.FusedDimensionNumbers(0, 1, HEADS, 1)


def test_queries_of_adapters_alone_are_added_to_frozen_ones():
    """Gemma's adapters: a clip of them alone leaves the frozen part of the queries as large as it is."""

    def loss(p, x, frozen):
        q, k, v = (jnp.reshape(x @ p[name] + x @ frozen, (*x.shape[:2], HEADS, SIZE)) for name in "qkv")
        read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        return jnp.mean((read.reshape(x.shape) @ p["o"]) ** 2)

    (problem,) = entries(muonjax.inspect(loss, QKV, X, jax.ShapeDtypeStruct((D, D), jnp.float32)))
    assert problem.startswith("its queries are added to something else: test_found_in_libraries.py")


def test_parts_that_are_cut_after_an_activation():
    """Gated delta nets: queries, keys and values by one kernel, a depthwise convolution and SiLU before they part."""

    def loss(p, x):
        q, k, v = jnp.split(jax.nn.silu(x @ p["qkv"]), 3, -1)
        return jnp.mean((jnp.einsum("bqk,bkd->bqd", jnp.einsum("bqd,bkd->bqk", q, k), v) @ p["o"]) ** 2)

    numbers = muonjax.inspect(loss, weights(qkv=(D, 3 * D), o=(D, D)), X).dimension_numbers()
    assert numbers["qkv"] == muonjax.FusedDimensionNumbers(0, 1, 3, 1)


def convolved(x, kernel):
    """Each feature by itself along the positions."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC"), feature_group_count=x.shape[-1]
    )


@pytest.mark.parametrize(
    "convolve", [lambda y, p: convolved(y, p["conv"]), lambda y, p: y + y[:, :1] * p["add"]]
)
def test_parts_that_are_cut_after_a_depthwise_convolution(convolve):
    def loss(p, x):
        y = jax.nn.silu(convolve(x @ p["qkv"], p))
        q, k, v = jnp.split(y, [D, D + SIZE], -1)
        gates = jnp.einsum("btd,bts->bds", q, k)
        return jnp.mean((jnp.einsum("bds,btv->bsd", gates, v) @ p["o"]) ** 2)

    shapes = weights(qkv=(D, 2 * D + SIZE), conv=(3, 1, 2 * D + SIZE), add=(2 * D + SIZE,), o=(D, D))
    with pytest.warns(UserWarning, match="never used"):
        numbers = muonjax.inspect(loss, shapes, X).dimension_numbers()
    assert numbers["qkv"] == muonjax.FusedDimensionNumbers(0, 1, (D, SIZE, D), 1)
    assert numbers["conv"] is None


@pytest.mark.parametrize("layers", [0, 8])
def test_parts_that_are_cut_after_a_sum_with_data(layers):
    """Gemma's adapters: beside a frozen kernel, also after many layers."""
    names = [f"w{i}" for i in range(layers)]

    def loss(p, x, frozen):
        for name in names:
            x = x + jnp.tanh(x) @ p[name]
        q, k, v = jnp.split(x @ p["a"] @ p["b"] + x @ frozen, 3, -1)
        return jnp.mean((jnp.einsum("bqk,bkd->bqd", jnp.einsum("bqd,bkd->bqk", q, k), v) @ p["o"]) ** 2)

    frozen = jax.ShapeDtypeStruct((D, 3 * D), jnp.float32)
    shapes = weights(a=(D, 2), b=(2, 3 * D), o=(D, D), **dict.fromkeys(names, (D, D)))
    assert muonjax.inspect(loss, shapes, X, frozen).dimension_numbers()["b"] == muonjax.FusedDimensionNumbers(
        0, 1, 3, 1
    )


def test_columns_that_are_used_one_by_one_stay_one_matrix():
    """Gemma3n: coefficients of its streams."""

    def loss(p, x):
        mix = x @ p["mix"] + 1
        return jnp.mean(((x * mix[..., :1] + jnp.roll(x, 1, 0) * mix[..., 1:]) @ p["w"] @ p["o"]) ** 2)

    shapes = weights(mix=(D, 2), w=(D, D), o=(D, D))
    assert muonjax.inspect(loss, shapes, X).dimension_numbers()["mix"] == muonjax.MuonDimensionNumbers(0, 1)


def test_heads_of_some_parts_of_a_kernel():
    """Flux: queries, keys, values and a dense layer by one kernel."""

    def loss(p, x):
        *qkv, up = jnp.split(x @ p["in"], [D, 2 * D, 3 * D], -1)
        q, k, v = (jnp.reshape(y, (*x.shape[:2], HEADS, SIZE)) for y in qkv)
        read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        out = jnp.concatenate([read.reshape(x.shape), jax.nn.gelu(up)], -1) @ p["out"]
        return jnp.mean((out @ p["o"]) ** 2)

    shapes = weights(**{"in": (D, 5 * D)}, out=(3 * D, D), o=(D, D))
    numbers = muonjax.inspect(loss, shapes, X).dimension_numbers(attention="heads")
    assert numbers["in"] == muonjax.FusedDimensionNumbers(0, 1, (*[SIZE] * 6, 2 * D), 1)


def test_a_gate_beside_the_kernel_of_the_queries_is_not_refused_by_its_name():
    """As of two towers in one dictionary."""

    def loss(p, x):
        flat = {"q": p["q"]["kernel"], "k": p["k"]["kernel"], "v": p["v"], "o": p["o"]}
        return jnp.mean((attend(flat, x) * jax.nn.silu(x @ p["q"]["gate"])) ** 2)

    shapes = weights(v=(D, D), o=(D, D)) | {
        "q": weights(kernel=(D, D), gate=(D, D)),
        "k": weights(kernel=(D, D)),
    }
    program = muonjax.inspect(loss, shapes, X)
    assert [a.problem for a in program.attentions] == [""]
    jax.eval_shape(muonjax.muonclip(1e-2, program).init, shapes)


def of_three(turn, p, x):
    """Attention by one kernel, whose queries, keys and values `turn` moves first."""
    return jnp.mean((attended(*turn(jnp.split(x @ p["qkv"], 3, -1))) @ p["o"]) ** 2)


def heads_turned(parts):
    q, k, v = (jnp.reshape(y, (*y.shape[:2], HEADS, SIZE)) for y in parts)
    return jnp.flip(q, 2), jnp.flip(k, 2), v


@pytest.mark.parametrize(
    "turn",
    [lambda y: (jnp.flip(y[0], -1), jnp.flip(y[1], -1), y[2]), heads_turned],
    ids=["features", "heads"],
)
def test_attention_in_the_opposite_order_is_refused_or_clipped_right(turn):
    rng = np.random.default_rng(0)
    shapes = weights(qkv=(D, 3 * D), o=(D, D))
    p, x = jax.tree.map(lambda s: jnp.float32(rng.normal(size=s.shape)), (shapes, X))
    fun = functools.partial(of_three, turn)
    program = muonjax.inspect(fun, p, x)
    (attention,) = program.attentions
    assert attention.problem or max(map(abs, program.check_clip(p, x).values())) < 1e-5


@pytest.mark.parametrize("flip", ["result", "kernel"])
def test_parts_in_the_opposite_order(flip):
    """The first part of what is flipped is the last of the kernel."""

    def loss(p, x):
        y = jnp.flip(x @ p["w"], -1) if flip == "result" else x @ jnp.flip(p["w"], 1)
        q, k, v = jnp.split(y, [2 * D, 3 * D], -1)
        gate = jnp.einsum("bqd,bkd->bqk", q, jnp.concatenate([k, k], -1))
        return jnp.mean((jnp.einsum("bqk,bkd->bqd", gate, v) @ p["o"]) ** 2)

    numbers = muonjax.inspect(loss, weights(w=(D, 4 * D), o=(D, D)), X).dimension_numbers()
    assert numbers["w"] == muonjax.FusedDimensionNumbers(0, 1, (D, D, 2 * D), 1)


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("first", [True, False])
def test_queries_in_a_long_sum_are_used_for_something_else_too(count, first):
    names = [f"w{i}" for i in range(count)]

    def loss(p, x):
        q = x @ p["q"]
        terms = [x @ p[name] for name in names]
        total = sum([q, *terms] if first else [*terms, q])
        return jnp.mean((attended(q, x @ p["k"], x @ p["v"]) @ p["out"]) ** 2) + jnp.mean(
            (total @ p["out"]) ** 2
        )

    (problem,) = entries(muonjax.inspect(loss, weights(**dict.fromkeys([*names, *"qkv", "out"], (D, D))), X))
    assert problem.startswith("a clip would not scale its logits alone: test_found_in_libraries.py")


def attended(q, k, v):
    q, k, v = (jnp.reshape(y, (*y.shape[:2], HEADS, SIZE)) for y in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], D)


@pytest.mark.parametrize("shared", ["q", "k"])
def test_a_kernel_of_two_products_is_no_kernel_of_one_attention(shared):
    """Multiplied twice: beside attention, or as the keys of two attentions."""

    def loss(p, x):
        y = attend(p, x)
        if shared == "q":
            return jnp.mean((y @ p["out"]) ** 2) + jnp.mean(jnp.tanh(x @ p["q"]) @ p["out"])
        return jnp.mean((attended(y @ p["q2"], y @ p["k"], y @ p["v2"]) @ p["out"]) ** 2)

    more = weights(out=(D, D)) | (weights(q2=(D, D), v2=(D, D)) if shared == "k" else {})
    for problem in entries(muonjax.inspect(loss, QKV | more, X)):
        assert problem.startswith("a clip would not scale its logits alone: test_found_in_libraries.py")


STACKED = weights(q=(3, D, D), k=(3, D, D), v=(3, D, D), o=(3, D, D))


@pytest.mark.parametrize(
    "take", [lambda w, i: w[i], lambda w, i: jax.lax.dynamic_index_in_dim(w, i, 0, False)], ids=["[]", "lax"]
)
def test_layers_taken_by_the_number_of_the_iteration(take):
    """AlphaFold's layer_stack: parameters stay outside of the scan, which goes over 0, 1, 2."""

    def loss(p, x):
        def layer(x, i):
            return attend({name: take(w, i) for name, w in p.items()}, x), None

        return jnp.mean(jax.lax.scan(layer, x, jnp.arange(3))[0] ** 2)

    p, x = jax.tree.map(lambda s: jnp.asarray(_normal(s.shape)), STACKED), jnp.asarray(_normal(X.shape))
    program = muonjax.inspect(loss, p, x)
    assert program.attentions[0].site.scan_axis is not None
    assert all(d == muonjax.MuonDimensionNumbers(1, 2) for d in program.dimension_numbers().values())
    (_, maxima), _ = jax.jit(muonjax.value_and_grad(loss))(p, x)
    (found,) = maxima.values()
    expected = []
    for i in range(3):
        q, k = (np.reshape(x @ p[name][i], (*x.shape[:2], HEADS, SIZE)) for name in "qk")
        expected.append(np.einsum("bqhd,bkhd->bhqk", q, k).max((0, 2, 3)) / np.sqrt(SIZE))
        x = attend({name: w[i] for name, w in p.items()}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(program.check_clip(p, jnp.asarray(_normal(X.shape)))["max_logits"]) < 1e-5


def _normal(shape):
    return (np.random.default_rng(len(shape)).standard_normal(shape) * 0.3).astype(np.float32)


@pytest.mark.parametrize("order", [lambda i: 2 - i, lambda i: i // 2], ids=["backwards", "one layer twice"])
def test_layers_taken_in_another_order(order):
    def loss(p, x):
        def layer(x, i):
            return attend({name: w[order(i)] for name, w in p.items()}, x), None

        return jnp.mean(jax.lax.scan(layer, x, jnp.arange(3))[0] ** 2)

    (attention,) = muonjax.inspect(loss, STACKED, X).attentions
    assert attention.problem.startswith("a clip would not scale its logits alone: test_found_in_libraries")


@pytest.mark.parametrize("largest", [False, True])
def test_collectives_over_an_axis_of_vmap(largest):
    """GPT-J's mesh transformer: each entry of a mapped axis has its own heads, and their results are added up."""

    @jax.custom_vjp
    def add(x):
        return jax.lax.psum(x, "shard")

    add.defvjp(lambda x: (add(x), None), lambda _, g: (g,))

    def loss(p, x):
        def shard(w):
            q, k, v = (jnp.reshape(x @ w[name], (*x.shape[:2], HEADS, SIZE)) for name in "qkv")
            read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
            y = x + add(read.reshape(x.shape) @ w["o"])
            if largest:
                y = y / jax.lax.pmax(jax.lax.stop_gradient(abs(y).max()), "shard")
            return jnp.mean(jnp.tanh(y @ w["up"]) ** 2)

        return jnp.mean(jax.vmap(shard, axis_name="shard")(p))

    shapes = STACKED | weights(up=(3, D, 5))
    program = muonjax.inspect(loss, shapes, X)
    (attention,) = program.attentions
    assert [(s.axes, s.entries, s.size) for s in attention.site.scales] == [((-3, -1), 6, 3 * D)] * 2
    assert program.dimension_numbers()["o"] == muonjax.MuonDimensionNumbers((0, 1), 2)
