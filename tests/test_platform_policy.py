"""The platform comes from where the arrays are, and not from the process's default backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P

import muonjax
from muonjax._common.platform_policy import Policy, policy_of
from pallas_kernels import symmetric_product
from pallas_kernels._platform_of import kind_of, platform_of
from tests.tools.products import equations

KINDS = {"gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite", "cpu": "cpu"}
SHAPE = (2, 512, 576)  # on a CPU symmetric products are made in blocks from 512 on
NUMBERS = muonjax.MuonDimensionNumbers(1, 2)


def device(platform):
    return AbstractDevice(device_kind=KINDS[platform], num_cores=1, platform=platform)


def mesh_on(platform, axis_types=AxisType.Auto):
    return AbstractMesh(
        (2,), ("fsdp",), axis_types=(axis_types,), abstract_device=device(platform)
    )


def array_on(platform, shape):
    sharding = NamedSharding(mesh_on(platform), P())
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


@pytest.fixture
def pretend(monkeypatch):
    """Another default backend, as far as the library can see."""
    return lambda platform: monkeypatch.setattr(
        jax, "default_backend", lambda: platform
    )


def update(x):
    tx = muonjax.muon(1e-3, NUMBERS)
    return tx.update(x, tx.init(x), x)[0]


CALLS = {
    "newton_schulz": muonjax.newton_schulz,
    "muon": update,
    "symmetric_product": symmetric_product,
}


def dots(jaxpr):
    """Shapes and dtypes of the operands of all products, loops and calls included."""
    for equation in equations(jaxpr):
        if equation.primitive.name == "dot_general":
            yield tuple((v.aval.shape, v.aval.dtype.name) for v in equation.invars)


def program(call, x):
    return sorted(dots(jax.make_jaxpr(lambda x: call(x))(x).jaxpr))


@functools.cache
def expected(name, platform):
    """The products of `call` where everything agrees on the platform."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device(platform))):
        return program(CALLS[name], jax.ShapeDtypeStruct(SHAPE, jnp.float32))


@pytest.mark.parametrize("name", CALLS)
def test_the_platforms_have_programs_of_their_own(name):
    assert expected(name, "cpu") != expected(name, "gpu")


@pytest.mark.filterwarnings("ignore:.*axis types are Auto")
@pytest.mark.parametrize(
    ("default", "there"),
    [("gpu", "cpu"), ("cpu", "gpu"), ("tpu", "cpu"), ("cpu", "tpu")],
)
@pytest.mark.parametrize("name", CALLS)
def test_the_mesh_of_the_arrays_decides(name, default, there, pretend):
    pretend(default)
    assert program(CALLS[name], array_on(there, SHAPE)) == expected(name, there)


def test_the_mesh_of_a_distribution_decides(pretend):
    pretend("tpu")
    x = jax.ShapeDtypeStruct((256, 320), jnp.float32)
    assert policy_of(x, mesh=mesh_on("gpu")).platform == "gpu"


def test_what_decides_comes_in_this_order(pretend):
    x = jnp.ones((4, 4))
    assert platform_of(x) == "cpu"
    pretend("tpu")
    assert platform_of(x) == "cpu"  # a concrete array
    assert platform_of(np.ones((4, 4))) == platform_of() == "tpu"
    with jax.default_device("gpu"):
        assert platform_of() == "gpu"
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device("cpu"))):
            assert platform_of() == "cpu"
            assert platform_of(mesh=mesh_on("gpu")) == "gpu"
            sharded = array_on("tpu", (4, 4))
            assert platform_of(sharded) == "tpu"
            assert platform_of(sharded, mesh=mesh_on("gpu")) == "gpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform_of() == "cpu"


def test_the_kind_is_that_of_the_same_device(pretend):
    assert kind_of(jnp.ones(3)) == kind_of() == jax.devices()[0].device_kind
    assert kind_of(mesh=mesh_on("gpu")) == KINDS["gpu"]
    assert kind_of(array_on("tpu", (4,))) == KINDS["tpu"]
    pretend("tpu")
    assert kind_of() == ""


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_chunks_divide_the_count_and_are_as_large_as_they_may_be(platform):
    policy = Policy(platform)
    elements = 1 << (18 if platform == "cpu" else 26)
    assert policy.chunk_size(12, (1, elements // 5)) == 4
    assert policy.chunk_size(7, (1, elements // 5)) == 1
    assert policy.chunk_size(7, (2, elements)) == 1
    assert policy.chunk_size(7, (1, 1)) == 7


@pytest.mark.parametrize(("platform", "dtype", "asked", "sent"), [
    ("gpu", "float32", None, "bfloat16"), ("gpu", "float32", "float32", "float32"), ("gpu", "float16", None, "float16"),
    ("tpu", "float64", None, "float64"), ("tpu", "complex64", "bfloat16", "complex64"),
    ("cpu", "float32", None, "float32"), ("cpu", "float32", "bfloat16", "bfloat16"),
])  # fmt: skip
def test_a_mesh_exchanges_half_precision_where_products_round_to_it_anyway(
    platform, dtype, asked, sent
):
    assert Policy(platform).exchange_dtype(dtype, asked) == sent


def test_a_platform_that_is_not_known_gets_bfloat16():
    """float16 is sure on GPUs alone."""
    dtypes = {"gpu": jnp.float16, "tpu": jnp.bfloat16, "metal": jnp.bfloat16}
    for platform, dtype in dtypes.items():
        assert Policy(platform).compute_dtype(jnp.float32) == dtype
