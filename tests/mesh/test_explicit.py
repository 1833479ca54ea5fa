"""Explicit axis types: every state of every transformation can be donated, and cut leaves need not fit the mesh."""

import contextlib
import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from muonjax import FusedDimensionNumbers, MuonDimensionNumbers
from tests.mesh.layouts import QUICK, make_mesh
from tests.tools.optimizers import optimizer
from tests.tools.oracles import normal_tree
from tests.tools.tiers import nightly, quick, thorough

NUMBERS = {
    "attention": MuonDimensionNumbers(0, (1, 2)),
    "rows": MuonDimensionNumbers(),
    "columns": MuonDimensionNumbers(),
    "fused": FusedDimensionNumbers(0, 1, (32, 8, 8), 1),
    "bias": None,
}
SPECS = {
    "attention": {n: {"kernel": P(None, "a")} for n in ("query", "key")},
    "rows": P("a"),
    "columns": P(None, "a"),
    "fused": P("a"),
    "bias": P("a"),
}
SITE = muonjax.mha_site()
HEADS = muonjax.Scale(path="kernel", rank=3, axes=(1,))
SIZE = muonjax.Site(path="attention/query", scales=(HEADS,))


def params():
    shapes = {
        "attention": {n: {"kernel": (16, 8, 4)} for n in ("query", "key")},
        "rows": (64, 16),
        "columns": (64, 16),
        "fused": (16, 48),
        "bias": (16,),
    }
    return normal_tree(shapes)


def put(tree, specs, mesh):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
    )


PUBLIC = {
    "cautious_weight_decay": lambda: muonjax.cautious_weight_decay(0.1),
    "offload": lambda: muonjax.offload(optax.adamw(1e-3)),
    "ema_nesterov": lambda: muonjax.ema_nesterov(optimizer("muon", NUMBERS), 0.5),
    "hyperball": lambda: muonjax.hyperball(0.1, dimension_numbers=NUMBERS),
    "match_rms": lambda: muonjax.match_rms(dimension_numbers=NUMBERS),
    "monitor": lambda: muonjax.monitor(
        optimizer("normuon", NUMBERS), NUMBERS, every_k=2
    ),
    "normalize_neurons": lambda: muonjax.normalize_neurons(dimension_numbers=NUMBERS),
    "orthogonalize": lambda: muonjax.orthogonalize(
        dimension_numbers=NUMBERS, newton_schulz=QUICK
    ),
    "qk_clip": lambda: muonjax.qk_clip(100.0, SITE, every_k=2),
    "signal_clip": lambda: muonjax.signal_clip(3.0, SIZE),
    "trace": lambda: muonjax.trace(0.9),
}
PUBLIC |= {
    name: functools.partial(optimizer, name, NUMBERS)
    for name in ("adamclip", "muon", "muonclip", "muonh", "normuon")
}
# Their states are inside of those of ema_nesterov, monitor, hyperball and qk_clip.
INSIDE_OF_OTHERS = ("muon", "muonclip", "muonh", "normuon", "orthogonalize")
STATISTICS = {"max_logits": {"attention": 400.0}, "signals": {"attention/query": 400.0}}


def test_all_public_transformations_are_here():
    returned = {
        name: inspect.signature(value).return_annotation
        for name, value in vars(muonjax).items()
        if inspect.isfunction(value)
    }
    transformations = {
        name
        for name, result in returned.items()
        if "GradientTransformation"
        in (result if isinstance(result, str) else getattr(result, "__name__", ""))
    }
    assert transformations == set(PUBLIC)


@pytest.mark.nan("the monitor starts from it")
@quick("qk_clip")
@pytest.mark.parametrize(
    "name", [nightly(name) if name in INSIDE_OF_OTHERS else name for name in PUBLIC]
)
def test_the_state_is_donated(name):
    """`init` shards each array of the state as `update` returns it, whatever the statistics' sharding."""
    tx = optax.with_extra_args_support(PUBLIC[name]())
    mesh = make_mesh(AxisType.Explicit, a=8)
    statistics = jax.tree.map(lambda x: jnp.full(8, x), STATISTICS)
    heads = jax.tree.map(lambda _: P("a"), statistics)

    def train(params, statistics, state):
        step = jax.jit(lambda s, p, e: tx.update(p, s, p, **e), donate_argnums=0)
        for _ in range(2):
            # A scalar of Optax's own, as a step counter, is on no mesh at first.
            before = [(x.sharding, x.ndim) for x in jax.tree.leaves(state)]
            updates, state = step(state, params, statistics)
            for x, (sharding, ndim) in zip(jax.tree.leaves(state), before, strict=True):
                assert not ndim or x.sharding.is_equivalent_to(sharding, ndim)
        return updates, state

    expected = train(params(), statistics, tx.init(params()))
    sharded = put(params(), SPECS, mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Some donated buffers were not usable")
        found = train(sharded, put(statistics, heads, mesh), tx.init(sharded))
        if name in (
            "monitor",
            "qk_clip",
        ):  # jitted, and with statistics that are not sharded
            init = jax.jit(tx.init, out_shardings=muonjax.state_shardings(tx, sharded))
            train(sharded, statistics, init(sharded))
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(
            x, y, atol=3e-6, rtol=1e-5, err_msg=jax.tree_util.keystr(path)
        )
    for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(sharded), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.parametrize("set_mesh", [False, thorough(True)])
@pytest.mark.parametrize(
    ("sizes", "spec", "parts"),
    [
        ({"a": 2, "b": 4}, P("a", "b"), (32, 2, 2)),
        thorough({"a": 2, "b": 4}, P(None, ("a", "b")), (32, 4, 12)),
        nightly({"a": 2, "b": 4}, P("a", "b"), (4, 2, 2)),
        nightly({"a": 2, "b": 4}, P(None, ("a", "b")), 3),
        nightly({"a": 8, "b": 1}, P("a", "b"), (32, 2, 2)),
        nightly({"a": 2, "b": 4}, P("b"), (32, 2, 2)),
    ],
)
def test_parts_that_no_mesh_axis_divides(sizes, spec, parts, set_mesh):
    numbers = {"w": FusedDimensionNumbers(0, 1, parts, 1)}
    w = {
        "w": jnp.asarray(
            np.random.default_rng(0).standard_normal(
                (32, np.sum(parts) if parts != 3 else 48)
            )
        )
    }
    w = jax.tree.map(lambda x: x.astype(jnp.float32), w)
    mesh = make_mesh(AxisType.Explicit, **sizes)
    sharded = put(w, {"w": spec}, mesh)
    tx = optax.chain(
        muonjax.orthogonalize(dimension_numbers=numbers, newton_schulz=QUICK),
        muonjax.normalize_neurons(dimension_numbers=numbers),
        muonjax.match_rms(dimension_numbers=numbers),
        muonjax.hyperball(0.1, dimension_numbers=numbers),
    )
    step = jax.jit(lambda x: tx.update(x, tx.init(x), x)[0])
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        found = step(sharded)
    with jax.enable_x64(True):
        exact = np.asarray(
            step(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), w))["w"]
        )
    errors = [
        np.abs(np.asarray(x["w"], np.float64) - exact).max() for x in (found, step(w))
    ]
    assert errors[0] <= 2 * errors[1] + 1e-7  # of one device
    assert errors[1] < 2e-6
    assert found["w"].sharding.is_equivalent_to(sharded["w"].sharding, 2)
