import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from muonjax import inspect, value_and_grad
from tests.inspect.attention import (
    assert_as_jax,
    by_hand,
    custom_softmax,
    dot_product_attention,
    layer,
    layer_with,
    scanned,
    tokens,
    unrolled,
    unstacked,
    weights,
)
from tests.tools.tiers import nightly, thorough

W = weights()
X = tokens()


@pytest.fixture
def optimized():
    """Merging equal computations is one of the optimizations that the tests do without."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_without_jit():
    w = weights(2)
    x = tokens()
    (loss, maxima), grads = value_and_grad(scanned)(w, x)
    expected, expected_grads = jax.value_and_grad(scanned)(w, x)
    assert_allclose(loss, expected, rtol=1e-6)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-5, atol=1e-6)
    assert list(maxima) == ["max_logits"]
    assert_allclose(maxima["max_logits"], by_hand(w, x).max(1), rtol=2e-5)


def test_masked_parameters_are_no_inputs_of_the_program():
    """Leaves, decisions and statistics have the names that they have without the masked ones before them."""

    def loss(params, x):
        return unrolled(params["first"], x) + unrolled(params["second"], x)

    params = {"first": weights(), "second": weights()}
    masked = {"a": {"b": optax.MaskedNode(), "c": optax.MaskedNode()}, **params}
    (_, expected), _ = value_and_grad(loss)(params, X)
    (_, maxima), _ = value_and_grad(loss)(masked, X)
    chex.assert_trees_all_equal(maxima, expected)
    program = inspect(loss, masked, X)
    numbers = program.dimension_numbers()
    assert numbers.pop("a") == masked["a"]
    assert numbers == inspect(loss, params, X).dimension_numbers()
    assert [x.name for x in program.attentions] == list(expected)


def test_logits_that_a_function_with_its_own_derivative_returns_are_not_computed_again():
    @jax.custom_vjp
    def logits_of(q, k):
        return jnp.einsum("bths,buhs->bhtu", q, k)

    def backward(residuals, gradient):
        return jax.vjp(lambda q, k: jnp.einsum("bths,buhs->bhtu", q, k), *residuals)[1](
            gradient
        )

    logits_of.defvjp(lambda q, k: (logits_of(q, k), (q, k)), backward)

    def attend(q, k, v):
        return jnp.einsum("bhtu,buhs->bths", jax.nn.softmax(logits_of(q, k)), v)

    def loss(w, x):
        (first,) = unstacked(w)
        return jnp.mean(layer(x, first, attend) ** 2)

    counts = []
    for function in (jax.value_and_grad(loss), value_and_grad(loss)):
        counts.append(str(jax.make_jaxpr(function)(W, X)).count("dot_general["))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("argnums", [1, -1, (1,), (1, 0)])
def test_argnums(argnums):
    def loss(x, w):
        return unrolled(w, x)

    assert_as_jax(loss, X, W, argnums=argnums)
    with pytest.raises(ValueError, match="argnums that begin with the parameters"):
        value_and_grad(loss, argnums=(0, 1))(X, W)


def test_everything_but_argnums_stays_as_it_is():
    seen = []

    def loss(w, batch, kind, *, causal, ref):
        seen.append((type(batch), kind, causal))
        each = layer_with(causal=causal)
        ref[...] = ref[...] + 1
        return unrolled(w, batch, each) * (2 if kind == "double" else 1)

    def step(f, ref):
        return f(loss)(W, X, "double", causal=True, ref=ref)

    ref = jax.new_ref(jnp.float32(0))
    (value, maxima), grads = step(value_and_grad, ref)
    assert seen == [(np.ndarray, "double", True)]
    assert ref[...] == 1
    assert_allclose(
        maxima["max_logits"], by_hand(W, X, causal=True).max((0, 1)), rtol=2e-5
    )
    expected, expected_grads = step(jax.value_and_grad, ref)
    assert_allclose(value, expected, rtol=1e-6)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-5, atol=1e-6)


def test_closes_over_tracers():
    def step(f, w, x, scale):
        return f(lambda w: unrolled(w, x) * scale)(w)

    (loss, maxima), grads = jax.jit(functools.partial(step, value_and_grad))(W, X, 3.0)
    expected = jax.jit(functools.partial(step, jax.value_and_grad))(W, X, 3.0)
    jax.tree.map(assert_array_equal, (loss, grads), expected)
    assert_allclose(maxima["max_logits"], by_hand(W, X).max((0, 1)), rtol=2e-5)


def test_auxiliary_output_of_any_kind():
    marker = object()
    constant = np.arange(3)

    def loss(w, x):
        value = unrolled(w, x)
        return value, {
            "text": "abc",
            "twice": 2 * value,
            "object": marker,
            "none": None,
            "array": constant,
            "int": 3,
        }

    (value, (aux, maxima)), grads = value_and_grad(loss, has_aux=True)(W, X)
    assert aux["text"] == "abc"
    assert aux["object"] is marker
    assert aux["none"] is None
    assert aux["array"] is constant
    assert aux["int"] == 3
    assert type(aux["int"]) is int
    assert_array_equal(aux["twice"], 2 * value)
    assert list(maxima) == ["max_logits"]
    assert jax.tree.structure(grads) == jax.tree.structure(W)


def test_layers_that_a_rematerialized_scan_gives_back():
    """As `nnx.scan` over `nnx.remat` does; what is computed from these layers may change a loss."""

    def loss(w, x):
        step = jax.checkpoint(lambda x, w: (layer(x, w), w))
        x, given_back = jax.lax.scan(step, x, w)
        return jnp.mean(x**2), given_back

    def with_penalty(w, x):
        value, given_back = loss(w, x)
        return value + jnp.sum(given_back["q"] ** 2), given_back

    w = weights(2)
    (_, (given_back, maxima)), _ = value_and_grad(loss, has_aux=True)(w, X)
    chex.assert_trees_all_equal(given_back, w)
    assert_allclose(maxima["max_logits"], by_hand(w, X).max(1), rtol=2e-5)
    with pytest.raises(ValueError, match="would not scale its logits alone"):
        value_and_grad(with_penalty, has_aux=True)(w, X)


def test_constants_in_the_auxiliary_output():
    """JAX has them as literals in the jaxpr."""

    def loss(w, x):
        return unrolled(w, x), {
            "zero": jnp.zeros_like(w["q"][0, 0, 0, 0]),
            "three": jnp.float32(3),
        }

    for function in (loss, jax.jit(loss)):
        (_, (aux, _)), _ = value_and_grad(function, has_aux=True)(weights(), tokens())
        assert all(isinstance(x, jax.Array) for x in aux.values())
        assert {name: float(x) for name, x in aux.items()} == {"zero": 0, "three": 3}


def test_under_vmap():
    many = jax.tree.map(lambda value: np.stack([value, 2 * value]), W)
    over_weights = functools.partial(jax.vmap, in_axes=(0, None))
    maxima = assert_as_jax(unrolled, many, X, around=over_weights)
    expected = [
        by_hand(W, X).max((0, 1)),
        by_hand(jax.tree.map(lambda value: 2 * value, W), X).max((0, 1)),
    ]
    assert_allclose(maxima["max_logits"], expected, rtol=2e-5)


@jax.custom_jvp
def softcap(logits):
    return 5 * jnp.tanh(logits / 5)


softcap.defjvps(lambda t, ans, logits: t)  # straight through


@pytest.mark.parametrize("softmax", [jax.nn.softmax, custom_softmax])
def test_straight_through_derivatives_stay(softmax):
    w = weights(2)
    x = tokens()

    def capped(w, x, cap=softcap):
        return scanned(w, x, layer_with(softmax=lambda logits: cap(softmax(logits))))

    assert_as_jax(capped, w, x)
    plain = functools.partial(capped, cap=lambda logits: 5 * jnp.tanh(logits / 5))
    grads, other = (jax.jit(jax.grad(loss))(w, x) for loss in (capped, plain))
    differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), grads, other)
    assert max(jax.tree.leaves(differences)) > 1e-3


@pytest.mark.parametrize("partitionable", [False, True])
def test_random_numbers_are_the_same(partitionable):
    w = weights(2)
    x = tokens()

    def loss(w, x):
        with jax.threefry_partitionable(partitionable):
            noise = jax.random.normal(jax.random.key(0), x.shape)
        return scanned(w, x + noise)

    assert_as_jax(loss, w, x)


def compiled(fun, *args):
    return jax.jit(fun).lower(*args).compile()


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("loss", "remat"),
    [
        (scanned, False),
        thorough(unrolled, True),
        nightly(scanned, True),
        nightly(unrolled, False),
    ],
)
def test_costs_nothing(loss, remat):
    shapes = {
        "q": (3, 64, 4, 32),
        "k": (3, 64, 4, 32),
        "v": (3, 64, 4, 32),
        "o": (3, 4, 32, 64),
    }
    w = {
        name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((4, 64, 64), np.float32)
    fun = functools.partial(loss, layer=jax.checkpoint(layer) if remat else layer)
    ours = compiled(value_and_grad(fun), w, x)
    plain = compiled(jax.value_and_grad(fun), w, x)
    assert ours.cost_analysis()["flops"] <= 1.01 * plain.cost_analysis()["flops"]
    temporary = ours.memory_analysis().temp_size_in_bytes
    assert (
        temporary <= 1.04 * plain.memory_analysis().temp_size_in_bytes
    )  # logits have one more reader


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("loss", "width"),
    [
        (scanned, 64),
        thorough(unrolled, 256),
        nightly(scanned, 256),
        nightly(unrolled, 64),
    ],
)
def test_to_the_bit_with_the_optimizations_of_xla(loss, width):
    """A second reader of softmax's maximum would change how XLA fuses, from some 32 tokens on."""
    random = np.random.default_rng(0)
    shapes = dict.fromkeys("qkv", (2, width, 4, width // 4)) | {
        "o": (2, 4, width // 4, width)
    }
    w = {
        n: np.float32(random.normal(size=shape) / np.sqrt(width))
        for n, shape in shapes.items()
    }
    x = np.float32(random.normal(size=(2, 64, width)))
    assert_as_jax(functools.partial(loss, layer=layer_with(causal=True)), w, x)


def test_compute_type_stays():
    from jax.experimental.compute_on import compute_on

    w = weights(2)
    x = tokens()

    def loss(w, x):
        if jax.__version_info__ < (0, 12):
            with compute_on("device_host"):
                offset = jnp.sin(x)
        else:
            space = jax.memory.Space.Device
            offset = compute_on(
                jnp.sin, compute_type="device_host", out_memory_spaces=space
            )(x)
        return scanned(w, x + offset)

    def count(fun):
        return jax.jit(fun).lower(w, x).as_text().count("_xla_compute_type")

    assert count(value_and_grad(loss)) == count(jax.value_and_grad(loss)) > 0


def test_a_callback_is_called_once():
    calls = []

    def loss(w, x):
        jax.debug.callback(lambda value: calls.append(float(value)), x[0, 0, 0])
        return unrolled(w, x)

    jax.block_until_ready(jax.jit(value_and_grad(loss))(W, X))
    jax.effects_barrier()
    assert calls == [float(X[0, 0, 0])]


@pytest.mark.parametrize("causal", [False, True])
def test_logits_are_measured_without_a_bias(causal):
    """JAX's attention transposes the scaled logits before it adds the bias; they were measured with it."""
    w = weights(1)
    x = tokens()
    bias = 3 * np.random.default_rng(2).standard_normal(
        (1, w["q"].shape[2], x.shape[1], x.shape[1]), np.float32
    )
    each = layer_with(dot_product_attention, bias=bias, is_causal=causal)
    (_, maxima), _ = jax.jit(value_and_grad(functools.partial(unrolled, layer=each)))(
        w, x
    )
    expected = by_hand(w, x, causal).max((0, 1))
    assert_allclose(maxima["max_logits"].reshape(-1), expected, rtol=2e-5)


CAUSAL = np.tri(tokens().shape[1], dtype=bool)
TABLE = np.where(CAUSAL, 0, -1e2)
SLOPES = -np.abs(np.arange(len(CAUSAL))[:, None] - np.arange(len(CAUSAL)))


@pytest.mark.filterwarnings("ignore:.*a mask or a bias")
@pytest.mark.parametrize(
    ("mask", "add"),
    [
        (TABLE, lambda mask: mask),
        (np.float32(TABLE), lambda mask: mask[None]),
        (jnp.asarray(TABLE), lambda mask: mask),
        (np.arange(len(CAUSAL)), lambda mask: (1 - jnp.asarray(mask)) * -1e2),
        (TABLE, lambda mask: SLOPES + jnp.asarray(mask) * 1e2),
        (None, lambda mask: TABLE * 1e2),
        (None, lambda mask: SLOPES + TABLE * 1e2),
    ],
)
def test_numbers_of_an_argument_decide_nothing(mask, add):
    """Without `jax.jit` they are constants of the jaxpr, as those of a table that the function closes over."""

    def loss(w, x, mask):
        def softmax(logits):
            return jax.nn.softmax(logits + add(mask))

        return unrolled(w, x, layer_with(softmax=softmax))

    eager, inside, outside = (
        fun(W, X, mask)[0][1]["max_logits"]
        for fun in (
            value_and_grad(loss),
            value_and_grad(jax.jit(loss)),
            jax.jit(value_and_grad(loss)),
        )
    )
    is_causal = mask is None or np.min(add(mask)) < -9e3
    expected = by_hand(W, X, is_causal).max((0, 1))
    for maxima in (eager, inside, outside):
        np.testing.assert_allclose(maxima, expected, rtol=2e-5)
    assert max(inspect(loss, W, X, mask).check_clip(W, X, mask).values()) < 1e-5


def test_no_attention():
    def mean(w, x):
        return jnp.mean(w * x)

    with pytest.raises(ValueError, match=r"mean.*has no attention"):
        value_and_grad(mean)(jnp.ones(3), jnp.ones(3))


def test_a_pair_is_needed_for_an_auxiliary_output():
    with pytest.raises(TypeError, match="pair"):
        value_and_grad(unrolled, has_aux=True)(weights(), tokens())


def test_integers_and_vectors_are_refused_as_by_jax():
    with pytest.raises(TypeError, match="scalar-output"):
        value_and_grad(lambda w, x: unrolled(w, x)[None])(W, X)
    with pytest.raises(TypeError, match="int32"):
        value_and_grad(unrolled)(jax.tree.map(np.int32, W), X)


def test_several_losses_are_refused_and_their_sum_is_taken():
    def losses(w, x):
        return unrolled(w, x), unrolled(w, 2 * x)

    with pytest.raises(
        TypeError,
        match=r"value_and_grad\(losses\) needs one scalar.*sum of several losses",
    ):
        value_and_grad(losses)(W, X)
    (_, maxima), _ = jax.jit(value_and_grad(lambda w, x: sum(losses(w, x))))(W, X)
    assert_allclose(maxima["max_logits"], by_hand(W, 2 * X).max((0, 1)), rtol=2e-5)
    (_, (aux, _)), _ = jax.jit(value_and_grad(losses, has_aux=True))(W, X)
    assert_allclose(aux, losses(W, X)[1], rtol=1e-6)


def test_parameters_that_the_function_closes_over_are_asked_for():
    with pytest.raises(
        ValueError, match=r"nothing that it returns.*give the parameters"
    ):
        value_and_grad(lambda _, x: unrolled(W, x))(jnp.ones(3), X)


def test_grouped_queries_under_checkpoint():
    """Their heads are in another order in the logits than in the kernel: no constant may say so in the body."""
    shapes = {"q": (16, 4, 8), "k": (16, 2, 8), "v": (16, 2, 8), "o": (4, 8, 16)}
    w = {
        n: jax.random.normal(jax.random.key(i), shape)
        for i, (n, shape) in enumerate(shapes.items())
    }

    def attention(w, x):
        q, k, v = (jnp.einsum("btd,dhs->bths", x, w[n]) for n in "qkv")
        return (
            jnp.einsum("bths,hsd->btd", jax.nn.dot_product_attention(q, k, v), w["o"]),
            q,
            k,
        )

    def loss(wrap, w, x):
        return jnp.mean(wrap(lambda w, x: attention(w, x)[0])(w, x) ** 2)

    x = jax.random.normal(jax.random.key(9), (2, 5, 16))
    plain, kept = (
        jax.jit(value_and_grad(functools.partial(loss, f)))(w, x)
        for f in (lambda f: f, jax.checkpoint)
    )
    _, q, k = attention(w, x)
    want = jnp.einsum("bths,buhs->bhtu", q, jnp.repeat(k, 2, 2)).max((0, 2, 3)) / 8**0.5
    for (_, maxima), _ in (plain, kept):
        assert_allclose(maxima["max_logits"], want, rtol=2e-5)


@pytest.mark.nan("the call that overflows")
def test_a_call_that_overflows_hides_no_logits_of_another():
    def loss(w, xs):
        return sum(jnp.mean(layer(w, x) ** 2) for x in xs)

    def layer(w, x):
        q, k, v = (jnp.einsum("btd,dhs->bths", x, w[n]) for n in "qkv")
        y = jax.nn.softmax(jnp.einsum("bqhs,bkhs->bhqk", q, k))
        return jnp.einsum("bqhs,hsd->bqd", jnp.einsum("bhqk,bkhs->bqhs", y, v), w["o"])

    w = {name: array[0] for name, array in weights().items()}
    x = tokens()
    (_, alone), _ = value_and_grad(loss)(w, (x, x))
    (_, both), _ = value_and_grad(loss)(w, (x, x * 1e30))
    assert_allclose(both["max_logits"], alone["max_logits"], rtol=1e-6)
