import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import source_info_util
from jax.extend.core import check_jaxpr, jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from muonjax import value_and_grad
from muonjax._inspect.report import Probe, run
from muonjax._inspect.versions import bodies, opened
from tests.inspect import attention
from tests.inspect.attention import (
    HEADS,
    attend,
    by_hand,
    check,
    custom_softmax,
    layer,
    report,
    scanned,
    tokens,
    unrolled,
    weights,
)
from tests.inspect.finder import finder


def reported(fun, *args, heads=(1,), probes=None):
    """The outputs of `fun`'s jaxpr with its maxima."""
    closed = jax.make_jaxpr(fun)(*args)
    probes = (
        [probe for _, probe in finder(*heads)(closed, len(jax.tree.leaves(args[0])))]
        if probes is None
        else probes
    )
    assert probes
    rewritten = report(closed, probes)
    check_jaxpr(opened(rewritten))
    return jax.jit(jaxpr_as_fun(rewritten))(*jax.tree.leaves(args))


def enclosing(jaxpr, path):
    """The primitives of the equations on the way to a probe."""
    if not path:
        return []
    eqn = opened(jaxpr).eqns[path[0].equation]
    return [eqn.primitive.name, *enclosing(bodies(eqn)[path[0].body][1], path[1:])]


def primitives(jaxpr):
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for _, body in bodies(eqn):
            yield from primitives(body)


@pytest.mark.parametrize("softmax", [jax.nn.softmax, attention.softmax, custom_softmax])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_in_any_spelling(softmax, causal):
    w, x = weights(), tokens()
    each = functools.partial(layer, attend=functools.partial(attend, softmax=softmax, causal=causal))
    check(functools.partial(unrolled, layer=each), w, x, by_hand(w, x, causal).max(1), finder(1))


def test_dot_product_attention_with_shared_keys():
    w, x = weights(), tokens()
    w["k"], w["v"] = w["k"][:, :, ::2], w["v"][:, :, ::2]
    each = functools.partial(layer, attend=attention.dot_product_attention)
    full = {n: np.repeat(v, 2, 2) if n in "kv" else v for n, v in w.items()}
    expected = by_hand(full, x).max(1).reshape(1, 2, 2)  # a key's head, and the queries that share it
    check(functools.partial(unrolled, layer=each), w, x, expected, finder(1, 3))


@pytest.mark.parametrize("policy", ["none", "everything_saveable", "dots_with_no_batch_dims_saveable"])
def test_layers_of_a_scan_are_a_leading_axis(policy):
    w, x = weights(3), tokens()
    each = (
        layer if policy == "none" else jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))
    )
    check(functools.partial(scanned, layer=each), w, x, by_hand(w, x).max(1)[None], finder(1))


def test_nested_scans_of_layers():
    w, x = weights(4), tokens()

    def loss(w, x):
        def block(x, w):
            return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0], None)

        pairs = {name: value.reshape(2, 2, *value.shape[1:]) for name, value in w.items()}
        return (jax.lax.scan(block, x, pairs)[0] ** 2).mean()

    closed = jax.make_jaxpr(loss)(w, x)
    ((_, found),) = finder(1)(closed, 4)
    path = [i for i, name in enumerate(enclosing(closed, found.path)) if name == "scan"]
    assert len(path) == 2
    for layers in ([0, 1], [0], [1], []):
        steps = [step._replace(layer=i in [path[j] for j in layers]) for i, step in enumerate(found.path)]
        _, maxima = reported(loss, w, x, probes=[found._replace(path=tuple(steps))])
        expected = by_hand(w, x).max(1).reshape(2, 2, HEADS)
        others = tuple(j for j in (0, 1) if j not in layers)
        np.testing.assert_allclose(maxima, expected.max(others) if others else expected, rtol=2e-5)


def test_queries_in_chunks_are_one_maximum():
    w, x = weights(2), tokens()

    def in_chunks(q, k, v):
        q = jnp.moveaxis(q.reshape(q.shape[0], 3, 2, *q.shape[2:]), 1, 0)
        out = jax.lax.map(lambda q: attend(q, k, v), q)
        return jnp.moveaxis(out, 0, 1).reshape(*v.shape)

    each = functools.partial(layer, attend=in_chunks)
    check(functools.partial(scanned, layer=each), w, x, by_hand(w, x).max(1)[None], finder(1))


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_branches_not_taken_have_none(branch):
    w, x = weights(), tokens()

    def loss(w, x):
        def double(x, w):
            return layer(2 * x, w)

        def each(x, w):
            return jax.lax.switch(branch + jnp.int32(x[0, 0, 0] * 0), [layer, lambda x, w: x, double], x, w)

        return unrolled(w, x, each)

    nothing = np.full(HEADS, -np.inf)
    expected = {
        0: [by_hand(w, x).max((0, 1)), nothing],
        1: [nothing, nothing],
        2: [nothing, by_hand(w, 2 * x).max((0, 1))],
    }
    check(loss, w, x, expected[branch], finder(1))


