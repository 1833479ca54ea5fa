"""Eight virtual CPU devices for every test, so that meshes are tested where there is no machine with eight."""

import jax
import pytest

from pallas_kernels import _api

# Before anything asks for a device. Not XLA_FLAGS: the examples' processes would inherit them.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def _products_are_traced_anew():
    """A test that puts something in an implementation's place neither meets nor leaves traces of the other."""
    _api._traced_once.clear_cache()
