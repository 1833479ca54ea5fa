import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import symmetric_product
from pallas_kernels._api import IMPLEMENTATIONS, _choose
from tests.pallas_kernels.symmetric_product_suite import SymmetricProductSuite, draw, mirrored, oracle

MATRIX = jnp.ones((4, 3))


class TestReference(SymmetricProductSuite):
    implementation = "reference"


def test_small_products_are_the_reference_by_default():
    x = draw((70, 20), jnp.float32)
    want = symmetric_product(x, implementation="reference")
    np.testing.assert_array_equal(np.asarray(symmetric_product(x)), np.asarray(want))


def test_a_derivative_where_only_the_constants_vary_over_a_mesh():
    x, c = draw((4, 6, 3), jnp.float32), draw((6, 6), jnp.float32)

    def tangent(x, c):
        return jax.jvp(lambda c: symmetric_product(x[0], c=c, beta=2.0), (c,), (c,))[1][None]

    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    out = jax.jit(jax.shard_map(tangent, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")))(x, c)
    np.testing.assert_array_equal(out, np.broadcast_to(mirrored(2 * np.asarray(c)), out.shape))


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_64_bits(implementation, dtype):
    with jax.enable_x64(True):
        x, y = draw((130, 20), dtype), draw((130, 20), dtype, 1)
        out = symmetric_product(x, y=y, alpha=0.7, implementation=implementation)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out), oracle(x, y, alpha=0.7), rtol=1e-12, atol=1e-12)


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
        ([jnp.ones((2, 4, 3))], {"alpha": jnp.ones(3)}, r"alpha=.*batch \(2,\), got shape \(3,\)"),
        ([MATRIX], {"implementation": "triton"}, "'triton'.*'reference', 'blocked', 'hopper'"),
    ],
)
def test_bad_input_says_what_to_do(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        symmetric_product(*arguments, **settings)


def test_the_rule_never_takes_a_kernel_that_no_gpu_has_run():
    for platform in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        for m in (64, 512, 4096, 8192):
            for batch in ((), (8,)):
                assert _choose(platform, (*batch, m, m)) in ("reference", "blocked")


def test_the_rule_takes_blocked_only_on_a_cpu():
    for shape in ((512, 64), (2048, 2048), (8, 1024, 1024)):
        assert _choose("cpu", shape) == "blocked"
        assert _choose("gpu", shape) == "reference"
    assert _choose("cpu", (511, 2**20)) == "reference"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the device may be able to run it")
def test_hopper_is_refused_with_the_reason():
    with pytest.raises(NotImplementedError, match=re.escape("implementation='hopper') needs")):
        symmetric_product(MATRIX.astype(jnp.bfloat16), implementation="hopper")


def _precisions(dtype, implementation):
    jaxpr = jax.make_jaxpr(lambda x: symmetric_product(x, implementation=implementation))(
        jnp.ones((8, 4), dtype)
    )
    return set(re.findall(r"precision=(\S+)", str(jaxpr)))


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_float32_is_float32_unless_the_user_says_otherwise(implementation):
    assert "HIGHEST" in str(_precisions(jnp.float32, implementation))
    assert "HIGHEST" not in str(_precisions(jnp.bfloat16, implementation))
    with jax.default_matmul_precision("tensorfloat32"):
        assert "HIGHEST" not in str(_precisions(jnp.float32, implementation))


def test_the_suite_covers_every_implementation():
    assert set(IMPLEMENTATIONS) == {"reference", "blocked", "hopper", "quack", "tpu"}
