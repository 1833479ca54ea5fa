"""The Hopper kernel: on a GPU where there is one, else in Pallas's GPU interpreter; and its lowering."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper_product, symmetric_product
from pallas_kernels._hopper_tiles import num_tiles
from tests.pallas_kernels.symmetric_product_suite import (
    SymmetricProductSuite,
    assert_as_accurate_as_xla,
    assert_symmetric,
    draw,
)
from tests.tools.tiers import nightly

if jax.__version_info__ < _hopper_product.NEEDS_JAX:
    pytest.skip(
        f"the Hopper kernel needs JAX 0.11 or newer (Python 3.12), this is JAX {jax.__version__}",
        allow_module_level=True,
    )

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _hopper_kernel

# An interpreter that waits for a barrier waits for ever.
pytestmark = pytest.mark.timeout(120)

ON_GPU = jax.default_backend() == "gpu"


def pretend(cores):
    """As if the device were an H100 with this many multiprocessors."""
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=cores
    )
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=device)
    )


@contextlib.contextmanager
def interpreter(*, races=False):
    """Runs kernels on the CPU. After an error its state must be reset, or the next test hangs."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    try:
        with plgpu.force_gpu_interpret_mode(
            plgpu.InterpretGPUParams(detect_races=races)
        ):
            yield
        if races:
            assert not interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


class TestHopper(SymmetricProductSuite):
    implementation = "hopper"
    shapes = (
        (1, 1),
        (1, 7),
        (31, 13),
        (64, 64),
        (130, 67),
        (200, 200),
        (3, 16, 48),
        (2, 1, 137, 65),
    )
    dtypes = (jnp.bfloat16, jnp.float16)
    every_dtype = False
    derivative_dtype = jnp.bfloat16

    @contextlib.contextmanager
    def context(self):
        with contextlib.ExitStack() as stack:
            if not ON_GPU:
                stack.enter_context(pretend(3))
                stack.enter_context(interpreter())
            yield


@pytest.mark.skipif(ON_GPU, reason="only the interpreter detects races")
@pytest.mark.parametrize(
    ("stages", "addend"), [(2, True), (3, False), nightly(5, False)]
)
def test_no_races(stages, addend, monkeypatch):
    """Several tiles for each CTA, diagonal ones and others, and more k-slices than stages."""
    monkeypatch.setattr(_hopper_kernel, "STAGES", stages)
    x = draw((2, 264, 192), jnp.float16, 1)
    y = draw((2, 264, 192), jnp.float16, 2)
    c = draw((2, 264, 320), jnp.float16, 3) if addend else None
    scale = jnp.asarray([[0.7, -1.3], [2.0, 0.5]])
    with interpreter(races=True):
        out = jax.jit(lambda *a: _hopper_kernel.launch(*a, cores=2))(x, y, c, scale)
        out = out[..., :264].block_until_ready()
    c = c if c is None else c[..., :264]
    assert_as_accurate_as_xla(
        out, x, y, c, np.asarray(scale[:, 0]), np.asarray(scale[:, 1])
    )
    assert_symmetric(out)


def test_the_race_detector_sees_a_missing_wait(monkeypatch):
    """That the test above can fail: a slot is written while its last copy still reads."""
    if ON_GPU:
        pytest.skip("only the interpreter detects races")
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(
        plgpu,
        "wait_smem_to_gmem",
        lambda n, wait_read_only=False: None if wait_read_only else wait(n),
    )
    x = draw((1, 384, 64), jnp.float16)
    # JAX 0.11 notes a race, 0.12 raises where it happens.
    races = pytest.raises(
        (AssertionError, RuntimeError), match=r"races_found|RACE DETECTED"
    )
    with races, interpreter(races=True):
        out = _hopper_kernel.launch(x, None, None, jnp.ones((1, 2)), cores=1)
        out.block_until_ready()


@pytest.mark.parametrize("t", [1, 2, 3, 8, 17, 32])
def test_the_schedule_visits_each_tile_of_the_triangle_once(t):
    step = jnp.arange(num_tiles(128 * t), dtype=jnp.int32)
    i, j = jax.vmap(lambda s: _hopper_kernel.triangle(s, t))(step)
    visited = sorted(zip(np.asarray(i).tolist(), np.asarray(j).tolist(), strict=True))
    assert visited == sorted(
        zip(*(a.tolist() for a in np.tril_indices(t)), strict=True)
    )


