"""Layouts say of every entry of an array which entry of the origin it is, as NumPy's own positions do."""

import itertools
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import lax

from muonjax._inspect.layout import HOLE, UNORDERED, merged, sums, whole
from muonjax._inspect.moves import moved_by

ORIGINS = [(12,), (4, 6), (2, 6, 4)]


def check(layout, positions, origin):
    """No run contradicts where an entry came from."""
    there = positions >= 0
    runs = [
        (run.axis, np.broadcast_to(run.positions, positions.shape))
        for run in layout.runs
    ]
    assert not any((at[there] == HOLE).any() for _, at in runs)
    for axis, at in enumerate(np.unravel_index(np.maximum(positions, 0), origin)):
        start = sum((x for k, x in runs if k == axis), np.zeros(positions.shape, int))
        sets = [run for run in (*layout.taken, *layout.loops) if run.axis == axis]
        assert np.isin((at - start)[there], sums(sets)).all()


def check_all_is_known(layout, positions, origin):
    """The runs together give the position, and say which entries came from elsewhere."""
    check(layout, positions, origin)
    holes = (
        np.broadcast_to(run.positions == HOLE, positions.shape) for run in layout.runs
    )
    np.testing.assert_array_equal(
        sum(holes, np.zeros(positions.shape, bool)), positions < 0
    )
    assert UNORDERED not in layout.loops
    assert not layout.taken
    assert len({run.axis for run in layout.runs}) == len(layout.runs)


def factors(rng, n):
    """n as a product of factors, in a random order."""
    out = []
    while n > 1:
        out.append(rng.choice([k for k in range(2, n + 1) if n % k == 0]))
        n //= out[-1]
    return out


def moved(layout, positions, operation, result):
    """What an operation of JAX's does to a layout; `result` are the positions after NumPy's."""
    for eqn in jax.make_jaxpr(operation)(
        positions
    ).eqns:  # none if it leaves all as it is
        node, new = (
            SimpleNamespace(name=eqn.primitive.name, params=eqn.params),
            eqn.outvars[0].aval.shape,
        )
        layout = layout.moved(new, lambda x: moved_by(node, x, positions.shape, new))  # noqa: B023
    return layout, result


def step(rng, layout, positions):
    """One random operation on both; None where nothing is left of the origin."""
    shape = positions.shape
    axis = rng.randrange(len(shape)) if shape else 0
    kind = rng.choice(
        ["transpose", "split", "join", "cut", "place", "repeat", "flip", "visit"]
    )
    if kind == "transpose":
        order = rng.sample(range(len(shape)), len(shape))
        return moved(
            layout,
            positions,
            lambda x: lax.transpose(x, order),
            positions.transpose(order),
        )
    if kind == "split" and shape and shape[axis] > 1:
        new = (*shape[:axis], *factors(rng, shape[axis]), 1, *shape[axis + 1 :])
        return moved(
            layout, positions, lambda x: lax.reshape(x, new), positions.reshape(new)
        )
    if kind == "join" and len(shape) > 1:
        new = (*shape[:-2], shape[-2] * shape[-1])
        return moved(
            layout, positions, lambda x: lax.reshape(x, new), positions.reshape(new)
        )
    if kind == "cut" and shape:
        start = rng.randrange(shape[axis])
        part = (start, rng.randint(start + 1, shape[axis]), rng.randint(1, 3))
        cut = positions[(slice(None),) * axis + (slice(*part),)]
        return moved(layout, positions, lambda x: lax.slice_in_dim(x, *part, axis), cut)
    if kind == "place" and shape:
        low, high = rng.randint(0, 3), rng.randint(0, 3)
        around = [(low, high) if i == axis else (0, 0) for i in range(len(shape))]
        wider = np.pad(positions, around, constant_values=-1)
        return layout.place(axis, low, wider.shape[axis]), wider
    if kind == "repeat":
        new, axes = (
            (*shape[:axis], 3, *shape[axis:]),
            [*range(axis), *range(axis + 1, len(shape) + 1)],
        )
        every = np.broadcast_to(np.expand_dims(positions, axis), new)
        return moved(
            layout, positions, lambda x: lax.broadcast_in_dim(x, new, axes), every
        )
    if kind == "flip" and shape:
        return moved(
            layout, positions, lambda x: lax.rev(x, [axis]), np.flip(positions, axis)
        )
    if kind == "visit" and shape:
        kept = tuple(k for k in range(len(shape)) if k != axis)
        one = layout.visit([axis]).pick(kept, tuple(shape[k] for k in kept))
        return one, positions.take(rng.randrange(shape[axis]), axis)
    return layout, positions


