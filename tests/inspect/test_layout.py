"""Layouts say of every entry of an array which entry of the origin it is, as NumPy's own positions do."""

import itertools
import random

import numpy as np
import pytest

from muonjax._inspect.layout import PLACED, length, merged, whole


def digits(layout, shape):
    """(run, its digit at each entry of the array), a pair of bounds where the layout knows no more, and where the
    entries are of the origin."""
    inside = np.ones(shape, bool)
    found = [(a, np.array(a.start), a.size) for a in (*layout.taken, *layout.loops)]
    for axis, atoms in enumerate(layout.axes):
        if any(a.axis == PLACED and a.stride for a in atoms):  # in another order
            found += [(a, np.array(a.start), a.size) for a in atoms]
            continue
        at = np.arange(shape[axis])
        while atoms and atoms[0].axis == PLACED:
            at, atoms = at - atoms[0].start, atoms[1:]
            outside = (at < 0) | (at >= length(atoms))
            at = np.where(outside, 0, at)
            inside &= np.expand_dims(~outside, [i for i in range(len(shape)) if i != axis])
        for a in reversed(atoms):
            at, digit = at // a.size, at % a.size
            found.append((a, np.expand_dims(a.start + digit, [i for i in range(len(shape)) if i != axis]), 1))
    return [(a, np.broadcast_to(first, shape), n) for a, first, n in found if a.axis >= 0], inside


def check(layout, positions, origin):
    """No run contradicts where an entry came from."""
    found, inside = digits(layout, positions.shape)
    of_origin = positions >= 0
    assert not (of_origin & ~inside).any()
    coordinates = np.unravel_index(np.maximum(positions, 0), origin)
    for a, first, size in found:
        digit = coordinates[a.axis] // a.stride % a.of
        assert ((first <= digit) & (digit < first + size))[of_origin].all(), (layout, a)
    return found, inside, coordinates


def check_all_is_known(layout, positions, origin):
    """The runs together give the position, and say which entries came from elsewhere."""
    found, inside, coordinates = check(layout, positions, origin)
    np.testing.assert_array_equal(inside, positions >= 0)
    for axis, at in enumerate(coordinates):
        mine = {a: first for a, first, size in found if a.axis == axis and size == 1}
        total = sum((first * a.stride for a, first in mine.items()), np.zeros(positions.shape, int))
        np.testing.assert_array_equal(total[inside], at[inside], err_msg=str(layout))


ORIGINS = [(12,), (4, 6), (2, 6, 4)]


def factors(rng, n):
    """n as a product of factors, in a random order."""
    out = []
    while n > 1:
        out.append(rng.choice([k for k in range(2, n + 1) if n % k == 0]))
        n //= out[-1]
    return out


def is_one_run(atoms):
    return len(atoms) == 1 and atoms[0].is_whole


