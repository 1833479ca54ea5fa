"""Bounds for the table of `benchmarks.optimizer.sharding`: MiB, collectives and flops, from compiled HLO."""

import functools

import pytest
from jax.sharding import AxisType

from benchmarks.common import hlo_counts
from benchmarks.optimizer import sharding
from tests.tools.tiers import nightly, thorough

# name -> MiB sent per device, collectives, flops over an even share: at most.
LIMITS = {
    "fsdp": (22.1, 2, 1.01),
    "fsdp_tp": (22.1, 2, 1.01),
    "hsdp": (31.5, 3, 1.01),
    "replicated": (88.2, 1, 1.01),
    "experts": (19.0, 2, 1.01),
}


@functools.cache
def even_share():
    """The even share of the flops of 24 matrices, which is the same in every layout."""
    case = sharding.CASES["fsdp"]
    return sharding.even_share(sharding.muon(case, None), case)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "axis_type"), [
    ("fsdp_tp", AxisType.Auto),
    thorough("hsdp", AxisType.Auto),
        *(nightly(name, AxisType.Auto) for name in ("fsdp", "experts", "replicated")),
    thorough("fsdp_tp", AxisType.Explicit),
        *(nightly(name, AxisType.Explicit) for name in LIMITS if name != "fsdp_tp"),
])  # fmt: skip
def test_the_table(name, axis_type, capfd):
    case = sharding.CASES[name]
    assert case.matrices == 24
    mebibytes, collectives, redundancy = LIMITS[name]
    compiled = sharding.compile_step(sharding.muon(case, axis_type), case, axis_type)
    counts = hlo_counts.count(compiled, devices=8)
    assert counts.mebibytes <= mebibytes
    assert counts.total_collectives <= collectives
    assert counts.flops <= redundancy * even_share()
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("case", [
    nightly(sharding.fsdp(12)),
    nightly(sharding.fsdp(24)),
    sharding.CASES["hsdp"],
    nightly(sharding.CASES["replicated"]),
])  # fmt: skip
def test_memory_is_the_buffers_and_one_iteration(case):
    row = sharding.memory("", case)
    assert row["temporary_mebibytes"] <= 1.25 * row["share_and_group_mebibytes"]