@pytest.mark.parametrize("origin", ORIGINS, ids=str)
def test_random_operations(origin):
    """Reshapes, slices and concatenations, also such that no axis stays whole."""
    for seed in range(150):
        rng, visited = random.Random(seed), False
        layout, positions = whole(origin), np.arange(np.prod(origin)).reshape(origin)
        for _ in range(5):
            layout, positions = step(rng, layout, positions)
            if (positions < 0).all():
                assert layout is None or layout.loops
                break
            visited = visited or bool(layout.loops)
            (check if visited else check_all_is_known)(layout, positions, origin)


def part_of(layout, axis, edge):
    shape = tuple(
        edge[1] - edge[0] if k == axis else n for k, n in enumerate(layout.shape)
    )
    return layout.moved(
        shape, lambda x: x.take(range(*edge), axis) if x.shape[axis] > 1 else x
    )


def together(layouts, axis):
    sizes = [layout.shape[axis] for layout in layouts]
    starts = itertools.accumulate(sizes, initial=0)
    return merged(
        tuple(
            x.place(axis, start, sum(sizes))
            for x, start in zip(layouts, starts, strict=False)
        )
    )


@pytest.mark.parametrize("origin", ORIGINS, ids=str)
def test_parts_that_are_put_together(origin):
    """In their order they are the whole again, in another one all is known; added up, nothing wrong is said of them."""
    for seed in range(50):
        rng, positions = random.Random(seed), np.arange(np.prod(origin)).reshape(origin)
        axis = rng.randrange(len(origin))
        n = origin[axis]
        edges = [0, *sorted(rng.sample(range(1, n), rng.randint(1, min(3, n - 1)))), n]
        cuts = [
            (slice(None),) * axis + (slice(*edge),)
            for edge in itertools.pairwise(edges)
        ]
        parts = [positions[cut] for cut in cuts]
        layouts = [
            part_of(whole(origin), axis, edge) for edge in itertools.pairwise(edges)
        ]
        if len({part.shape for part in parts}) == 1:
            total = merged(tuple(layouts))
            for part in parts:
                check(total, part, origin)

        several = all(
            part.shape[axis] > 1 for part in parts
        )  # a single entry counts as an index
        assert together(layouts, axis) == whole(origin) or not several
        order = rng.sample(range(len(parts)), len(parts))
        every = np.concatenate([parts[i] for i in order], axis)
        (check_all_is_known if several else check)(
            together([layouts[i] for i in order], axis), every, origin
        )


def test_what_differs_between_devices_is_not_followed():
    assert UNORDERED in whole((8, 6)).resize((4, 6)).loops
    assert whole((1, 6)).pick((0, 1), (8, 6)).resize((4, 6)).loops == ()


def test_what_is_added_up_is_a_part():
    """Features of queries, of an axis that has heads, queries and keys, and features."""
    layout = (
        whole((12,))
        .moved((2, 2, 3), lambda x: x.reshape(2, 2, 3))
        .moved((2, 3), lambda x: x[:, 0])
    )
    assert [(axis, *map(bool, mask)) for axis, mask in layout.add_up([1]).region] == [
        (0, *[1] * 3, *[0] * 3)
    ]
    assert layout.add_up([1]).region == layout.region


def test_what_is_not_followed_is_said():
    def unmoved(x):
        return moved_by(SimpleNamespace(name="sort", params={}), x, (4, 6), (4, 6))

    layout = whole((4, 6)).moved((4, 6), unmoved)
    assert not layout.runs
    assert UNORDERED in layout.loops
