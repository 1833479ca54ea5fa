import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.common import hlo_counts
from pallas_kernels import symmetric_product
from tests.mesh.layouts import make_mesh
from tests.pallas_kernels.symmetric_product_suite import (
    SymmetricProductSuite,
    draw,
    oracle,
)


def on_devices(function, devices, check_vma=False):
    """`function` on so many devices that hold the same arguments; [device, *result]."""
    mesh = make_mesh(a=devices // 2, b=2) if devices > 2 else make_mesh(a=devices)
    names = mesh.axis_names
    return jax.jit(
        jax.shard_map(
            lambda *arguments: function(names, *arguments)[None],
            mesh=mesh,
            in_specs=P(),
            out_specs=P(names),
            check_vma=check_vma,
        )
    )


class TestShared(SymmetricProductSuite):
    """By four devices, so that blocks have a row or a few."""

    # XLA's CPU compiler crashes over products of k = 0 on several devices (jaxlib 0.11.2; not 0.10.2 nor 0.12.0).
    shapes = tuple(shape for shape in SymmetricProductSuite.shapes if shape[-1] > 0)

    def product(self, x, **settings):
        def shared(names, x, settings):
            return symmetric_product(x, **settings, axis_name=names)

        return on_devices(shared, 4)(x, settings)[0]


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_device_gets_the_same(devices, check_vma):
    x = draw((3, 50, 20), jnp.float32)
    c = draw((3, 50, 50), jnp.float32, 1)

    def shared(names, x, c):
        return symmetric_product(x, c=c, alpha=0.7, beta=-1.3, axis_name=names)

    out = np.asarray(on_devices(shared, devices, check_vma)(x, c))
    assert len(out) == devices
    np.testing.assert_allclose(out[0], oracle(x, None, c, 0.7, -1.3), atol=2e-5)
    for other in out[1:]:
        np.testing.assert_array_equal(other, out[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_inside_of_shard_map(check_vma):
    x = draw((24, 8), jnp.float32)
    dx = draw((24, 8), jnp.float32, 1)
    cotangent = draw((24, 24), jnp.float32, 2)

    def both(names, x, dx, cotangent):
        def shared(x):
            # A mean of equal things: it says that they are.
            return jax.lax.pmean(
                symmetric_product(x, alpha=0.7, axis_name=names), names
            )

        _, tangent = jax.jvp(shared, (x,), (dx,))
        _, pullback = jax.vjp(shared, x)
        return jnp.concatenate([tangent, pullback(cotangent)[0]], axis=-1)

    out = np.asarray(on_devices(both, 8, check_vma)(x, dx, cotangent), np.float64)
    forward = 0.7 * (oracle(x + dx) - oracle(x - dx)) / 2
    backward = (
        0.7
        * np.asarray(cotangent + cotangent.T, np.float64)
        @ np.asarray(x, np.float64)
    )
    for device in out:
        np.testing.assert_allclose(
            device, np.concatenate([forward, backward], axis=-1), atol=2e-5
        )


@pytest.mark.parametrize("devices", [2, 8])
def test_each_device_computes_its_part_and_sends_half_the_result(devices):
    m = 256
    x = jax.ShapeDtypeStruct((m, m), jnp.float32)
    f = on_devices(lambda names, x: symmetric_product(x, axis_name=names), devices)
    counts = hlo_counts.count(f.lower(x).compile(), devices=devices)
    part = (1 + 1 / (2 * devices)) / (2 * devices)
    assert counts.flops == part * 2 * m**3
    assert counts.collectives == {"all-gather": 1}
    assert counts.sent == {"all-gather": part * m**2 * 4 * (devices - 1)}


def test_a_named_implementation_is_refused():
    with pytest.raises(
        ValueError,
        match=r"implementation='blocked', axis_name=\('a',\).*plain products",
    ):
        symmetric_product(jnp.ones((4, 3)), implementation="blocked", axis_name="a")
