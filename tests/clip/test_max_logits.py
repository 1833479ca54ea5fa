"""The largest logit of each head: against a float64 oracle, against JAX's own attention, and by what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from tests.tools.oracles import on_device
from tests.tools.tiers import thorough

max_logits = jax.jit(
    muonjax.max_logits,
    static_argnames=(
        "is_causal",
        "local_window_size",
        "scale",
        "block",
    ),
)


def dense(q, k, *, mask=None, causal=False, window=None, scale=None):
    """[heads], from the whole matrix in float64."""
    q = np.asarray(q, np.float64)
    k = np.repeat(np.asarray(k, np.float64), q.shape[-2] // k.shape[-2], axis=-2)
    logits = np.einsum("...thd,...shd->...hts", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    t = np.arange(logits.shape[-2])[:, None]
    s = np.arange(logits.shape[-1])
    keep = np.ones(logits.shape, bool)
    if causal:
        keep &= s <= t
    if window is not None:
        keep &= (t - window[0] <= s) & (s <= t + window[1])
    if mask is not None:
        keep &= np.asarray(mask, bool)
    logits = np.where(keep, logits, -np.inf)
    return (
        np.moveaxis(logits, -3, 0).reshape(logits.shape[-3], -1).max(1, initial=-np.inf)
    )


def inputs(batch=(2,), t=13, s=13, heads=4, key_heads=4, size=8, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((*batch, t, heads, size))
    k = rng.standard_normal((*batch, s, key_heads, size))
    return on_device(q), on_device(k)


@pytest.mark.parametrize("block", [512, 5])
@pytest.mark.parametrize(
    "hidden",
    [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "window": (3, 3)}],
)
@pytest.mark.parametrize(
    ("t", "s", "key_heads", "batch"),
    [(6, 17, 2, (2,)), thorough(13, 13, 4, ()), thorough(17, 6, 1, (2, 3))],
)
def test_equals_the_dense_maximum(block, hidden, t, s, key_heads, batch):
    q, k = inputs(batch, t, s, key_heads=key_heads)
    largest = max_logits(
        q,
        k,
        is_causal=hidden.get("causal", False),
        local_window_size=hidden.get("window"),
        block=block,
    )
    assert_allclose(largest, dense(q, k, **hidden), rtol=1e-5)


def random_mask(*shape):
    return np.random.default_rng(3).random(shape) < 0.3


MASKS = [
    random_mask(2, 4, 13, 13),
    random_mask(1, 1, 13, 13),
    random_mask(2, 1, 1, 13),
    random_mask(13, 13),
    random_mask(4, 1, 13),
    random_mask(1, 4, 13, 1),
    random_mask(13),
    random_mask(1),
    # Flax's hold floats.
    nn.make_causal_mask(jnp.ones((2, 13))),
    nnx.make_causal_mask(jnp.ones((2, 13))),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", [4, thorough(512)])
def test_masks_of_every_shape(mask, block):
    q, k = inputs(key_heads=2)
    largest = max_logits(q, k, mask=jnp.asarray(mask), block=block)
    assert_allclose(largest, dense(q, k, mask=mask), rtol=1e-5)


def test_masks_on_one_of_two_batch_axes():
    q, k = inputs((3, 2))
    mask = np.random.default_rng(4).random((3, 1, 4, 13, 13)) < 0.1
    assert_allclose(
        max_logits(q, k, mask=mask, block=4), dense(q, k, mask=mask), rtol=1e-5
    )


@pytest.mark.parametrize(("t", "s"), [(5, 11), thorough(11, 5)])
@pytest.mark.parametrize(
    "hidden",
    [{"is_causal": True}, {"local_window_size": (2, 1)}, {"local_window_size": 1}],
)
def test_hides_the_pairs_that_jax_hides(t, s, hidden):
    """At a large scale the log-sum-exp of JAX's own attention is the maximum."""
    q, k = inputs((1,), t, s)
    attention = functools.partial(
        jax.nn.dot_product_attention, scale=1e3, return_residual=True, **hidden
    )
    _, lse = jax.jit(attention)(q, k, k)
    assert_allclose(max_logits(q, k, scale=1e3, **hidden), lse.max((0, 1)), rtol=1e-4)


def test_a_head_that_is_masked_everywhere_is_minus_infinity():
    q, k = inputs()
    mask = jnp.ones((1, 4, 13, 13)).at[:, 2].set(0)
    for block in (4, 512):
        largest = max_logits(q, k, mask=mask, block=block)
        assert largest[2] == -jnp.inf
        assert np.isfinite(np.delete(largest, 2)).all()


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_signed_scaled_and_without_gradient(scale):
    q, k = inputs()
    assert_allclose(max_logits(q, k, scale=scale), dense(q, k, scale=scale), rtol=1e-5)
    assert_allclose(
        max_logits(jnp.ones((3, 1, 4)), -jnp.ones((3, 1, 4)), scale=0.5), [-2.0]
    )
    gradients = jax.grad(lambda q, k: max_logits(q, k).sum(), (0, 1))(q, k)
    for gradient in gradients:
        assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    "dtypes",
    [
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.float32),
    ],
)
def test_half_precision_is_summed_in_float32(dtypes):
    q, k = (x.astype(dtype) for x, dtype in zip(inputs(size=64), dtypes, strict=True))
    with jax.numpy_dtype_promotion("strict"):
        half = max_logits(q, k)
    assert half.dtype == jnp.float32
    assert_allclose(
        half, dense(np.asarray(q, np.float32), np.asarray(k, np.float32)), rtol=1e-5
    )


@pytest.mark.nan
def test_nan_is_not_hidden():
    q, k = inputs()
    largest = max_logits(q.at[0, 3, 1, 0].set(jnp.nan), k, block=4)
    assert_array_equal(np.isnan(largest), [False, True, False, False])


