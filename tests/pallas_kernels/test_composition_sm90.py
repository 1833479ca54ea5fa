"""The kernel that composes polynomials: in Pallas's GPU interpreter, against float64; compiled; where it can't run."""

import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import ahead_of_time
from muonjax import NewtonSchulz
from muonjax._newton_schulz.short_side import _OPENING
from pallas_kernels import _kernel_batch, _mosaic_gpu
from pallas_kernels._composition import composition

STEPS = {"opening": _OPENING, "balanced": NewtonSchulz().steps}  # with a cubic at the end

needs_jax = pytest.mark.skipif(
    jax.__version_info__ < _mosaic_gpu.NEEDS_JAX, reason="the kernel needs JAX 0.11 (Python 3.12)"
)
# An interpreter that waits for a barrier waits for ever.
pytestmark = pytest.mark.timeout(120)


@contextlib.contextmanager
def on_an_h100(*, interpreted=True):
    """As if the device were one; of the kernel's races none may be found."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        if not interpreted:
            yield
            return
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
        from jax.experimental.pallas import mosaic_gpu as plgpu

        try:
            # The interpreter's ordered callbacks can't be in a partitioned call; test_batch_partitioning.py has it.
            with (
                plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
                mock.patch.object(_kernel_batch, "by_batch", lambda function, _: function),
            ):
                yield
            assert not interpret_pallas_call.get_races().races_found
        finally:
            interpret_pallas_call.reset_gpu_interpret_mode_state()


def gram_matrices(m, batch=2):
    """R [batch, m, m] with eigenvalues from 1 to 1e-6, and others spread evenly."""
    rng = np.random.default_rng(m)
    u = np.linalg.qr(rng.standard_normal((batch, m, m)))[0]
    s = np.stack([np.geomspace(1, 1e-6, m), np.linspace(1, 0, m)])[np.arange(batch) % 2]
    return ((u * s[:, None]) @ u.mT).astype(np.float32)


def exact(r, rows, alpha, beta):
    """alpha T + beta I by the eigenvalues in float64."""
    values, u = np.linalg.eigh(r.astype(np.float64))
    gain, s = np.ones_like(values), values
    for a, b, c in rows:
        step = 1 + b / a * s + c / a * s**2
        gain, s = gain * step, s * (a * step) ** 2
    return (u * (alpha * (gain - 1) + beta)[..., None, :]) @ u.mT


def error(t, r, *arguments):
    """Of each matrix, relative."""
    want = exact(r, *arguments)
    return np.linalg.norm(np.asarray(t, np.float64) - want, axis=(-2, -1)) / np.linalg.norm(
        want, axis=(-2, -1)
    )


@needs_jax
@pytest.mark.parametrize(
    ("m", "steps"), [(64, "opening"), (128, "balanced"), (72, "opening"), (1, "balanced")]
)
def test_it_is_as_accurate_as_float16(m, steps):
    r, arguments = gram_matrices(m), (STEPS[steps], 1.0, 0.0)
    with on_an_h100():
        t = jax.jit(lambda r: composition(r, *arguments, "hopper"))(r)
    assert (t.shape, t.dtype) == (r.shape, jnp.float16)
    # Each step rounds Q, T and the operands of R^2 once.
    assert error(t, r, *arguments).max() <= len(STEPS[steps]) * jnp.finfo(jnp.float16).eps


@needs_jax
def test_alpha_and_beta():
    r = gram_matrices(128)
    arguments = _OPENING[:1], 3.0, 4.0
    with on_an_h100():
        t = jax.jit(lambda r: composition(r, *arguments, "hopper"))(r)
    assert error(t, r, *arguments).max() < 1e-3


@needs_jax
def test_batches_and_vmap_are_one_launch():
    r = gram_matrices(64, 6)
    arguments = _OPENING[:1], 1.0, 0.0
    with on_an_h100():
        f = jax.vmap(lambda r: composition(r, *arguments, "hopper"))
        jaxpr = str(jax.make_jaxpr(f)(r.reshape(3, 2, 64, 64)))
        t = jax.jit(f)(r.reshape(3, 2, 64, 64))
    assert re.findall(r"Mesh\(grid=\((\d+),\)", jaxpr) == ["6"]
    assert error(t.reshape(r.shape), r, *arguments).max() < 1e-3


@pytest.mark.parametrize("m", [64, 100, 128])
def test_the_products_of_xla_are_right(m):
    r = gram_matrices(m)
    for rows in STEPS.values():
        t = jax.jit(lambda r, rows=rows: composition(r, rows, 1.0, 0.0))(r)
        assert error(t, r, rows, 1.0, 0.0).max() < 2e-3


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [("NVIDIA A100", (64, 64), "9.0.*'NVIDIA A100"), ("NVIDIA H100", (2, 129, 129), r"up to 128 x 128.*129")],
)
def test_what_it_can_not_do_is_named(kind, shape, message):
    if jax.__version_info__ < _mosaic_gpu.NEEDS_JAX:
        message = "needs JAX 0.11"
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=8)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match=message):
        composition(jnp.zeros(shape), _OPENING, 1.0, 0.0, "hopper")


@needs_jax
@pytest.mark.skipif(ahead_of_time.missing("gpu") is not None, reason=ahead_of_time.missing("gpu") or "")
@pytest.mark.parametrize("m", [64, 128])
def test_it_compiles_for_an_h100_without_spills(m, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    text = ahead_of_time.compile_for(
        ahead_of_time.CHIPS["H100"],
        lambda r: composition(r, STEPS["balanced"], 1.0, 0.0, "hopper"),
        jax.ShapeDtypeStruct((3, m, m), jnp.float32),
    ).text
    assert text.count('custom_call_target="mosaic_gpu') == 1
    assert "fusion(" not in text
    assert re.search(r"\b0 bytes spill stores", "".join(capfd.readouterr()))
