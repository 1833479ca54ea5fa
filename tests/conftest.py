"""Eight virtual CPU devices, a persistent compilation cache and a check of shapes for every test."""

import os

import jax
import pytest
from hypothesis import settings

from tests import shapes, tiers

shapes.install()

from pallas_kernels import _api  # noqa: E402  (after the check of shapes is installed)

# Before anything asks for a device. Not XLA_FLAGS: the examples' processes would inherit them.
jax.config.update("jax_num_cpu_devices", 8)

tiers.register_profiles()


def pytest_configure(config):
    if not config.getoption("hypothesis_profile", None):
        settings.load_profile("quick" if "not thorough" in config.option.markexpr else "thorough")
    keep_compiled_programs(config)


def keep_compiled_programs(config):
    """XLA compiles a program once for all runs and all workers; JAX still traces it in every test.

    The cache is in pytest's own (`pytest --cache-clear` empties it); JAX_COMPILATION_CACHE_DIR names another one. The
    examples' processes inherit the variables.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and hasattr(config, "cache"):
        settings = {
            "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0.1,
        }
        for name, value in settings.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)


@pytest.fixture
def fresh_products():
    """For a test that replaces an implementation: it meets no traces of another one and leaves none of its own."""
    _api._traced_once.clear_cache()
    yield
    _api._traced_once.clear_cache()
