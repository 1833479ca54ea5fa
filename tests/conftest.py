"""Eight virtual CPU devices, a persistent compilation cache and a check of shapes for every test."""

import functools
import gc
import os
import threading

import jax
import pytest
from hypothesis import settings
from jax._src.interpreters import mlir

from tests.tools import shapes, tiers

# Before anything asks for a device. Not XLA_FLAGS: the examples' processes would inherit them.
jax.config.update("jax_num_cpu_devices", 8)

tiers.register_profiles()


def pytest_addoption(parser):
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile with XLA's optimizations, as users do",
    )
    parser.addoption(
        "--jax-debug-nans",
        action="store_true",
        help="run tests without the marker `nan` under jax_debug_nans",
    )


def pytest_configure(config):
    use_one_core()
    shapes.install()
    if not config.getoption("hypothesis_profile", None):
        settings.load_profile(
            "quick" if "not thorough" in config.option.markexpr else "thorough"
        )
    compile_quickly(config.getoption("optimized"))
    keep_compiled_programs(config)


def use_one_core():
    """Where there is a worker for each core, each keeps to its own; else XLA's threads take a fifth more time."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number.isdecimal() and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= len(cores):
            os.sched_setaffinity(0, {cores[int(number) % len(cores)]})


def compile_quickly(optimized):
    """Most of the tests' time is compilation, and most programs are one operation outside of `jax.jit`."""
    flags = [
        "--xla_cpu_parallel_codegen_split_count=1"
    ]  # no parts for other cores: a tenth less time
    if not optimized:
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # the examples' processes
        flags.append("--xla_cpu_use_fusion_emitters=false")  # a third less
    if jax.__version_info__[:2] == (
        0,
        10,
    ):  # XLA ends a process that gives it a flag that it does not know
        os.environ["XLA_FLAGS"] = " ".join(
            [os.environ.get("XLA_FLAGS", ""), *flags]
        ).strip()
        # An MLIR context for each thread, as later versions of JAX have it, and not for each program: a seventh less.
        of_thread = functools.cache(lambda thread, new=mlir.make_ir_context: new())
        mlir.make_ir_context = lambda: of_thread(threading.get_ident())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    nans = item.config.getoption("jax_debug_nans") and not item.get_closest_marker(
        "nan"
    )
    with jax.debug_nans(nans):
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items):
    tiers.mark_others(items)


def pytest_collection_finish(session):
    gc.freeze()  # what the imports made stays; looking through it again and again takes a tenth of the time


def keep_compiled_programs(config):
    """XLA compiles a program once for all runs and all workers; JAX still traces it in every test.

    The cache is in pytest's own (`pytest --cache-clear` empties it); JAX_COMPILATION_CACHE_DIR names another one. The
    examples' processes inherit the variables.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and hasattr(config, "cache"):
        settings = {
            "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0.02,
        }
        for name, value in settings.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)


@pytest.fixture(autouse=True)
def fresh_warnings():
    """Each test gets the warnings on its trees, which a process gives once."""
    from muonjax._common.arguments import warn_once

    warn_once.cache_clear()


@pytest.fixture
def fresh_products():
    """For a test that replaces an implementation: it meets no traces of another one and leaves none of its own."""
    # Not before its functions are decorated.
    from pallas_kernels import _symmetric_product

    _symmetric_product._jitted_product.clear_cache()
    yield
    _symmetric_product._jitted_product.clear_cache()
