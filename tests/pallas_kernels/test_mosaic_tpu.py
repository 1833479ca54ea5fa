"""The TPU kernel: on a TPU where there is one, else in Pallas's TPU interpreter; and compiled for TPUs."""

import contextlib
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from benchmarks.common import ahead_of_time
from pallas_kernels import _kernel_batch, _mosaic_tpu, symmetric_product
from tests.pallas_kernels.symmetric_product_suite import (
    SymmetricProductSuite,
    assert_as_accurate_as_xla,
    assert_symmetric,
    draw,
)
from tests.tools.tiers import nightly, thorough

ON_TPU = jax.default_backend() == "tpu"


def pretend(kind="TPU v5 lite", platform="tpu"):
    device = jax.sharding.AbstractDevice(device_kind=kind, platform=platform, num_cores=1)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@contextlib.contextmanager
def interpreter(**settings):
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**settings)):
        yield


class TestTpu(SymmetricProductSuite):
    implementation = "tpu"
    shapes = ((1, 1), (1, 7), (31, 13), (130, 67), (300, 200), (3, 16, 48), (2, 1, 137, 65))
    dtypes = (jnp.bfloat16,)
    derivative_dtype = jnp.bfloat16

    @contextlib.contextmanager
    def context(self):
        with contextlib.ExitStack() as stack:
            if not ON_TPU:
                stack.enter_context(pretend())
                stack.enter_context(interpreter())
                # The interpreter's callbacks can't be in a partitioned call.
                stack.enter_context(
                    mock.patch.object(_kernel_batch, "by_batch", lambda function, _: function)
                )
            yield

    # The rules are the public function's: quick with "reference" and "blocked".
    @pytest.mark.thorough
    def test_forward_derivative(self):
        super().test_forward_derivative()

    @pytest.mark.thorough
    def test_reverse_derivative(self):
        super().test_reverse_derivative()


def in_parts(x, y=None, c=None, scale=((1.0, 0.0),), *, cores, copies="on_wait"):
    """The result by tiles of 128 rows and slices of 128 columns, and whether the interpreter saw a race."""
    # JAX 0.12 raises where a race happens, if it is not told to note it only.
    noted = {"on_race": "warn"} if hasattr(pltpu.InterpretParams, "on_race") else {}
    run = functools.partial(_mosaic_tpu.launch, cores=cores, tile=128, depth=128)
    with interpreter(detect_races=True, dma_execution_mode=copies, num_cores_or_threads=cores, **noted):
        out = jax.jit(run)(x, y, c, jnp.asarray(scale)).block_until_ready()
        return out, interpret_pallas_call.races.races_found


@pytest.mark.skipif(ON_TPU, reason="only the interpreter detects races")
@pytest.mark.parametrize(("batch", "cores", "addend", "copies"), [
    (1, 1, False, "on_wait"),
    (1, 2, True, "eager"),
    thorough(2, 1, True, "eager"),
    thorough(3, 2, False, "on_wait"),
])  # fmt: skip
def test_no_races(batch, cores, addend, copies):
    """Tiles on and off the diagonal, two slices of k; each copy is made as early or as late as it may be."""
    x, y = draw((batch, 300, 200), jnp.bfloat16, 1), draw((batch, 300, 200), jnp.bfloat16, 2)
    c = draw((batch, 300, 300), jnp.bfloat16, 3) if addend else None
    scale = np.asarray([[0.7, -1.3], [2.0, 0.5], [-1.0, 1.0]], np.float32)[:batch]
    out, races = in_parts(x, y, c, scale, cores=cores, copies=copies)
    assert not races
    assert_as_accurate_as_xla(out, x, y, c, scale[:, 0], scale[:, 1])
    assert_symmetric(out)


def test_tiles_that_two_cores_can_t_share_evenly():
    x = draw((1, 200, 128), jnp.bfloat16)  # three tiles
    out, races = in_parts(x, cores=2)
    assert not races
    assert_as_accurate_as_xla(out, x)


