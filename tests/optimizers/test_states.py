"""What an optimizer keeps, compared with the parameters: dtypes, metadata, and where the arrays are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muonjax
from tests.tools.optimizers import optimizer

NUMBERS = muonjax.MuonDimensionNumbers
PARAMS = {
    "up": {"kernel": jnp.ones((16, 24))},
    "down": {"kernel": jnp.ones((24, 16))},
    "scale": jnp.ones(16),
}
PROGRAM = {"up": NUMBERS(0, 1), "down": NUMBERS(0, 1), "scale": None}
SITE = muonjax.fused_qkv_site(
    path="", name="up", num_heads=2, head_dim=4, num_kv_heads=2
)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_of_the_momentum_is_that_of_both_halves(dtype):
    params = cast(PARAMS, jnp.bfloat16)
    state = muonjax.muon(1e-3, PROGRAM, mu_dtype=dtype).init(params)
    dtypes = {
        jax.tree_util.keystr(path): x.dtype
        for path, x in jax.tree.leaves_with_path(state)
    }
    first_moments = [
        dtypes[name] for name in dtypes if ".mu" in name or ".trace" in name
    ]
    assert first_moments == [jnp.dtype(dtype)] * 3, dtypes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gradient_of_zero_moves_nothing(dtype):
    """In float16 Adam's usual eps is zero, and zero over zero."""
    params = cast(PARAMS, dtype)
    tx = muonjax.muon(1e-3, PROGRAM, weight_decay=0.0)
    updates, _ = tx.update(
        jax.tree.map(jnp.zeros_like, params), tx.init(params), params
    )
    assert all((update == 0).all() for update in jax.tree.leaves(updates))


def by_rank(tree):
    return jax.tree.map(lambda x: NUMBERS(0, 1) if jnp.ndim(x) == 2 else None, tree)


class Dense(nnx.Module):
    def __init__(self, fan_in, fan_out):
        self.kernel = nnx.Param(
            jnp.ones((fan_in, fan_out)), out_sharding=("data", None)
        )


class Network(nnx.Module):
    def __init__(self):
        self.up, self.down = Dense(16, 24), Dense(24, 16)
        self.scale = nnx.Param(jnp.ones(16))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", ["muon", "normuon", "muonh"])
def test_a_state_of_another_shape_has_not_the_sharding_of_its_parameter(name, kind):
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(kind,))):
        network = Network()
        training = nnx.Optimizer(network, optimizer(name, by_rank), wrt=nnx.Param)
        training.update(network, nnx.state(network, nnx.Param))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(nnx.state(network)))


@pytest.mark.parametrize("name", ["normuon", "muonh"])
def test_a_box_with_the_names_of_axes_is_left_out_of_a_state_of_another_shape(name):
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, ("data", None)[: x.ndim]), PARAMS)
    tx = optimizer(name, PROGRAM)
    state = tx.init(boxed)
    updates, state = tx.update(boxed, state, boxed)
    plain, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(updates), plain)
    nodes = jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, nn.Partitioned)
    )
    boxes = [
        node
        for node in nodes
        if isinstance(node, nn.Partitioned) and jax.tree.leaves(node)
    ]
    shapes = {x.shape for x in jax.tree.leaves(PARAMS)}
    assert boxes
    assert all(jnp.shape(box.value) in shapes for box in boxes)


@pytest.mark.parametrize("name", ["muon", "normuon", "muonh", "adamclip"])
def test_updates_lie_where_the_parameters_do_and_not_where_the_state_does(name):
    """Replicated parameters, and a state that is divided: the first stage of ZeRO."""
    extra = (
        {"max_logits": {"max_logits": jnp.full(2, 200.0)}} if name == "adamclip" else {}
    )
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):
        params = jax.device_put(PARAMS, P())
        tx = (
            muonjax.adamclip(1e-3, SITE)
            if name == "adamclip"
            else optimizer(name, PROGRAM)
        )
        state = jax.tree.map(
            lambda x: (
                jax.device_put(x, P("data"))
                if x.ndim == 2 and x.shape[0] % 4 == 0
                else x
            ),
            tx.init(params),
        )
        updates, _ = jax.jit(tx.update)(params, state, params, **extra)
    for update, param in zip(
        jax.tree.leaves(updates), jax.tree.leaves(params), strict=True
    ):
        assert update.sharding.is_equivalent_to(param.sharding, param.ndim)