def test_branches_with_one_body():
    w, x = weights(), tokens()

    def loss(w, x):
        each = jax.jit(lambda x, w: layer(x, w))
        return unrolled(w, x, lambda x, w: jax.lax.cond(x[0, 0, 0] > 9, each, each, x, w))

    _, *maxima = reported(loss, w, x)
    np.testing.assert_allclose(maxima, [by_hand(w, x).max((0, 1)), np.full(HEADS, -np.inf)], rtol=2e-5)


def test_nested_jit_with_static_arguments():
    w, x = weights(2), tokens()

    @functools.partial(jax.jit, static_argnames=("scale",))
    def inner(x, w, *, scale):
        return jax.jit(layer)(scale * x, w)

    loss = functools.partial(unrolled, layer=functools.partial(inner, scale=1))
    check(loss, w, x, by_hand(w, x).max(1), finder(1))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("loop", ["scan", "cond", "none"])
def test_shard_map_over_batch_and_heads(check_vma, loop):
    w, x = weights(), tokens()
    mesh = jax.make_mesh((2, 4), ("data", "head"), axis_types=(AxisType.Auto,) * 2)
    x_spec, w_spec = (
        P("data"),
        {"q": P(None, "head"), "k": P(None, "head"), "v": P(None, "head"), "o": P("head")},
    )
    scalar = jnp.float32(1)

    def heads(x, w, scalar):
        q, k, v = (jnp.einsum("btd,dhs->bths", x, w[name]) for name in "qkv")
        if loop == "scan":
            values = jax.lax.map(lambda q: attend(q[:, None], k, v)[:, 0], jnp.moveaxis(q, 1, 0))
            values = jnp.moveaxis(values, 0, 1)
        elif loop == "cond":
            values = jax.lax.cond(scalar > 0, attend, lambda q, k, v: v, q, k, v)
        else:
            values = attend(q, k, v)
        return jax.lax.psum(jnp.einsum("bths,hsd->btd", values, w["o"]), "head")

    mapped = jax.shard_map(
        heads, mesh=mesh, in_specs=(x_spec, w_spec, P()), out_specs=x_spec, check_vma=check_vma
    )

    def loss(w, x):
        return unrolled(w, x, lambda x, w: x + mapped(x, w, scalar))

    expected, find = by_hand(w, x).max((1, 2))[:, None], finder(1)
    check(loss, w, x, expected, find)


def test_explicit_axes():
    w, x = weights(), tokens()
    mesh = jax.make_mesh((2, 4), ("data", "head"), axis_types=(AxisType.Explicit,) * 2)
    specs = {
        "q": P(None, None, "head"),
        "k": P(None, None, "head"),
        "v": P(None, None, "head"),
        "o": P(None, "head"),
    }
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(value, jax.NamedSharding(mesh, specs[name])) for name, value in w.items()
        }
        on = jax.device_put(x, jax.NamedSharding(mesh, P("data")))

        def each(x, w):
            q, k, v = (
                jnp.einsum("btd,dhs->bths", x, w[n], out_sharding=P("data", None, "head")) for n in "qkv"
            )

            def cond(*args):
                return jax.lax.cond(True, attend, lambda q, k, v: v, *args)

            return x + jnp.einsum("bths,hsd->btd", cond(q, k, v), w["o"], out_sharding=P("data"))

        check(functools.partial(scanned, layer=each), placed, on, by_hand(w, x).max(1)[None], finder(1))


def test_named_scopes_stay_and_hold_the_maximum():
    w, x = weights(2), tokens()

    def each(x, w):
        with jax.named_scope("attention"):
            return layer(x, w)

    def scopes(jaxpr):
        return [(eqn.primitive.name, str(eqn.source_info.name_stack)) for eqn in primitives(jaxpr)]

    closed = jax.make_jaxpr(functools.partial(scanned, layer=each))(w, x)
    before = scopes(closed)
    after = scopes(report(closed, [probe for _, probe in finder(1)(closed, 4)]))
    assert [row for row in after if row in before][: len(before)]
    added = list(after)
    for row in before:
        added.remove(row)
    assert added
    assert all("attention" in scope for _, scope in added)


