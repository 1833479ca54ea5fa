"""The iteration in a TPU's VMEM, in Pallas's interpreter beside the XLA path and float64; and compiled for TPUs."""

import contextlib
import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.common import ahead_of_time
from muonjax import NewtonSchulz, _device_check, polar_express
from muonjax._newton_schulz.iteration import polar_factor
from muonjax._policy import Policy
from pallas_kernels import _kernel_batch, _vmem_tpu
from tests.tools import oracles
from tests.tools.tiers import every_pair, nightly, quick

needs_libtpu = pytest.mark.skipif(
    ahead_of_time.missing("tpu") is not None, reason=ahead_of_time.missing("tpu") or ""
)
PRESETS = {"fast": NewtonSchulz.fast(), "balanced": NewtonSchulz(), "plain": NewtonSchulz(deflation=0)}


def named(settings=None, **others):
    return dataclasses.replace(settings or NewtonSchulz(), implementation="tpu_vmem", **others)


@contextlib.contextmanager
def interpreter(cores=1, copies="on_wait"):
    # JAX 0.12 raises where a race happens, if it is not told to note it only.
    noted = {"on_race": "warn"} if hasattr(pltpu.InterpretParams, "on_race") else {}
    settings = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=copies, num_cores_or_threads=cores, **noted
    )
    # The interpreter's callbacks can't be in a partitioned call.
    whole = mock.patch.object(_kernel_batch, "by_batch", lambda function, _: function)
    with pltpu.force_tpu_interpret_mode(settings), whole:
        yield


def by_kernel(x, settings, *, kind="TPU v5 lite", copies="on_wait"):
    """The result, and whether the interpreter saw a race."""
    cores = min(len(x), 2) if kind == "TPU v5p" and x.ndim == 3 else 1
    with interpreter(cores, copies):
        f = jax.jit(functools.partial(polar_factor, settings=named(settings), policy=Policy("tpu", kind)))
        return np.asarray(f(x).block_until_ready()), interpret_pallas_call.races.races_found


def by_xla(x, settings):
    return np.asarray(jax.jit(functools.partial(polar_factor, settings=settings, policy=Policy("tpu")))(x))


def matrices(count, m, n, dtype="float32"):
    """With singular values down to 1/300 of the largest."""
    spectrum = np.logspace(0, -2.5, min(m, n))
    x = np.stack([oracles.with_spectrum(spectrum, max(m, n), seed=i, tall=m > n) for i in range(count)])
    return jnp.asarray(x, dtype)


@every_pair
@quick("fast-2-256-256-eager-TPU v5 lite", "balanced-3-200-700-on_wait-TPU v5p")
@pytest.mark.parametrize(("copies", "kind"), [("eager", "TPU v5 lite"), ("on_wait", "TPU v5p")])
@pytest.mark.parametrize(
    ("count", "m", "n"),
    [(2, 256, 256), (3, 200, 700), (1, 64, 64), (2, 8, 300), (1, 384, 1536), (2, 300, 40)],
)
@pytest.mark.parametrize("preset", PRESETS)
def test_as_accurate_as_the_path_of_xla(preset, count, m, n, copies, kind):
    """Tiles on and off the diagonal, one block of columns and several; copies as early or late as they may be."""
    settings, x = PRESETS[preset], matrices(count, m, n)
    y, races = by_kernel(x, settings, kind=kind, copies=copies)
    assert not races
    plain = by_xla(x, settings)
    for own, other, one in zip(y, plain, np.asarray(x, np.float64), strict=True):
        assert oracles.polar_error(own, one) <= 1.02 * oracles.polar_error(other, one)
    # No farther from XLA's path than that is from itself where all entries are rounded otherwise.
    again = by_xla(1.3 * x, settings)
    assert np.linalg.norm(y - plain) <= 1.5 * np.linalg.norm(again - plain)


def test_one_matrix_bfloat16_and_vmap():
    x = matrices(2, 64, 200, "bfloat16")
    batch, _ = by_kernel(x, None)
    assert batch.dtype == jnp.bfloat16
    np.testing.assert_array_equal(by_kernel(x[1], None)[0], by_kernel(x[1:], None)[0][0])
    vmapped = jax.vmap(functools.partial(polar_factor, settings=named(), policy=Policy("tpu", "TPU v5 lite")))
    with interpreter():
        np.testing.assert_array_equal(jax.jit(vmapped)(x), batch)


@pytest.mark.nan
def test_zeros_scales_and_nan():
    """A zero matrix gives zeros, NaN stays in its matrix, and a power of two in front changes nothing."""
    x = matrices(1, 40, 130)[0]
    x = jnp.stack([x, 2.0**-90 * x, 2.0**90 * x, jnp.zeros_like(x), x.at[3, 4].set(jnp.nan)])
    y, _ = by_kernel(x, None)
    np.testing.assert_array_equal(y[1:3], [y[0]] * 2)
    assert (y[3] == 0).all()
    assert np.isnan(y[4]).all()
    assert np.isfinite(y[:4]).all()