@pytest.mark.parametrize(
    ("hidden", "blocks"),
    [
        ({}, 64),
        ({"is_causal": True}, 36),  # 8 · 9 / 2 on and below the diagonal
        (
            {"is_causal": True, "local_window_size": (8, 0)},
            15,
        ),  # the diagonal and the one below
        ({"local_window_size": 1}, 22),
    ],
)
def test_blocks_that_are_hidden_whole_are_not_made(hidden, blocks):
    q, k = inputs(t=64, s=64)
    jaxpr = jax.make_jaxpr(functools.partial(muonjax.max_logits, block=8, **hidden))(
        q, k
    )
    (loop,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")
    assert loop.params["length"] == blocks


def test_memory_is_blocks_and_no_square():
    q = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
    compiled = (
        jax.jit(functools.partial(muonjax.max_logits, is_causal=True))
        .lower(q, q)
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes <= 32 * 2**20


@pytest.mark.parametrize(("arguments", "message"), [
    ({"key": jnp.ones((2, 13, 4, 4))}, r"got \[2, 13, 4, 8\] and \[2, 13, 4, 4\]; it needs"),
    ({"key": jnp.ones((3, 13, 4, 8))}, "it needs"),
    ({"key": jnp.ones((2, 13, 3, 8))}, "it needs .* key_heads divides heads"),
    ({"query": jnp.ones((13, 4, 8)), "key": jnp.ones((13, 0, 8))}, "it needs"),
    ({"query": jnp.ones((2, 1, 0)), "key": jnp.ones((2, 1, 0))}, "none of them 0"),
    ({"query": jnp.ones((4, 8)), "key": jnp.ones((4, 8))}, r"needs \[\*batch, T, heads, D\]"),
    ({"mask": jnp.ones((2, 4, 13, 12))}, r"^max_logits: .*\(2, 4, 13, 12\)"),
    ({"mask": jnp.ones((5, 2, 4, 13, 13))}, "does not broadcast"),
    ({"local_window_size": (-1, 2)}, "none negative"),
    ({"local_window_size": (1, 2, 3)}, "local_window_size"),
])  # fmt: skip
def test_bad_input(arguments, message):
    q, k = inputs()
    arguments = {"query": q, "key": k} | arguments
    with pytest.raises(ValueError, match=message):
        max_logits(arguments.pop("query"), arguments.pop("key"), **arguments)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"query": None}, r"max_logits\(query=None\) must be an array of real numbers"),
    ({"query": jnp.ones((2, 13, 4, 8), bool)}, r"max_logits\(query="),
    ({"key": jnp.ones((2, 13, 4, 8), complex)}, r"max_logits\(key="),
    ({"mask": True}, r"max_logits\(mask=True\) must be an array of booleans or numbers that broadcasts to"),
    ({"mask": np.array(["a"])}, r"max_logits\(mask="),
])  # fmt: skip
def test_what_is_no_array(arguments, message):
    q, k = inputs()
    with pytest.raises(TypeError, match=message):
        muonjax.max_logits(**{"query": q, "key": k} | arguments)


# The bound from the log-sum-exp.


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16]
)  # JAX's attention takes no float16 on a CPU
@pytest.mark.parametrize("size", [4.0, thorough(0.1)])
@pytest.mark.parametrize("hidden", [{}, {"is_causal": True}])
def test_the_bound_is_sound_and_near(dtype, size, hidden):
    q, k = (size * x for x in inputs((3,), 64, 64, size=32))
    q = q.astype(dtype)
    k = k.astype(dtype)
    _, lse = jax.jit(
        functools.partial(jax.nn.dot_product_attention, return_residual=True, **hidden)
    )(q, k, k)
    assert lse.dtype == dtype
    largest = max_logits(q, k, **hidden)
    bound = muonjax.max_logits_bound(lse)
    assert bound.dtype == jnp.float32
    assert (bound >= largest).all()
    assert (
        bound <= largest + np.log(64) + 2 * jnp.finfo(dtype).eps * jnp.abs(bound) + 1e-5
    ).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_bound_covers_the_rounding_of_its_dtype(dtype):
    """bfloat16 rounds 100.2 down to 100: the bound has to be above what was rounded."""
    exact = np.linspace(90, 300, 997, dtype=np.float32)
    for sign in (1, -1):
        rounded = jnp.asarray(sign * exact).astype(dtype)[None]
        assert (np.asarray(rounded, np.float32)[0] < sign * exact).any()
        assert (np.asarray(muonjax.max_logits_bound(rounded)) >= sign * exact).all()


@pytest.mark.nan
def test_the_bound_of_nothing_is_minus_infinity():
    lse = (
        jnp.full((2, 5, 3), -jnp.inf).at[0, 0, 1].set(jnp.inf).at[1, 1, 2].set(jnp.nan)
    )
    assert_array_equal(muonjax.max_logits_bound(lse), [-np.inf, np.inf, np.nan])


def test_the_bound_of_one_key_near_zero():
    """With one key the log-sum-exp is the maximum itself, and a relative margin of nearly 0 would be none."""
    assert float(muonjax.max_logits_bound(jnp.full((1, 1, 1), 1e-8))[0]) > 1e-7


@pytest.mark.parametrize("lse", [jnp.ones(4), jnp.ones((2, 4), jnp.int32)])
def test_bad_bounds(lse):
    with pytest.raises(ValueError, match="max_logits_bound"):
        muonjax.max_logits_bound(lse)
    with pytest.raises(
        TypeError, match=r"max_logits_bound\(lse=\[1.0\]\) must be an array"
    ):
        muonjax.max_logits_bound([1.0])