@pytest.mark.parametrize("partitionable", [False, True])
def test_contexts_of_equations_stay(partitionable):
    w, x = weights(2), tokens()

    def each(x, w):
        with jax.threefry_partitionable(partitionable):
            noise = jax.random.normal(jax.random.key(0), x.shape)
        return layer(x, w) + noise

    loss = functools.partial(scanned, layer=each)
    out, _ = reported(loss, w, x)
    np.testing.assert_array_equal(out, jax.jit(loss)(w, x))


def test_one_body_is_rewritten_once():
    w, x = weights(12), tokens()
    each = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)

    def rewritten():
        closed = jax.make_jaxpr(functools.partial(unrolled, layer=each))(w, x)
        probes = [probe for _, probe in finder(1)(closed, 4)]
        assert len(probes) == 12
        eqns = [eqn for eqn in report(closed, probes).eqns if eqn.primitive.name in ("checkpoint", "remat2")]
        assert len(eqns) == 12
        return {id(eqn.params["jaxpr"]): eqn.params["jaxpr"] for eqn in eqns}

    first, second = (
        rewritten(),
        rewritten(),
    )  # a later call, such as the next step's outside of jit, gets the same
    assert len(first) == 1
    assert first.keys() == second.keys()


def test_nan_and_masked_heads():
    logits = np.zeros((2, 3, 4, 4), np.float32)
    logits[1, 0, 2, 3] = np.nan
    logits[:, 1] = -np.inf
    closed = jax.make_jaxpr(lambda x: attention.softmax(x))(logits)
    probe = Probe((), closed.jaxpr.invars[0], (1,))
    _, maxima = jaxpr_as_fun(report(closed, [probe]))(logits)
    np.testing.assert_array_equal(maxima, [np.nan, -np.inf, 0])


def test_any_softmax_axis_and_order_of_heads():
    logits = np.random.default_rng(0).standard_normal((2, 5, 3, 4)).astype(np.float16)
    closed = jax.make_jaxpr(lambda x: jax.nn.softmax(x, 1))(logits)
    probes = [Probe((), closed.jaxpr.invars[0], heads) for heads in [(0, 3), (2,), ()]]
    probes.append(probes[0]._replace(entries=(0, 2, 4, 6, 1, 3, 5, 7)))
    _, *maxima = jaxpr_as_fun(report(closed, probes))(logits)
    assert [m.dtype for m in maxima] == [np.float32] * 4
    expected = [logits.max((1, 2)), logits.max((0, 1, 3)), logits.max(), logits.max((1, 2)).T.ravel()]
    for maximum, other in zip(maxima, expected, strict=True):
        np.testing.assert_array_equal(maximum, other)


def test_order_of_effects_stays():
    ref = jax.new_ref(jnp.float32(1))

    def loss(x):
        before = x * ref[...]
        ref[...] = jnp.sin(x)
        return before + ref[...]

    closed = jax.make_jaxpr(loss)(2.0)
    np.testing.assert_allclose(run(closed, [], 2.0)[0], 2 + np.sin(2), rtol=1e-6)


def test_scopes_and_lines_are_those_of_jax():
    w, x = weights(3), tokens()

    def each(x, w):
        with jax.named_scope("block"):
            return layer(x, w)

    def places(transform):
        fun = transform(functools.partial(unrolled, layer=each))
        return {
            (str(eqn.source_info.name_stack), source_info_util.summarize(eqn.source_info))
            for eqn in jax.jit(fun).trace(w, x).jaxpr.eqns
        }

    ours = {(scope, line) for scope, line in places(value_and_grad) if "muonjax/_" not in line}
    assert ours == places(jax.value_and_grad)


def test_inside_of_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = weights(2), tokens()

    def step(transform, w, x):
        def local(w, x):
            out, grads = transform(unrolled)(w, x)
            return jax.tree.map(lambda y: jax.lax.pmean(y, "data"), (out, grads))

        f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(f)(w, x)

    (loss, maxima), grads = step(value_and_grad, w, x)
    jax.tree.map(np.testing.assert_array_equal, (loss, grads), step(jax.value_and_grad, w, x))
    np.testing.assert_allclose(maxima["max_logits"], by_hand(w, x).max(1), rtol=2e-5)


def test_outside_of_jit_arrays_stay_to_their_last_use_alone():
    alive = []

    def loss(x):
        for _ in range(9):
            x = x @ x
        jax.debug.callback(lambda: alive.append(len(jax.live_arrays())))
        return x.sum()

    x = jnp.eye(4)
    closed, before = jax.make_jaxpr(loss)(x), len(jax.live_arrays())
    run(closed, [], x)
    jax.effects_barrier()
    assert alive[0] - before <= 2
