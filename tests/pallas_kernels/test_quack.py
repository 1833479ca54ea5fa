"""QuACK's kernel: what it refuses, and what is done around it. It runs on a GPU alone."""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import ahead_of_time
from pallas_kernels import _quack, symmetric_product
from tests.pallas_kernels.symmetric_product_suite import SymmetricProductSuite, assert_symmetric, draw

ON_GPU = jax.default_backend() == "gpu"


def pretend(kind, platform="gpu"):
    device = jax.sharding.AbstractDevice(device_kind=kind, platform=platform, num_cores=132)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.skipif(not ON_GPU, reason="QuACK has no interpreter")
class TestQuack(SymmetricProductSuite):
    implementation = "quack"
    shapes = ((1, 1), (1, 7), (31, 13), (64, 64), (130, 67), (200, 200), (3, 16, 48), (2, 1, 137, 65))
    dtypes = (jnp.bfloat16, jnp.float16)
    every_dtype = False
    derivative_dtype = jnp.bfloat16

    def test_huge_and_tiny_alpha(self):
        """Its product is rounded before alpha multiplies it."""


@pytest.mark.parametrize(("kind", "platform", "dtype", "message"), [
    ("NVIDIA A100-SXM4-80GB", "gpu", jnp.bfloat16, "compute capability 9.0 or 10.x, the device is 'NVIDIA A100"),
    ("TPU v5 lite", "tpu", jnp.bfloat16, "the device is 'TPU v5 lite'"),
    ("H100", "cpu", jnp.bfloat16, "the device is 'H100'"),
    ("NVIDIA H100 80GB HBM3", "gpu", jnp.float32, "bfloat16 and float16, got float32"),
])  # fmt: skip
def test_unsuitable_devices_and_dtypes_are_named(kind, platform, dtype, message):
    with pretend(kind, platform), pytest.raises(NotImplementedError, match=message):
        symmetric_product(jnp.ones((4, 3), dtype), implementation="quack")


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA B200"])
def test_missing_packages_are_named(kind, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cutlass", None)
    needs = (
        re.escape('symmetric_product(implementation="quack")'.replace('"', "'"))
        + r" needs .*muonjax\[quack\]"
    )
    with pretend(kind), pytest.raises(NotImplementedError, match=needs):
        symmetric_product(jnp.ones((4, 3), jnp.bfloat16), implementation="quack")


def test_padding_scales_and_c(monkeypatch):
    """Around a product that stands in for the kernel: multiples of 8, both halves of a diagonal tile as computed."""
    given = []

    def product(capability, cores, x, y):
        given.append((capability, cores, x.shape, y.shape))
        return jnp.einsum("bik,bjk->bij", x, y, preferred_element_type=jnp.float32).astype(x.dtype)

    monkeypatch.setattr(_quack, "_product", product)
    x, y, c = (draw(shape, jnp.bfloat16, i) for i, shape in enumerate([(2, 13, 20)] * 2 + [(2, 13, 13)]))
    scale = jnp.asarray([[0.7, -1.3], [2.0, 0.5]])
    out = _quack._launched(9, 132, x, y, c, scale)
    assert given == [(9, 132, (2, 16, 24), (2, 16, 24))]
    assert_symmetric(out)
    exact = [np.asarray(a, np.float64) for a in (x, y, c)]
    alpha, beta = (np.asarray(scale[:, i], np.float64)[:, None, None] for i in (0, 1))
    want = np.tril(alpha * exact[0] @ exact[1].swapaxes(-1, -2) + beta * exact[2])
    np.testing.assert_allclose(np.tril(np.asarray(out, np.float64)), want, rtol=0.02, atol=0.1)
    plain = _quack._launched(9, 132, x, None, None, jnp.asarray([[1.0, 0.0]] * 2))
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(product(9, 132, x, x)))


COMPILE = """
import dataclasses, sys
import jax, jax.numpy as jnp
from benchmarks.common.ahead_of_time import CHIPS, compile_for
from pallas_kernels import symmetric_product

chip = dataclasses.replace(CHIPS["H100"], kind=sys.argv[1], cores=int(sys.argv[2]))
for dtype, shapes in ((jnp.bfloat16, [(1024, 4096)]), (jnp.float16, [(2, 100, 300)] * 2 + [(2, 100, 100)])):
    x = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    f = lambda x, y=None, c=None: symmetric_product(x, y=y, c=c, alpha=2.0, beta=0.5 if c is not None else 0.0,
                                                    implementation="quack")
    assert compile_for(chip, f, *x).text.count("CuteDSLRT") == 1
print("compiled")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "cores", "architecture"),
    [("NVIDIA H100 80GB HBM3", 132, "sm_90a"), ("NVIDIA B200", 148, "sm_100a")],
)
def test_it_compiles_without_a_gpu(kind, cores, architecture):
    """CuTe compiles for the architecture in the environment, and XLA embeds the kernel. Nothing runs."""
    if not importlib.util.find_spec("quack"):
        pytest.skip('the packages of pip install "muonjax[quack]" are missing')
    if reason := ahead_of_time.missing("gpu"):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, kind, str(cores)],
        env={**os.environ, "CUTE_DSL_ARCH": architecture},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "compiled" in done.stdout, done.stderr[-2000:]
