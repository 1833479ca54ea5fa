"""Runs in a process of its own with four virtual devices; the first test starts it."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import _mosaic_gpu, symmetric_product
from pallas_kernels._kernel_batch import by_batch

DEVICES = "--xla_force_host_platform_device_count=4"
HERE = DEVICES in os.environ.get("XLA_FLAGS", "")

if jax.__version_info__ < _mosaic_gpu.NEEDS_JAX:
    pytest.skip("shares out kernels that need JAX 0.11", allow_module_level=True)


@pytest.mark.skipif(HERE, reason="this is the process that it starts")
def test_on_four_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "XLA_FLAGS": DEVICES, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout
    assert re.search(r"\d+ passed", run.stdout)


four_devices = pytest.mark.skipif(
    not HERE, reason="needs four devices: see test_on_four_devices"
)
kinds = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def sharded(kind, spec, shape=(8, 16, 32)):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return x, jax.device_put(x, NamedSharding(mesh, spec))


def products(shapes, x, c=None):
    """A stand-in for a kernel, which notes the shapes that each device is given."""
    shapes.append(x.shape)
    out = jnp.matmul(x, x.mT, precision="highest")
    return out if c is None else out + c


def compiled(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return re.findall(r"all-gather|all-to-all|all-reduce|collective-permute", text)


@four_devices
@kinds
@pytest.mark.parametrize(
    ("spec", "matrices"),
    [(P("a"), 4), (P(("a", "b")), 2), (P(), 8)],
    ids=["one axis", "two axes", "whole"],
)
def test_each_device_has_its_own_matrices(kind, spec, matrices):
    x, on_mesh = sharded(kind, spec)
    shapes = []
    run = by_batch(functools.partial(products, shapes), "hopper")
    out = run(on_mesh)  # outside `jit` just as inside
    assert shapes[-1] == (matrices, 16, 32)
    assert compiled(run, on_mesh) == []
    assert out.sharding.is_equivalent_to(on_mesh.sharding, ndim=3)
    np.testing.assert_allclose(
        np.asarray(out), x @ x.swapaxes(1, 2), rtol=1e-5, atol=1e-5
    )


@four_devices
@kinds
def test_operands_that_are_whole_are_cut(kind):
    _, x = sharded(kind, P("a"))
    _, c = sharded(kind, P(), (8, 16, 16))
    shapes = []
    assert compiled(by_batch(functools.partial(products, shapes), "hopper"), x, c) == []
    assert shapes[-1] == (4, 16, 32)


@four_devices
@pytest.mark.parametrize("spec", [P(None, "a"), P(None, None, "a"), P("a", "b")])
def test_a_cut_matrix_raises_when_compiled(spec):
    _, x = sharded(AxisType.Auto, spec)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"call it inside jax\.shard_map"
    ):
        compiled(by_batch(functools.partial(products, []), "hopper"), x)


@four_devices
@pytest.mark.parametrize("spec", [P(None, "a"), P(None, None, "a"), P("a", "b")])
def test_a_cut_matrix_raises_when_traced_on_an_explicit_mesh(spec):
    _, x = sharded(AxisType.Explicit, spec)
    with pytest.raises(ValueError, match=r"call it inside jax\.shard_map"):
        jax.jit(by_batch(functools.partial(products, []), "hopper")).trace(x)


@four_devices
@kinds
def test_a_result_may_be_wanted_in_pieces(kind):
    """The kernel still makes whole matrices; cutting them moves nothing."""
    _, x = sharded(kind, P("a"))
    shapes = []
    run = by_batch(functools.partial(products, shapes), "hopper")
    out = NamedSharding(x.sharding.mesh, P("a", "b"))
    text = jax.jit(run, out_shardings=out).lower(x).compile().as_text()
    assert "all-" not in text
    assert shapes[-1] == (4, 16, 32)


@four_devices
@kinds
def test_shard_map_is_left_alone(kind):
    _, x = sharded(kind, P("a", "b"))
    shapes = []
    run = by_batch(functools.partial(products, shapes), "hopper")
    jax.jit(
        jax.shard_map(
            run, mesh=x.sharding.mesh, in_specs=P("a", "b"), out_specs=P("a", "b")
        )
    ).trace(x)
    assert shapes[-1] == (4, 8, 32)


@four_devices
@kinds
def test_the_hopper_kernel_is_guarded(kind, monkeypatch):
    """The op as a user calls it: traced with the real kernel, compiled with a stand-in."""
    monkeypatch.setattr(_mosaic_gpu, "require", lambda dtype: 132)

    def run(x):
        return symmetric_product(x, implementation="hopper")

    x, on_mesh = sharded(kind, P("a"), (8, 64, 64))
    half = on_mesh.astype(jnp.bfloat16)
    assert jax.eval_shape(run, half).shape == (8, 64, 64)
    jax.clear_caches()

    monkeypatch.setattr(
        _mosaic_gpu, "launched", lambda cores, x, y, c, scale: products([], x)
    )
    assert compiled(run, half) == []
    want = products([], jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32)
    np.testing.assert_allclose(
        np.asarray(jax.jit(run)(half), np.float32), want, rtol=0.01, atol=1e-4
    )
    _, cut = sharded(kind, P(None, "a"), (8, 64, 64))
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"call it inside jax\.shard_map"
    ):
        compiled(run, cut.astype(jnp.bfloat16))