@pytest.mark.parametrize(
    ("preset", "shape"), [("fast", (128, 192)), ("balanced", (96, 96)), nightly("balanced", (64, 256))]
)
def test_hostile_matrices_as_python_m_muonjax_checks_them(preset, shape, monkeypatch):
    """Low rank, constant, repeated, one-hot, extreme scales: the preset's stated errors hold."""
    of_a_tpu = functools.partial(polar_factor, policy=Policy("tpu", "TPU v5 lite"))
    monkeypatch.setattr(_device_check, "newton_schulz", of_a_tpu)
    with interpreter():
        rows = _device_check.polar_errors(preset, shape, "tpu_vmem")
    assert all(row["ok"] for row in rows), rows


@pytest.mark.nan
def test_the_race_detector_sees_a_matrix_that_is_loaded_too_early(monkeypatch):
    """That the tests above can fail: the next matrix comes while this one is still read."""
    kernel = _vmem_tpu._kernel

    def late(first, second, *arguments):
        keep = []
        kernel(
            lambda own, scratch, *shared: keep.append((own, shared)),
            lambda scratch: (first(keep[0][0], scratch, *keep[0][1]), second(scratch))[1],
            *arguments,
        )

    monkeypatch.setattr(_vmem_tpu, "_kernel", late)
    x = matrices(2, 40, 130)
    y, races = by_kernel(x, None, copies="eager")
    assert races or np.abs(y - by_xla(x, NewtonSchulz())).max() > 0.1


@pytest.mark.parametrize(
    ("platform", "kind", "settings", "shape", "message"),
    [
        ("cpu", "cpu", {"compute_dtype": "bfloat16"}, (8, 8), "needs a TPU, the arrays are on 'cpu'"),
        ("gpu", "NVIDIA H100 80GB HBM3", {}, (8, 8), "needs a TPU, the arrays are on 'gpu'"),
        ("tpu", "TPU v5 lite", {"compute_dtype": "float32"}, (8, 8), "computes in bfloat16, got float32"),
        (
            "tpu",
            "TPU v5 lite",
            {"normalization": "aol"},
            (8, 8),
            "needs normalization=\"schatten\", got 'aol'",
        ),
        ("tpu", "TPU v9", {}, (8, 8), "knows TPU v5 lite, .* not 'TPU v9'"),
        ("tpu", "TPU v5p", {}, (2048, 4096), "MiB of VMEM for a matrix of 2048 x 4096, 'TPU v5p' has 64"),
    ],
)
def test_what_it_can_t_run_is_refused_with_the_reason(platform, kind, settings, shape, message):
    f = functools.partial(polar_factor, settings=named(**settings), policy=Policy(platform, kind))
    with pytest.raises(NotImplementedError, match=f"implementation='tpu_vmem'.*{message}"):
        jax.eval_shape(f, jax.ShapeDtypeStruct(shape, jnp.float32))


def test_steps_without_a_linear_term_are_refused():
    f = functools.partial(polar_factor, policy=Policy("tpu", "TPU v5"))
    with pytest.raises(ValueError, match="each needs a linear term"):
        jax.eval_shape(
            functools.partial(f, settings=named(coefficients=((0.0, 1.0, 1.0),))), jnp.ones((8, 8))
        )


@needs_libtpu
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("chip", "shape", "settings"),
    [
        ("v5e", (2, 300, 700), {}),
        ("v5p", (2, 64, 256), {}),
        ("v6e", (3, 128, 128), {"coefficients": polar_express(5), "deflation": 0}),
        nightly("v5e", (2, 1024, 4096), {}),
        nightly("v5p", (2, 768, 3072), {}),
        nightly("v6e", (2, 1024, 4096), {}),
    ],
)
def test_it_compiles_for_a_tpu(chip, shape, settings):
    """VMEM that suffices, layouts that exist, and one launch."""
    chip = ahead_of_time.CHIPS[chip]
    f = functools.partial(polar_factor, settings=named(**settings), policy=Policy("tpu", chip.kind))
    text = ahead_of_time.compile_for(chip, f, jax.ShapeDtypeStruct(shape, jnp.float32)).text
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 1


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_device_computes_its_own_matrices(axis_type, monkeypatch):
    """Under `jit` alone, with the batch sharded; compiled with a stand-in for the kernel."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    x = jax.device_put(matrices(8, 40, 200), NamedSharding(mesh, PartitionSpec("data")))
    shapes = []

    def launch(kernel, out_shape, **_):
        shapes.append(out_shape.shape)
        return lambda x, *constants: 2 * x

    monkeypatch.setattr(_vmem_tpu.pl, "pallas_call", launch)
    run = jax.jit(functools.partial(polar_factor, settings=named(), policy=Policy("tpu", "TPU v5")))
    assert not re.search("all-|collective-", run.lower(x).compile().as_text())
    assert shapes[-1] == (2, 128, 256)
    np.testing.assert_array_equal(run(x), 2 * np.asarray(x))
