import jax
import jax.numpy as jnp
import pytest

from benchmarks.common import hlo_counts
from pallas_kernels import _xla_product, symmetric_product
from tests.pallas_kernels.symmetric_product_suite import SymmetricProductSuite


class TestBlocked(SymmetricProductSuite):
    """With blocks of 4 rows, so that small matrices have several."""

    implementation = "blocked"

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch):
        monkeypatch.setattr(_xla_product, "_SMALLEST_BLOCK", 4)


def _flops(implementation, m=1024):
    x = jax.ShapeDtypeStruct((m, 16), jnp.float32)
    compiled = (
        jax.jit(lambda x: symmetric_product(x, implementation=implementation))
        .lower(x)
        .compile()
    )
    return hlo_counts.count(compiled).flops


def test_saves_the_multiply_adds_it_promises():
    """(r + 1) / (2 r) with r rows of blocks: four at most, each of 128 rows at least."""
    for m, rows in ((255, 1), (256, 2), (384, 3), (512, 4), (1024, 4)):
        assert _flops("blocked", m) == (rows + 1) / (2 * rows) * _flops("reference", m)