@pytest.mark.nan
@pytest.mark.skipif(ON_TPU, reason="only the interpreter detects races")
def test_the_race_detector_sees_two_cores_on_one_tile(monkeypatch):
    """That the tests above can fail."""
    place = _mosaic_tpu._place
    monkeypatch.setattr(_mosaic_tpu, "_place", lambda core, step, **sizes: place(core * 0, step, **sizes))
    assert in_parts(draw((1, 384, 128), jnp.bfloat16), cores=2)[1]


@pytest.mark.nan
@pytest.mark.skipif(ON_TPU, reason="only the interpreter delays copies")
def test_the_interpreter_sees_a_missing_wait(monkeypatch):
    """That the tests above can fail: a copy made as late as allowed is never made, or copies what came after."""
    copy = pltpu.make_async_copy

    class Starts:
        def __init__(self, *arguments):
            self.start = copy(*arguments).start

        def wait(self):
            pass

    monkeypatch.setattr(pltpu, "make_async_copy", Starts)
    x = draw((1, 384, 128), jnp.bfloat16)
    out, _ = in_parts(x, cores=1, copies="on_wait")
    with pytest.raises(AssertionError):
        assert_as_accurate_as_xla(out, x)


@pytest.mark.parametrize(
    ("m", "tile"), [(64, 128), (200, 256), (768, 384), (1024, 512), (2048, 512), (4096, 1024), (8192, 1024)]
)
def test_the_tile_for_a_size(m, tile):
    assert _mosaic_tpu.pick_tile(m) == tile


@pytest.mark.parametrize(("k", "depth"), [(1, 128), (768, 768), (4096, 1024), (14336, 1024), (1100, 384)])
def test_the_depth_of_a_slice_cuts_k_without_a_remainder(k, depth):
    assert _mosaic_tpu.pick_depth(k) == depth


@pytest.mark.parametrize(("kind", "platform", "dtype", "message"), [
    ("NVIDIA H100 80GB HBM3", "gpu", jnp.bfloat16, "needs a TPU, the device is 'NVIDIA H100"),
    ("cpu", "cpu", jnp.bfloat16, "needs a TPU, the device is 'cpu'"),
    ("TPU v5 lite", "tpu", jnp.float32, "takes bfloat16, got float32"),
    ("TPU v5 lite", "tpu", jnp.float16, "takes bfloat16, got float16"),
])  # fmt: skip
def test_unsuitable_devices_and_dtypes_are_named(kind, platform, dtype, message):
    with pretend(kind, platform), pytest.raises(NotImplementedError, match=message):
        symmetric_product(jnp.ones((4, 3), dtype), implementation="tpu")


def test_empty_shapes_are_named():
    with pretend(), pytest.raises(NotImplementedError, match=re.escape("empty shape (0, 3)")):
        symmetric_product(jnp.ones((0, 3), jnp.bfloat16), implementation="tpu")


CHIPS = ("v5e", "v5p", "v6e")
SHAPES = ((3, 768, 3072), (1, 4096, 4096), (2, 300, 100))


@pytest.mark.skipif(ahead_of_time.missing("tpu") is not None, reason=ahead_of_time.missing("tpu") or "")
@pytest.mark.parametrize(
    ("chip", "shape"),
    [
        *zip(CHIPS, SHAPES, strict=True),
        *(nightly(chip, shape) for i, chip in enumerate(CHIPS) for j, shape in enumerate(SHAPES) if i != j),
    ],
)
def test_it_compiles_for_a_tpu(chip, shape):
    """VMEM that suffices, layouts that exist, and one launch; with C, which takes the most memory."""

    def product(x, c):
        return symmetric_product(x, c=c, alpha=0.7, beta=0.5, implementation="tpu")

    *batch, m, _ = shape
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (shape, (*batch, m, m))]
    text = ahead_of_time.compile_for(ahead_of_time.CHIPS[chip], product, *arguments).text
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 1