def _cuda(f, *shapes, dtype=jnp.bfloat16):
    """The lowering for an H100, on a machine without one, and the shapes that its kernels return."""
    with pretend(132):
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        text = (
            jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        )
    return re.findall(r"custom_call @mosaic_gpu\S*\(.*?-> tensor<(\S+)x\w+>", text)


def hopper(x, **settings):
    return symmetric_product(x, implementation="hopper", **settings)


@pytest.mark.parametrize("addend", [True, False])
def test_the_kernel_lowers(addend):
    """Catches too much shared memory, layouts that don't exist, and TMA boxes that aren't allowed."""
    c = [(1, 1024, 1024)] if addend else []

    def f(x, *c):
        return _hopper_kernel.launch(
            x, None, *(c or [None]), jnp.ones((1, 2)), cores=132
        )

    assert _cuda(f, (1, 1024, 512), *c) == ["1x1024x1024"]


@pytest.mark.parametrize(("shape", "result"), [
    ((1, 1), "1x8x64"),
    ((1000, 1000), "1x1000x1024"),
    ((257, 63), "1x264x320"),
    ((8, 2048, 2048), "8x2048x2048"),
    ((2, 3, 136, 40), "6x136x192"),
    ((4096, 16384), "1x4096x4096"),
])  # fmt: skip
def test_any_shape_lowers(shape, result):
    assert _cuda(hopper, shape) == [result]


def test_vmap_is_a_loop_of_launches():
    assert _cuda(jax.vmap(jax.vmap(hopper)), (5, 2, 3, 128, 64)) == ["3x128x128"]
    mapped = jax.vmap(lambda x, y: hopper(x, y=y, c=y @ y.mT), in_axes=(0, None))
    assert _cuda(mapped, (5, 128, 64), (128, 64)) == ["1x128x128"]


def test_derivatives_lower():
    def loss(x):
        return hopper(x, alpha=0.5).astype(jnp.float32).sum()

    # The value isn't needed for the gradient, and the derivative itself is plain XLA.
    assert _cuda(jax.grad(loss), (128, 64)) in ([], ["1x128x128"])
    assert _cuda(jax.value_and_grad(loss), (128, 64)) == ["1x128x128"]


def test_the_launch_fills_the_device():
    """As many CTAs as there are multiprocessors, or tiles where these are fewer."""
    for cores, m, ctas in ((78, 4096, 78), (132, 4096, 132), (132, 300, 6)):
        with pretend(cores):
            jaxpr = jax.make_jaxpr(hopper)(jax.ShapeDtypeStruct((m, 64), jnp.bfloat16))
        assert re.search(r"Mesh\(grid=\((\d+),\)", str(jaxpr)).group(1) == str(ctas)


@pytest.mark.parametrize(("kind", "platform", "dtype", "message"), [
    ("NVIDIA A100-SXM4-80GB", "gpu", jnp.bfloat16, "compute capability 9.0.*'NVIDIA A100"),
    ("NVIDIA B200", "gpu", jnp.bfloat16, "compute capability 9.0.*'NVIDIA B200"),
    ("TPU v5e", "tpu", jnp.bfloat16, "compute capability 9.0.*'TPU v5e"),
    ("NVIDIA H100 80GB HBM3", "gpu", jnp.float32, "bfloat16 and float16, got float32"),
])  # fmt: skip
def test_unsuitable_devices_and_dtypes_are_named(kind, platform, dtype, message):
    device = jax.sharding.AbstractDevice(
        device_kind=kind, platform=platform, num_cores=8
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(NotImplementedError, match=message),
    ):
        hopper(jnp.ones((4, 3), dtype))


def test_empty_shapes_are_named():
    with (
        pretend(132),
        pytest.raises(NotImplementedError, match=re.escape("empty shape (0, 3)")),
    ):
        hopper(jnp.ones((0, 3), jnp.bfloat16))
