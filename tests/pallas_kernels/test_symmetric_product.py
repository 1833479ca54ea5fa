import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from muonjax import NewtonSchulz
from muonjax._common.platform_policy import Policy
from muonjax._newton_schulz.polar_factor import polar_factor
from pallas_kernels import _hopper_product, symmetric_product
from pallas_kernels._symmetric_product import IMPLEMENTATIONS, SymmetricProduct, _choose
from tests.mesh.layouts import make_mesh
from tests.pallas_kernels.symmetric_product_suite import (
    SymmetricProductSuite,
    draw,
    mirrored,
    oracle,
)

MATRIX = jnp.ones((4, 3))
H100 = "NVIDIA H100 80GB HBM3"
NEW = jax.__version_info__ >= _hopper_product.NEEDS_JAX


def described(kind, **axes):
    """As if the devices were GPUs of this kind, on a mesh with these types of axes."""
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    mesh = AbstractMesh(
        (4,) * len(axes),
        tuple(axes),
        axis_types=tuple(axes.values()),
        abstract_device=device,
    )
    return jax.sharding.use_abstract_mesh(mesh)


def one_h100():
    """As if JAX's default device were an H100, and all arrays on a CPU."""
    return mock.patch.object(
        _hopper_product, "_device", return_value=AbstractDevice(H100, 132, "gpu")
    )


class TestReference(SymmetricProductSuite):
    implementation = "reference"


def test_a_derivative_where_only_the_constants_vary_over_a_mesh():
    x = draw((4, 6, 3), jnp.float32)
    c = draw((6, 6), jnp.float32)

    def tangent(x, c):
        return jax.jvp(lambda c: symmetric_product(x[0], c=c, beta=2.0), (c,), (c,))[1][
            None
        ]

    mesh = make_mesh(a=4)
    out = jax.jit(
        jax.shard_map(tangent, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    )(x, c)
    np.testing.assert_array_equal(
        out, np.broadcast_to(mirrored(2 * np.asarray(c)), out.shape)
    )


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_64_bits(implementation, dtype):
    with jax.enable_x64(True):
        x = draw((130, 20), dtype)
        y = draw((130, 20), dtype, 1)
        out = symmetric_product(x, y=y, alpha=0.7, implementation=implementation)
        assert out.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(out), oracle(x, y, alpha=0.7), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ([jnp.ones(3)], {}, r"\[\*batch, m, k\], got shape \(3,\)"),
        ([jnp.ones((4, 3), jnp.int32)], {}, "got int32; cast it first"),
        ([MATRIX], {"y": jnp.ones((3, 3))}, r"y=.*shape \(4, 3\).*got \(3, 3\)"),
        ([MATRIX], {"y": MATRIX.astype(jnp.bfloat16)}, "y=.*float32.*bfloat16"),
        ([MATRIX], {"c": jnp.ones((3, 3))}, r"c=.*shape \(4, 4\).*got \(3, 3\)"),
        ([MATRIX], {"alpha": 1j}, "alpha=.*real"),
        ([MATRIX], {"beta": jnp.ones(2)}, r"beta=.*batch \(\), got shape \(2,\)"),
        (
            [jnp.ones((2, 4, 3))],
            {"alpha": jnp.ones(3)},
            r"alpha=.*batch \(2,\), got shape \(3,\)",
        ),
        (
            [MATRIX],
            {"implementation": "triton"},
            "'triton'.*'reference', 'blocked', 'hopper'",
        ),
    ],
)
def test_bad_input_says_what_to_do(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        symmetric_product(*arguments, **settings)


CHOSEN = "hopper on a GPU" if NEW else "reference"


@pytest.mark.parametrize(("platform", "shape", "dtype", "rule"), [
    ("cpu", (511, 2048), "float32", "reference"),
    ("cpu", (512, 64), "float32", "blocked"),
    ("cpu", (2048, 64), "bfloat16", "blocked"),
    ("gpu", (4095, 4096), "bfloat16", "reference"),
    ("gpu", (2, 4096, 64), "bfloat16", CHOSEN),
    ("gpu", (4096, 64), "float16", CHOSEN),
    ("gpu", (4096, 64), "float32", "reference"),
    ("gpu", (4096, 0), "bfloat16", "reference"),
    ("tpu", (4096, 64), "bfloat16", "reference"),
])  # fmt: skip
def test_the_rule_takes_what_was_measured_to_be_faster(platform, shape, dtype, rule):
    with described(H100):
        assert _choose(platform, jnp.zeros(shape, dtype)) == rule


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA A100-SXM4-80GB", "NVIDIA H20", f"{H100} MIG 1g.10gb", "NVIDIA B200"],
)
def test_the_rule_takes_no_kernel_that_no_device_of_the_kind_has_run(kind):
    with described(kind):
        assert _choose("gpu", jnp.zeros((4096, 64), "bfloat16")) == "reference"


