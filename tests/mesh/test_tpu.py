"""What the TPU's own compiler makes of the exchange: ahead of time, on a CPU. `pip install -e ".[tpu]"` first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

import muonjax
from benchmarks.common import hlo_counts
from benchmarks.optimizer import sharding

pytest.importorskip("libtpu")


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "mebibytes"), [(jnp.float32, 21.0), (jnp.bfloat16, 10.5)])
def test_a_v5e_sends_half_the_bytes_in_half_precision(dtype, mebibytes):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.array(devices), ("fsdp",))
    case = sharding.CASES["fsdp"]
    params = case.params(mesh)
    tx = muonjax.orthogonalize(
        dimension_numbers=sharding.NUMBERS,
        newton_schulz=muonjax.NewtonSchulz(compute_dtype=dtype),
        distribution=muonjax.Distribution(mesh, case.specs),
    )
    shardings = jax.tree.map(lambda x: x.sharding, params)
    update = jax.jit(lambda x: tx.update(x, tx.init(x))[0], out_shardings=shardings)
    counts = hlo_counts.count(update.lower(params).compile(), devices=8, unknown_trips=1)
    assert counts.collectives == {"all-to-all": 2}
    assert counts.mebibytes == pytest.approx(mebibytes, rel=0.01)
