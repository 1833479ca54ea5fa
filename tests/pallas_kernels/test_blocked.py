import inspect

import jax
import jax.numpy as jnp
import pytest

from benchmarks.common import hlo_counts
from pallas_kernels import _blocked, symmetric_product
from tests.pallas_kernels.symmetric_product_suite import SymmetricProductSuite


class TestBlocked(SymmetricProductSuite):
    """With blocks of 4 rows, so that small matrices have several."""

    implementation = "blocked"

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch):
        monkeypatch.setitem(inspect.unwrap(_blocked.symmetric_product).__kwdefaults__, "smallest", 4)


def _flops(implementation):
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled = jax.jit(lambda x: symmetric_product(x, implementation=implementation)).lower(x).compile()
    return hlo_counts.count(compiled).flops


def test_saves_the_multiply_adds_it_promises():
    assert _flops("blocked") == 5 / 8 * _flops("reference")  # four rows of blocks
