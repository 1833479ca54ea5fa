"""The largest logits of any program, and a program that stays what it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from muonjax import inspect, value_and_grad
from muonjax._inspect.measure import with_maxima
from muonjax._inspect.program import find_maxima
from tests.inspect import attention
from tests.inspect.attention import (
    HEADS,
    attend,
    by_hand,
    check,
    custom_softmax,
    layer,
    layer_with,
    scanned,
    tokens,
    unrolled,
    weights,
)
from tests.mesh.layouts import make_mesh

W = weights()
X = tokens()


def largest(w, x, axes=(0, 1)):
    return by_hand(w, x).max(axes)


@pytest.mark.parametrize("softmax", [jax.nn.softmax, attention.softmax, custom_softmax])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_in_any_spelling(softmax, causal):
    each = layer_with(softmax=softmax, causal=causal)
    check(
        functools.partial(unrolled, layer=each), W, X, by_hand(W, X, causal).max((0, 1))
    )


@pytest.mark.parametrize("causal", [False, True])
def test_dot_product_attention_with_shared_keys(causal):
    """JAX masks logits in another order of their axes, [head of a group, batch, group, query, key]."""
    w = weights()
    x = tokens()
    w["k"], w["v"] = w["k"][:, :, ::2], w["v"][:, :, ::2]
    each = layer_with(attention.dot_product_attention, is_causal=causal)
    full = {n: np.repeat(v, 2, 2) if n in "kv" else v for n, v in w.items()}
    expected = by_hand(full, x, causal).max((0, 1))
    check(functools.partial(unrolled, layer=each), w, x, expected)


@pytest.mark.parametrize(
    "policy", ["none", "everything_saveable", "dots_with_no_batch_dims_saveable"]
)
def test_layers_of_a_scan_are_a_leading_axis(policy):
    w = weights(3)
    x = tokens()
    each = (
        layer
        if policy == "none"
        else jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
    )
    check(functools.partial(scanned, layer=each), w, x, largest(w, x, 1))


def test_nested_scans_of_layers():
    w = weights(4)
    x = tokens()
    pairs = {name: value.reshape(2, 2, *value.shape[1:]) for name, value in w.items()}

    def loss(w, x):
        def block(x, w):
            return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0], None)

        return (jax.lax.scan(block, x, w)[0] ** 2).mean()

    check(loss, pairs, x, largest(w, x, 1).reshape(2, 2, HEADS))


def in_chunks(q, k, v):
    q = jnp.moveaxis(q.reshape(q.shape[0], 3, 2, *q.shape[2:]), 1, 0)
    out = jax.lax.map(lambda q: attend(q, k, v), q)
    return jnp.moveaxis(out, 0, 1).reshape(*v.shape)


def test_queries_in_chunks_are_one_maximum():
    w = weights(2)
    x = tokens()
    loss = functools.partial(scanned, layer=layer_with(in_chunks))
    check(loss, w, x, largest(w, x, 1))


def test_nested_jit_with_static_arguments():
    w = weights(2)
    x = tokens()

    @functools.partial(jax.jit, static_argnames=("scale",))
    def inner(x, w, *, scale):
        return jax.jit(layer)(scale * x, w)

    loss = functools.partial(unrolled, layer=functools.partial(inner, scale=1))
    check(loss, w, x, largest(w, x, 1))


def over_batch(layer, check_vma, replicated=1):
    """A layer on four devices, each with a part of the batch; the arguments after it are replicated."""
    specs = P("data"), *[P()] * replicated
    mesh = make_mesh(data=4)
    return jax.shard_map(
        layer, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("each", "causal"),
    [(layer_with(in_chunks), False), (layer_with(causal=True), True)],
)
def test_shard_map_over_batch(each, causal, check_vma):
    """With `check_vma` each constant of a mask goes through an operation that says where it differs."""
    loss = functools.partial(unrolled, layer=over_batch(each, check_vma))
    check(loss, W, X, by_hand(W, X, causal).max((0, 1)))
    assert max(inspect(loss, W, X).check_clip(W, X).values()) < 1e-5


def test_explicit_axes():
    w = weights(2)
    x = tokens()
    mesh = make_mesh(AxisType.Explicit, data=2, head=4)
    specs = {
        "q": P(None, None, "head"),
        "k": P(None, None, "head"),
        "v": P(None, None, "head"),
        "o": P(None, "head"),
    }
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(value, jax.NamedSharding(mesh, specs[name]))
            for name, value in w.items()
        }
        on = jax.device_put(x, jax.NamedSharding(mesh, P("data")))

        def each(x, w):
            q, k, v = (
                jnp.einsum(
                    "btd,dhs->bths", x, w[n], out_sharding=P("data", None, "head")
                )
                for n in "qkv"
            )
            return x + jnp.einsum(
                "bths,hsd->btd", attend(q, k, v), w["o"], out_sharding=P("data")
            )

        check(functools.partial(scanned, layer=each), placed, on, largest(w, x, 1))
        skipped = functools.partial(jax.lax.cond, True, each, lambda x, w: x)
        check(functools.partial(scanned, layer=skipped), placed, on, largest(w, x, 1))


def skipped_layer(x, w, keep):
    return jax.lax.cond(keep, layer, lambda x, w: x, x, w)


def second_of_three(x, w, keep):
    branches = [lambda x, w: x, layer, lambda x, w: x + layer(x, w)]
    return jax.lax.switch(jnp.where(keep, 1, 0), branches, x, w)


@pytest.mark.parametrize(
    "branch",
    [
        skipped_layer,
        jax.checkpoint(skipped_layer),
        second_of_three,
        jax.jit(skipped_layer),
    ],
)
@pytest.mark.parametrize("kept", [[0, 1], [1], []])
def test_layers_of_a_scan_that_are_skipped(branch, kept):
    """A skipped layer has no logits."""
    w = weights(2)
    x = tokens()

    def loss(w, x):
        is_kept = jnp.array([0 in kept, 1 in kept])
        y, _ = jax.lax.scan(lambda x, each: (branch(x, *each), None), x, (w, is_kept))
        return (y**2).mean()

    expected = np.full((2, HEADS), -np.inf)
    if kept:
        expected[kept] = largest({name: value[kept] for name, value in w.items()}, x, 1)
    check(loss, w, x, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_branch_in_a_shard_map(check_vma):
    mapped = over_batch(skipped_layer, check_vma, replicated=2)
    for keep in (True, False):
        expected = largest(W, X) if keep else np.full(HEADS, -np.inf)
        check(
            functools.partial(
                unrolled, layer=lambda x, w, k=keep: mapped(x, w, jnp.array(k))
            ),
            W,
            X,
            expected,
        )


def rewritten(loss, w, x):
    """The equations of a function with its maxima."""
    closed = jax.make_jaxpr(lambda w: loss(w, x))(w)
    return jax.make_jaxpr(lambda w: find_maxima(closed, [w], "loss"))(w).eqns


def test_one_body_is_rewritten_once():
    w = weights(12)
    x = tokens()
    each = jax.checkpoint(
        layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )

    def bodies():
        eqns = rewritten(functools.partial(unrolled, layer=each), w, x)
        layers = [
            eqn.params["jaxpr"]
            for eqn in eqns
            if eqn.primitive.name in ("checkpoint", "remat2")
        ]
        assert len(layers) == 12
        return {id(body): body for body in layers}

    first, second = (
        bodies(),
        bodies(),
    )  # a later call, such as the next step's outside of jit, gets the same
    assert len(first) == 1
    assert first.keys() == second.keys()


def test_a_jitted_part_is_one_program_for_all_steps():
    w = weights(2)
    x = tokens()
    inner = jax.jit(scanned)

    def body():
        (eqn,) = (
            e
            for e in rewritten(lambda w, x: inner(w, x), w, x)
            if e.primitive.name in ("jit", "pjit")
        )
        return eqn.params["jaxpr"]

    assert body() is body()


@pytest.mark.nan
def test_nan_and_masked_heads():
    w = weights()
    w["q"][:, :, 0] = np.nan
    w["q"][:, :, 2] = 0
    masked = np.arange(HEADS)[:, None, None] == 1
    each = layer_with(
        softmax=lambda logits: jax.nn.softmax(jnp.where(masked, -jnp.inf, logits))
    )
    loss = functools.partial(unrolled, layer=each)
    (_, maxima), _ = value_and_grad(loss)(w, X)
    assert_array_equal(maxima["max_logits"][..., :3].reshape(-1), [np.nan, -np.inf, 0])


def test_order_of_effects_stays():
    ref = jax.new_ref(jnp.float32(1))

    def loss(x):
        before = x * ref[...]
        ref[...] = jnp.sin(x)
        return before + ref[...]

    closed = jax.make_jaxpr(loss)(2.0)
    assert_allclose(
        jaxpr_as_fun(with_maxima(closed, ()))(2.0)[0], 2 + np.sin(2), rtol=1e-6
    )


def test_scopes_and_lines_are_those_of_jax():
    w = weights(3)
    x = tokens()

    def each(x, w):
        with jax.named_scope("block"):
            return layer(x, w)

    def places(transform):
        fun = transform(functools.partial(unrolled, layer=each))
        return {
            (
                str(eqn.source_info.name_stack),
                source_info_util.summarize(eqn.source_info),
            )
            for eqn in jax.jit(fun).trace(w, x).jaxpr.eqns
        }

    ours = {
        (scope, line)
        for scope, line in places(value_and_grad)
        if "muonjax/_" not in line
    }
    assert ours == places(jax.value_and_grad)


def test_inside_of_shard_map():
    mesh = make_mesh(data=1)
    w = weights(2)
    x = tokens()

    def step(transform, w, x):
        def local(w, x):
            out, grads = transform(unrolled)(w, x)
            return jax.tree.map(lambda y: jax.lax.pmean(y, "data"), (out, grads))

        f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(f)(w, x)

    (loss, maxima), grads = step(value_and_grad, w, x)
    jax.tree.map(assert_array_equal, (loss, grads), step(jax.value_and_grad, w, x))
    assert_allclose(np.stack([*maxima.values()]), largest(w, x, 1), rtol=2e-5)


def test_outside_of_jit_arrays_stay_to_their_last_use_alone():
    alive = []

    def loss(x):
        for _ in range(9):
            x = x @ x
        jax.debug.callback(lambda: alive.append(len(jax.live_arrays())))
        return x.sum()

    x = jnp.eye(4)
    closed = jax.make_jaxpr(loss)(x)
    before = len(jax.live_arrays())
    jaxpr_as_fun(with_maxima(closed, ()))(x)
    jax.effects_barrier()
    assert alive[0] - before <= 2
