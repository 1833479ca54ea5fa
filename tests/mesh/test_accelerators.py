"""What the compilers for TPUs and GPUs make of the exchange, ahead of time on a CPU.

`pip install -e ".[tpu]"` for the TPU, `".[cuda13]"` on Python 3.12 for the GPU.
"""

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import muonjax
from benchmarks.common import ahead_of_time, hlo_counts
from benchmarks.optimizer import sharding

QUICK = muonjax.NewtonSchulz(num_steps=2, deflation=0)  # compiles faster; the exchange is the same
OPTIONS = dict(ahead_of_time.CHIPS["H100"].options)


def devices(platform):
    """Eight of them, none of which is here."""
    if reason := ahead_of_time.missing(platform):
        pytest.skip(reason)
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return ahead_of_time.devices(ahead_of_time.CHIPS["H100"], 8)


def mesh_of(platform, case):
    sizes, names = tuple(case.mesh_shape.values()), tuple(case.mesh_shape)
    return Mesh(np.array(devices(platform)).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def compiled(platform, case):
    """`orthogonalize` on eight devices of the platform."""
    mesh = mesh_of(platform, case)
    tx = muonjax.orthogonalize(
        dimension_numbers=sharding.NUMBERS,
        newton_schulz=QUICK,
        distribution=muonjax.Distribution(mesh, case.specs),
    )
    params = case.params(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    update = jax.jit(lambda x: tx.update(x, tx.init(x))[0], out_shardings=shardings)
    return update.lower(params).compile(compiler_options=OPTIONS if platform == "gpu" else None)


@pytest.mark.nightly
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_accelerators_send_half_precision_by_default(platform):
    program = compiled(platform, sharding.CASES["fsdp"])
    counts = hlo_counts.count(program, devices=8, unknown_trips=1)
    assert counts.collectives == {"all-to-all": 2}
    assert counts.mebibytes == pytest.approx(10.5, rel=0.01)  # 21 in float32


@pytest.mark.nightly
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_plan_is_what_the_compiler_makes_of_it(platform):
    case = sharding.CASES["experts"]
    counts = hlo_counts.count(compiled(platform, case), devices=8, unknown_trips=1)
    distribution = muonjax.Distribution(mesh_of(platform, case), case.specs)
    plan = muonjax.plan(
        case.params(None), distribution, dimension_numbers=sharding.NUMBERS, newton_schulz=QUICK
    )
    assert counts.total_collectives == plan.cost.collectives
    assert counts.mebibytes * 2**20 == pytest.approx(plan.cost.sent, rel=0.01)
