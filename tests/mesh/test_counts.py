"""The counters of flops and bytes, on programs that can be counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import hlo_counts
from tests.mesh.layouts import make_mesh
from tests.tools.products import flops_of

X = jax.ShapeDtypeStruct((8, 16), "float32")
PRODUCT = 2 * 8 * 8 * 16  # x @ x.T


def product(x):
    return x @ x.T


def looped(x):
    return jax.lax.fori_loop(0, 5, lambda _, y: y + product(x), jnp.zeros((8, 8)))


def branched(x):
    return jax.lax.cond(x[0, 0] > 0, product, lambda x: x[:, :8], x)


@pytest.mark.parametrize(
    ("f", "flops"), [(product, PRODUCT), (looped, 5 * PRODUCT), (branched, PRODUCT)]
)
def test_flops_of_loops_and_branches(f, flops):
    assert flops_of(f, X) == flops
    compiled = jax.jit(f).lower(X).compile()
    # XLA may take an invariant product out of its loop.
    assert hlo_counts.count(compiled, devices=1).flops in (flops, PRODUCT)


@pytest.mark.parametrize(
    ("kind", "f", "sent"),
    [
        (
            "all-to-all",
            lambda x: jax.lax.all_to_all(x, ("a", "b"), 0, 0),
            64 * 4 * 7 / 8,
        ),
        (
            "all-to-all",
            lambda x: jax.lax.all_to_all(x.reshape(4, 16), "a", 0, 0),
            64 * 4 * 3 / 4,
        ),
        ("all-gather", lambda x: jax.lax.all_gather(x, "b"), 64 * 4 * 1),
        ("all-reduce", lambda x: jax.lax.psum(x, "a"), 64 * 4 * 2 * 3 / 4),
        (
            "reduce-scatter",
            lambda x: jax.lax.psum_scatter(x, ("a", "b")),
            64 * 4 * 7 / 8,
        ),
    ],
)
def test_bytes_of_collectives(kind, f, sent):
    mesh = make_mesh(a=4, b=2)
    x = jax.ShapeDtypeStruct(
        (64, 8), "float32", sharding=NamedSharding(mesh, P(("a", "b")))
    )
    run = jax.shard_map(
        f, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False
    )
    counts = hlo_counts.count(jax.jit(run).lower(x).compile(), devices=8)
    assert counts.collectives == {kind: 1}
    assert counts.sent == {kind: sent}


def test_a_loop_of_unknown_length_is_not_guessed():
    def f(x, n):
        return jax.lax.fori_loop(0, n, lambda _, y: y @ x.T @ x, x)

    compiled = jax.jit(f).lower(X, jax.ShapeDtypeStruct((), "int32")).compile()
    with pytest.raises(
        ValueError, match=r"length of the loop .* is not known; give unknown_trips"
    ):
        hlo_counts.count(compiled, devices=1)
    assert (
        hlo_counts.count(compiled, devices=1, unknown_trips=3).flops == 3 * 2 * PRODUCT
    )
