"""Columns of a product that are moved at random: those that are used together are never cut apart."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from tests.tools import tiers

D = 6
B = 2
T = 5
SHAPES = [(12,), (36,), (3, 8), (2, 12), (2, 3, 4), (2, 3, 8)]
FUNCTIONS = [jnp.tanh, jax.nn.relu, jax.nn.silu]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def factors(rng, n):
    """n as a product of factors, in a random order."""
    out = []
    while n > 1:
        out.append(rng.choice([k for k in range(2, n + 1) if n % k == 0]))
        n //= out[-1]
    return out or [1]


def moved(rng, y, first, count):
    """After so many moves of entries along the axes from `first` on."""
    for _ in range(count):
        axis = rng.randrange(first, y.ndim)
        n = y.shape
        kind = rng.choice(["split", "join", "transpose", "flip", "roll", "swap", "pad"])
        if kind == "split":
            y = y.reshape(*n[:axis], *factors(rng, n[axis]), *n[axis + 1 :])
        elif kind == "join" and axis + 1 < y.ndim:
            y = y.reshape(*n[:axis], n[axis] * n[axis + 1], *n[axis + 2 :])
        elif kind == "transpose":
            y = y.transpose(
                *range(first), *rng.sample(range(first, y.ndim), y.ndim - first)
            )
        elif kind == "flip":
            y = jnp.flip(y, axis)
        elif kind == "roll":
            y = jnp.roll(y, 1, axis)
        elif kind == "swap" and n[axis] % 2 == 0:
            y = jnp.concatenate(jnp.split(y, 2, axis)[::-1], axis)
        elif kind == "pad":
            y = jnp.pad(y, [(1, 1) if k == axis else (0, 0) for k in range(y.ndim)])
            y = jax.lax.slice_in_dim(y, 1, n[axis] + 1, axis=axis)
    return y


def parts_of(seed, w, x):
    """Two or three parts of a product, or queries, keys and values."""
    rng = random.Random(seed)
    w = moved(rng, w, 1, rng.randint(0, 2)).reshape(D, -1)
    y = moved(rng, x @ w, 2, rng.randint(0, 3))
    axis = rng.randrange(2, y.ndim)
    edges = sorted(
        rng.sample(range(1, y.shape[axis]), min(rng.randint(1, 2), y.shape[axis] - 1))
    )
    if y.shape[axis] % 3 == 0 and rng.random() < 0.5:
        edges = [y.shape[axis] // 3, 2 * y.shape[axis] // 3]
    return [part.reshape(B, T, -1) for part in jnp.split(y, edges, axis)]


def loss(seed, p, x):
    parts = parts_of(seed, p["w"], x)
    if len(parts) == 3 and len({part.shape for part in parts}) == 1 and seed % 2:
        q, k, v = (part[:, :, None] for part in parts)
        y = jax.nn.dot_product_attention(q, k, v)[:, :, 0]
        return jnp.mean((y @ p["o"][: y.shape[-1]] @ p["out"]) ** 2)
    each = (
        f(part) @ p["o"][: part.shape[-1]]
        for f, part in zip(FUNCTIONS, parts, strict=False)
    )
    return jnp.mean((jnp.tanh(sum(each)) @ p["out"]) ** 2)


def matrix_of(numbers, shape):
    """For each column which matrix it is in."""
    output = (
        numbers.output_axis
        if isinstance(numbers.output_axis, tuple)
        else (numbers.output_axis,)
    )
    index = np.indices(shape)
    found = [index[axis - 1] for axis in range(1, len(shape) + 1) if axis not in output]
    if isinstance(numbers, muonjax.FusedDimensionNumbers):
        period = shape[numbers.axis - 1] // numbers.repeats
        parts = numbers.parts
        sizes = [period // parts] * parts if isinstance(parts, int) else parts
        found.append(
            np.repeat(np.arange(len(sizes)), sizes)[index[numbers.axis - 1] % period]
        )
    return list(zip(*(x.reshape(-1).tolist() for x in found), strict=True)) or [
        ()
    ] * int(np.prod(shape))


def check(seed):
    shape = random.Random(seed).choice(SHAPES)
    count = int(np.prod(shape))
    p = {"w": jnp.ones((D, *shape)), "o": jnp.ones((count, D)), "out": jnp.ones((D, 1))}
    decision = muonjax.inspect(
        lambda p, x: loss(seed, p, x), p, jnp.ones((B, T, D))
    ).decision("w")
    if "concatenate" in decision.why:  # as in a roll of the kernel
        return False
    assert decision.numbers is not None, decision.why
    numbers = 1.0 + jnp.arange(count).reshape(shape)  # each column has its own
    one = jnp.zeros((B, T, D)).at[..., 0].set(1.0)
    parts = [
        set(np.unique(part).tolist())
        for part in parts_of(seed, jnp.broadcast_to(numbers, (D, *shape)), one)
    ]
    uses = [
        frozenset(i for i, part in enumerate(parts) if 1.0 + k in part)
        for k in range(count)
    ]
    matrices = matrix_of(decision.numbers, shape)
    pairs = set(zip(matrices, uses, strict=True))
    assert len(pairs) == len(set(uses)), (seed, decision)
    return len(pairs) == len(set(matrices)) > 1


@pytest.mark.parametrize("start", range(0, 600, 20))
@tiers.quick("0")
def test_columns_that_are_used_together_stay_together(start):
    exact = sum(map(check, range(start, start + 20)))
    assert exact > 2  # the parts of all others are not along one axis, or are one