def step(rng, layout, positions, aligned):
    """One random operation on both; None where nothing is left of the origin."""
    shape = positions.shape
    axis = rng.randrange(len(shape)) if shape else 0
    atoms = layout.axes[axis] if layout.axes else ()
    placed, here = any(a.axis == PLACED for a in sum(layout.axes, ())), any(a.axis == PLACED for a in atoms)
    kind = rng.choice(
        ["transpose", "split", "join", "cut", "place", "pick"] + ["loop", "reorder"] * (not aligned)
    )
    if kind == "transpose":
        order = rng.sample(range(len(shape)), len(shape))
        return layout.pick(order, shape), positions.transpose(order)
    if kind == "split" and shape and not placed and not (aligned and not is_one_run(atoms)):
        new = (*shape[:axis], *factors(rng, shape[axis]), *shape[axis + 1 :])
        return layout.reshape(new), positions.reshape(new)
    if kind == "join" and len(shape) > 1 and not (placed and aligned):
        new = (*shape[:-2], shape[-2] * shape[-1])
        return layout.reshape(new), positions.reshape(new)
    if kind == "cut" and shape and shape[axis] > 1 and not (aligned and here and len(atoms) > 2):
        if aligned and not here:
            inner = int(np.prod([a.size for a in atoms[1:]], dtype=int))
            start = inner * rng.randrange(shape[axis] // inner)
            stop = start + inner * rng.randint(1, (shape[axis] - start) // inner)
        else:
            start = rng.randrange(shape[axis])
            stop = rng.randint(start + 1, shape[axis])
        every = 1 if aligned or placed else rng.randint(1, 3)
        cut = layout.cut(axis, start, stop, every)
        return cut, positions[(slice(None),) * axis + (slice(start, stop, every),)]
    if kind == "place" and shape and not placed:
        low, high = rng.randint(0, 3), rng.randint(0, 3)
        around = [(low, high) if i == axis else (0, 0) for i in range(len(shape))]
        return layout.place(axis, low, low + shape[axis] + high), np.pad(
            positions, around, constant_values=-1
        )
    if kind == "reorder" and shape:
        order = rng.sample(range(shape[axis]), shape[axis])
        return layout.reorder(axis, shape[axis]), positions.take(order, axis)
    if kind == "pick":
        n = rng.randint(1, 3)
        sources = [*range(axis), None, *range(axis, len(shape))]
        new = (*shape[:axis], n, *shape[axis:])
        return layout.pick(sources, new), np.broadcast_to(np.expand_dims(positions, axis), new)
    if kind == "loop" and shape and not placed:
        return layout.loop(axis), positions.take(rng.randrange(shape[axis]), axis)
    return layout, positions


@pytest.mark.parametrize("aligned", [True, False], ids=["known", "partly known"])
@pytest.mark.parametrize("origin", ORIGINS, ids=str)
def test_random_operations(origin, aligned):
    """Reshapes, slices and concatenations, also such that no run stays whole; nothing is lost that need not be."""
    for seed in range(150):
        rng = random.Random(seed)
        layout, positions = whole(origin), np.arange(np.prod(origin)).reshape(origin)
        for _ in range(5):
            layout, positions = step(rng, layout, positions, aligned)
            assert layout is not None or (positions < 0).all()
            if (positions < 0).all():
                assert layout is None or not aligned
                break
            (check_all_is_known if aligned else check)(layout, positions, origin)


@pytest.mark.parametrize("origin", ORIGINS, ids=str)
def test_parts_that_are_put_together(origin):
    """In their order they are the whole again; in another order, or added up, nothing wrong is said of them."""
    for seed in range(50):
        rng, positions = random.Random(seed), np.arange(np.prod(origin)).reshape(origin)
        axis = rng.randrange(len(origin))
        n = origin[axis]
        edges = [0, *sorted(rng.sample(range(1, n), rng.randint(1, min(3, n - 1)))), n]
        cuts = [(whole(origin).cut(axis, a, b), b - a) for a, b in itertools.pairwise(edges)]
        layouts, sizes = zip(*cuts, strict=True)
        parts = np.split(positions, edges[1:-1], axis)
        if all(size > 1 for size in sizes):  # of one entry, no run is left
            assert merged(layouts, axis, sizes) == whole(origin)
        order = rng.sample(range(len(sizes)), len(sizes))
        layouts, sizes, parts = ([x[i] for i in order] for x in (layouts, sizes, parts))
        check(merged(layouts, axis, sizes), np.concatenate(parts, axis), origin)
        if len(set(sizes)) == 1:
            total = merged(layouts)
            for part in parts:
                check(total, part, origin)


@pytest.mark.parametrize("n", [2, 4])
def test_one_devices_part(n):
    """It is as long as the part, knows of how many it is one, and is whole again on all devices."""
    part = whole((8, 6)).resize((8 // n, 6))
    assert part.axes == whole((8 // n, 6)).axes
    assert part.resize((8, 6)).axes == whole((8, 6)).axes
