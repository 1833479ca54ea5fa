"""What is exchanged: half the bytes where the iteration computes in half precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from tests.mesh.layouts import QUICK, first_update, make_mesh, orthogonalize

HALF = dataclasses.replace(QUICK, compute_dtype=jnp.bfloat16)


def test_half_precision_is_exchanged_in_half_the_bytes():
    mesh = make_mesh(fsdp=8)
    x = jax.ShapeDtypeStruct(
        (16, 16, 64), "float32", sharding=NamedSharding(mesh, P(None, "fsdp"))
    )
    numbers = muonjax.MuonDimensionNumbers(1, 2)
    params = {"w": x}
    for settings in (HALF, dataclasses.replace(QUICK, compute_dtype=jnp.float32)):
        distribution = muonjax.Distribution(mesh, {"w": P(None, "fsdp")})
        tx = muonjax.orthogonalize(
            dimension_numbers=numbers, newton_schulz=settings, distribution=distribution
        )
        # What is handed to the compiler: on a CPU it may well widen what it is given.
        text = first_update(tx).lower(params).as_text()
        sent = [line for line in text.splitlines() if "stablehlo.all_to_all" in line]
        kind = "bf16" if settings is HALF else "f32"
        assert len(sent) == 2
        assert all(f"x{kind}>" in line.rpartition("->")[2] for line in sent)


def test_rounding_for_the_exchange_takes_results_no_further_from_the_polar_factor():
    mesh = make_mesh(fsdp=8)
    x = jax.random.normal(jax.random.key(0), (16, 64))
    here, there = (
        orthogonalize({"w": x}, None, HALF, distribution=distribution)["w"]
        for distribution in (None, muonjax.Distribution(mesh, P("fsdp")))
    )
    assert there.dtype == jnp.float32
    u, _, vh = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    distances = [
        float(np.linalg.norm(np.asarray(y, np.float64) - u @ vh)) for y in (here, there)
    ]
    assert distances[1] != distances[0]
    assert distances[1] == pytest.approx(distances[0], rel=0.05)
