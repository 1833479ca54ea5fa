"""What the compilers for TPUs and GPUs make of the exchange and of state in host memory, ahead of time on a CPU.

`pip install -e ".[tpu]"` for the TPU, `".[cuda13]"` on Python 3.12 for the GPU.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.common import ahead_of_time, hlo_counts
from benchmarks.optimizer import sharding, state_memory
from tests.mesh.layouts import assigned, first_update, sent

QUICK = functools.partial(
    muonjax.NewtonSchulz, coefficients=muonjax.polar_express(2), deflation=0
)
OPTIONS = dict(ahead_of_time.CHIPS["H100"].options)


def devices(platform):
    """Eight of them, none of which is here."""
    if reason := ahead_of_time.missing(platform):
        pytest.skip(reason)
    if platform == "tpu":
        return topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:2x4"
        ).devices
    return ahead_of_time.devices(ahead_of_time.CHIPS["H100"], 8)


def compiled(platform, case):
    """`orthogonalize` on eight devices of the platform, and its program."""
    sizes = tuple(case.mesh_shape.values())
    mesh = Mesh(np.array(devices(platform)).reshape(sizes), tuple(case.mesh_shape))
    tx = muonjax.orthogonalize(
        dimension_numbers=sharding.NUMBERS,
        newton_schulz=QUICK(),
        distribution=muonjax.Distribution(mesh, case.specs),
    )
    params = case.params(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    update = jax.jit(first_update(tx), out_shardings=shardings)
    options = OPTIONS if platform == "gpu" else None
    return tx, update.lower(params).compile(compiler_options=options)


@pytest.mark.nightly
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(
    ("name", "collectives"),
    [("fsdp", 2), ("fsdp_tp", 2), ("hsdp", 3), ("replicated", 1), ("experts", 2)],
)
def test_the_compiler_sends_what_owners_are_assigned_by(platform, name, collectives):
    case = sharding.CASES[name]
    tx, program = compiled(platform, case)
    counts = hlo_counts.count(program, devices=8, unknown_trips=1)
    expected = sent(assigned(tx, case.params(None)))
    assert counts.total_collectives == collectives
    assert counts.mebibytes * 2**20 == pytest.approx(expected, rel=0.01)


@pytest.mark.thorough
def test_owners_on_a_mesh_of_gpus_run_the_kernel_and_xla_cuts_no_matrix_of_it():
    mesh = Mesh(np.array(devices("gpu")), ("fsdp",))
    specs = {name: P("fsdp", None) for name in "abcdefgh"}
    params = {
        name: jax.ShapeDtypeStruct(
            (4096, 4096), jnp.float32, sharding=NamedSharding(mesh, spec)
        )
        for name, spec in specs.items()
    }
    for distribution in (
        muonjax.Distribution(mesh, specs),
        None,
    ):  # without: XLA cuts the products
        tx = muonjax.orthogonalize(newton_schulz=QUICK(), distribution=distribution)
        update = first_update(tx)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            text = update.lower(params).compile(compiler_options=OPTIONS).as_text()
        assert ("mosaic_gpu" in text) == (distribution is not None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        state_memory.Case("H100", "muon", 8, 4096),
        state_memory.Case("H100", "trace, int8", 8, 4096),
        state_memory.Case("v5e", "trace", 6, 4096),
    ],
    ids=lambda c: f"{c.chip} {c.optimizer}",
)
def test_state_in_host_memory_passes_through_the_device_leaf_by_leaf(case):
    if reason := ahead_of_time.missing(ahead_of_time.CHIPS[case.chip].platform):
        pytest.skip(reason)
    row = state_memory.count(case)
    matrix = 4 * case.size**2 / 2**20
    int8 = "int8" in case.optimizer
    assert row["state_on_device"] <= 64  # counters
    assert row["state_on_host_mib"] == case.count * matrix * (33 / 128 if int8 else 1)
    # On a GPU only the copies back show: its description can't say that arguments are in host memory.
    assert row["asynchronous"] == case.count * (1 if case.chip == "H100" else 2) * (
        2 if int8 else 1
    )
    assert row["synchronous"] == 0
    assert row["added_mib"] <= 2.01 * matrix * (33 / 128 if int8 else 1)