@pytest.mark.parametrize(("types", "rule"), [
    ((AxisType.Manual, AxisType.Manual), CHOSEN),
    ((AxisType.Manual, AxisType.Auto), "reference"),
    ((AxisType.Auto,), "reference"),
    ((AxisType.Explicit,), "reference"),
])  # fmt: skip
def test_the_rule_takes_the_kernel_where_matrices_are_whole(types, rule):
    x = jnp.zeros((4096, 64), "bfloat16")
    with described(H100, **dict(zip("ab", types, strict=False))):
        assert _choose("gpu", x) == rule


@pytest.mark.parametrize("devices", [1, 4])
def test_the_rule_looks_at_the_mesh_of_an_array(devices):
    mesh = make_mesh(a=devices)
    x = jax.device_put(jnp.zeros((4096, 64), "bfloat16"), NamedSharding(mesh, P("a")))
    with one_h100():
        assert _choose("gpu", x) == (CHOSEN if devices == 1 else "reference")


@pytest.mark.skipif(not NEW, reason="the kernel needs JAX 0.11")
def test_half_precision_takes_the_kernel_from_4096_rows_on():
    def kernels(m, **settings):
        with described(H100):
            x = jax.ShapeDtypeStruct((m, m), jnp.float32)
            f = functools.partial(
                polar_factor,
                settings=NewtonSchulz(**settings),
                policy=Policy("gpu", H100),
            )
            return str(jax.jit(f).trace(x).jaxpr).count("wgmma_accumulator_deref")

    assert (
        kernels(4095) == kernels(4096, implementation="reference") == 0 < kernels(4096)
    )


@pytest.mark.skipif(not NEW, reason="the kernel needs JAX 0.11")
def test_a_chosen_kernel_is_left_out_where_the_arrays_are_on_a_cpu():
    x = draw((4096, 16), jnp.bfloat16)
    with one_h100(), mock.patch.object(jax, "device_count", return_value=1):
        out = jax.jit(lambda x: SymmetricProduct("gpu")(x))(x)
    np.testing.assert_array_equal(out, symmetric_product(x, implementation="reference"))


@pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="the device may be able to run it"
)
def test_hopper_is_refused_with_the_reason():
    with pytest.raises(
        NotImplementedError, match=re.escape("implementation='hopper') needs")
    ):
        symmetric_product(MATRIX.astype(jnp.bfloat16), implementation="hopper")


@pytest.mark.skipif(not NEW, reason="the kernel needs JAX 0.11")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_hopper_is_refused_where_xla_may_cut_its_matrices(kind):
    x = jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)
    with (
        described(H100, a=kind),
        pytest.raises(NotImplementedError, match=r"inside of jax\.shard_map"),
    ):
        jax.eval_shape(lambda x: symmetric_product(x, implementation="hopper"), x)


def _precisions(dtype, implementation):
    jaxpr = jax.make_jaxpr(
        lambda x: symmetric_product(x, implementation=implementation)
    )(jnp.ones((8, 4), dtype))
    return set(re.findall(r"precision=(\S+)", str(jaxpr)))


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_float32_is_float32_unless_the_user_says_otherwise(implementation):
    assert "HIGHEST" in str(_precisions(jnp.float32, implementation))
    assert "HIGHEST" not in str(_precisions(jnp.bfloat16, implementation))
    with jax.default_matmul_precision("tensorfloat32"):
        assert "HIGHEST" not in str(_precisions(jnp.float32, implementation))


def test_the_suite_covers_every_implementation():
    assert set(IMPLEMENTATIONS) == {"reference", "blocked", "hopper"}
