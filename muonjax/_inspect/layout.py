"""Where the entries of an array come from: their positions along each axis of one parameter or product, its origin.

The positions along an axis of the origin are an array of NumPy's, with one entry along each axis on which they don't
depend. So an operation that moves entries moves the positions as it moves the array. An axis that is added up, mixed or
visited by a loop is gone; the positions along it stay known as a set.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

HOLE = 1 << 30  # in place of a position: the entry is not of the origin
MOST = 1 << 22  # entries of an array of positions
OTHER = -1  # in place of an axis of the origin, where nothing but holes is known

# For each axis of which only a part is left, whether each position is there, up to where that repeats.
Region: TypeAlias = frozenset[tuple[int, bytes]]


class Unmoved(Exception):
    """Where an operation moves entries is not followed."""


class Run(NamedTuple):
    """Positions along one axis of the origin: of each entry of an array, or a set of them."""

    axis: int
    shape: tuple[int, ...]
    at: bytes

    @property
    def positions(self) -> np.ndarray:
        return np.frombuffer(self.at, np.int32).reshape(self.shape)

    @property
    def stride(self) -> int:
        """The distance of the positions of a set; 1 if there are several."""
        steps = np.diff(self.positions)
        return int(steps[0]) if len(steps) and (steps == steps[0]).all() else 1

    @property
    def is_known(self) -> bool:
        return self.axis >= 0 or self.positions.max() == HOLE


class Layout(NamedTuple):
    """Which entry of the origin each entry of an array is.

    Attributes:
      shape: The shape of the array.
      origin: The shape of the origin.
      runs: Positions along axes of the origin, of each axis once.
      taken: Positions that are added up or mixed: sets that add to the runs.
      loops: Positions that a loop, a lookup or a batch axis visits: sets. `UNORDERED` among them says that entries are
        in an order that is not followed, or that the loop visits others too.
    """

    shape: tuple[int, ...]
    origin: tuple[int, ...]
    runs: tuple[Run, ...]
    taken: tuple[Run, ...] = ()
    loops: tuple[Run, ...] = ()

    @property
    def region(self) -> Region:
        """Which part of the origin this is; nothing if it is all of it."""
        return _region(self)

    def atoms(self, axes: Iterable[int]) -> tuple[Run, ...]:
        """The positions of the origin along each of these axes."""
        known = [run for run in self.runs if run.axis >= 0]
        return tuple(_split(run, k)[0] for k in axes for run in known if run.shape[k] > 1)

    @property
    def varying(self) -> frozenset[int]:
        """The axes along which it is another part of the origin."""
        known = [run for run in self.runs if run.axis >= 0]
        return frozenset(k for run in known for k, n in enumerate(run.shape) if n > 1)

    @property
    def is_all(self) -> bool:
        """Whether all positions of the origin are there, those along one axis with all along another."""
        pairs = itertools.combinations(self.runs, 2)
        return not self.region and all(_is_product(a, b) for a, b in pairs if a.axis != b.axis)

    def atoms_beside(self, axes: Iterable[int]) -> tuple[Run, ...]:
        """Those along all others."""
        return self.atoms(self.varying.difference(axes))

    def split(self, axes: Iterable[int]) -> tuple[Layout, tuple[Run, ...]]:
        """One entry along these axes, and the positions along them, which add to those that are left."""
        runs, gone = list(self.runs), []
        for k in axes:
            for run in [run for run in runs if run.shape[k] > 1]:
                along, rest = _split(run, k)
                runs.remove(run)
                runs += rest
                gone += [along] if run.axis >= 0 else []
        shape = tuple(1 if k in axes else n for k, n in enumerate(self.shape))
        return self._replace(shape=shape, runs=tuple(sorted(runs))), tuple(gone)

    def add_up(self, axes: Iterable[int]) -> Layout:
        """The sum over these axes, of which one entry is left."""
        left, gone = self.split(axes)
        return left._replace(taken=left.taken + gone)

    def visit(self, axes: Sequence[int]) -> Layout:
        """One entry along axes that a loop, a lookup or a batch goes over."""
        left, gone = self.split(axes)
        is_known = self.is_separable(axes) and not self.placed(axes)
        return left._replace(loops=(*left.loops, *gone, *([] if is_known else [UNORDERED])))

    def is_separable(self, axes: Iterable[int]) -> bool:
        """Whether an entry of one of these axes adds as much to all positions."""
        runs = ((run, k) for run in self.runs for k in axes if run.shape[k] > 1)
        return all(_split(run, k)[1] or run.positions.size == run.shape[k] for run, k in runs)

    @functools.lru_cache(4096)  # noqa: B019
    def pick(self, sources: tuple[int | None, ...], shape: tuple[int, ...]) -> Layout:
        """Axis i is the axis `sources[i]` of this array, or a new one of `shape[i]` entries."""
        kept = [k for k in sources if k is not None]
        gone = [k for k in range(len(self.shape)) if k not in kept]
        new = [i for i, k in enumerate(sources) if k is None]

        def move(x: np.ndarray) -> np.ndarray:
            return np.expand_dims(
                x.transpose(*kept, *gone).reshape([x.shape[k] for k in kept]), new
            )

        return self.split(gone)[0].moved(shape, move) or self

    def moved(
        self, shape: Sequence[int], move: Callable[[np.ndarray], np.ndarray]
    ) -> Layout | None:
        """After an operation that moves entries; None if it leaves none of the origin."""
        runs, taken, loops = [], self.taken, self.loops
        for run in self.runs:
            try:
                runs.append(_run(run.axis, move(run.positions)))
            except Unmoved:
                taken, loops = (*taken, _set(run.axis, run.positions)), (*loops, UNORDERED)
        if any(run.positions.min(initial=HOLE) == HOLE for run in runs):
            return None
        return Layout(
            tuple(shape), self.origin, tuple(run for run in runs if run.is_known), taken, loops
        )

    def placed(self, axes: Iterable[int]) -> list[Run]:
        """Runs that have holes at other places for each entry of one of these axes."""
        holes = ((run, k, run.positions == HOLE) for run in self.runs for k in axes)
        return [run for run, k, there in holes if (there != there.take([0], k)).any()]

    def place(self, axis: int, start: int, size: int, zeros: bool = False) -> Layout:
        """From `start` on in a longer axis of `size`, whose other entries come from elsewhere, or are zeros."""
        n = self.shape[axis]
        line = [n if k == axis else 1 for k in range(len(self.shape))]
        pad = [(start, size - start - n) if k == axis else (0, 0) for k in range(len(line))]
        along = [run for run in self.runs if run.shape[axis] > 1]
        runs = [run for run in self.runs if run not in along]
        for run in along or ([] if zeros else [Run(OTHER, tuple(line), bytes(4 * n))]):
            runs.append(_run(run.axis, np.pad(run.positions, pad, constant_values=HOLE)))
        shape = tuple(size if k == axis else n for k, n in enumerate(self.shape))
        return self._replace(shape=shape, runs=tuple(sorted(run for run in runs if run.is_known)))

    def resize(self, shape: Sequence[int]) -> Layout:
        """Another number of entries, on one device of several or on all of them."""
        changed = [k for k, n in enumerate(shape) if n != self.shape[k]]
        rest = self.visit(changed)._replace(shape=tuple(shape))
        return rest if rest.loops == self.loops else rest._replace(loops=(*rest.loops, UNORDERED))


UNORDERED = Run(OTHER, (1,), np.int32(HOLE).tobytes())


@functools.lru_cache(4096)
def whole(shape: tuple[int, ...]) -> Layout:
    """All of an array."""
    axes = [k for k, n in enumerate(shape) if n > 1]
    lines = ([-1 if i == k else 1 for i in range(len(shape))] for k in axes)
    runs = (_run(k, np.arange(shape[k]).reshape(line)) for k, line in zip(axes, lines, strict=True))
    return Layout(shape, shape, tuple(runs))


@functools.lru_cache(4096)
def merged(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of a sum of parts of one origin. Where they differ, all of their positions are taken."""
    first, *others = layouts
    if all(x == first for x in others):
        return first
    taken = tuple(t for t in first.taken if all(t in x.taken for x in others))
    loops = tuple(dict.fromkeys(run for x in layouts for run in x.loops))
    holes = [
        np.any(np.broadcast_arrays(False, *(run.positions == HOLE for run in x.runs)), 0)
        for x in layouts
    ]
    apart = bool(np.all(sum(np.asarray(~x, int) for x in holes) <= 1))  # put together
    apart = apart and all((x.taken, x.loops) == (first.taken, first.loops) for x in others)
    runs, mixed = [], []
    for axis in dict.fromkeys(
        run.axis for x in layouts for run in (*x.runs, *x.taken) if run not in taken
    ):
        found = [[run for run in x.runs if run.axis == axis] for x in layouts]
        gone = [[run for run in x.taken if run.axis == axis and run not in taken] for x in layouts]
        if not any(gone) and all(x == found[0] for x in found):
            runs += found[0]
            continue
        if all(len(one) == 1 for one in found):
            if apart:
                each = [
                    np.where(x, HOLE, run.positions) for x, (run,) in zip(holes, found, strict=True)
                ]
                runs.append(_run(axis, functools.reduce(np.minimum, each)))
                continue
            each = np.stack(np.broadcast_arrays(*(run.positions for (run,) in found)))
            for k in range(1, each.ndim):
                rest = each.min(k, keepdims=True)
                rest = _less(rest, rest.min(tuple(range(1, each.ndim)), keepdims=True))
                if (rest == rest[0]).all():  # equal but for this axis
                    runs.append(_run(axis, rest[0]))
                    found = [[_set(axis, x)] for x in _less(each, rest)]
                    break
        if axis >= 0:
            mixed.append(_set(axis, *(sums([*f, *g]) for f, g in zip(found, gone, strict=True))))
    known = tuple(sorted(run for run in runs if run.is_known))
    return Layout(first.shape, first.origin, known, (*taken, *mixed), loops)


@functools.lru_cache(4096)
def _region(layout: Layout) -> Region:
    found = []
    for axis, n in enumerate(layout.origin):
        visited = [run for run in layout.loops if run.axis == axis and run.positions.size > 1]
        mine = [run for run in (*layout.runs, *layout.taken) if run.axis == axis]
        is_there = np.isin(np.arange(n), sums([*mine, *visited]))
        others = [run for run in layout.runs if run.axis not in (axis, OTHER)]
        if mine and not is_there.all() and all(_is_product(a, b) for a in mine for b in others):
            periods = (
                p for p in range(1, n + 1) if n % p == 0 and (is_there[p:] == is_there[:-p]).all()
            )
            found.append((axis, is_there[: next(periods)].tobytes()))
    return frozenset(found)


def _is_product(a: Run, b: Run) -> bool:
    """Whether all positions of one come with all of the other."""
    if len(a.shape) != len(b.shape) or not any(
        m > 1 < n for m, n in zip(a.shape, b.shape, strict=True)
    ):
        return True
    x, y = np.broadcast_arrays(a.positions.astype(np.int64), b.positions)
    there = (x < HOLE) & (y < HOLE)
    return len(np.unique((x * HOLE + y)[there])) == len(np.unique(x[there])) * len(
        np.unique(y[there])
    )


@functools.lru_cache(4096)
def _split(run: Run, axis: int) -> tuple[Run, tuple[Run, ...]]:
    """The positions along an axis, and those of its first entry, where that differs along others."""
    at, rest = run.positions, run.positions.min(axis, keepdims=True)
    others = tuple(k for k in range(at.ndim) if k != axis)
    along = _less(at, rest).min(others, keepdims=True)
    if rest.size > 1 and np.array_equal(np.where(at == HOLE, HOLE, rest + along), at):
        return _set(run.axis, along), (_run(run.axis, rest),)
    return _set(run.axis, at), ()


def sums(sets: Iterable[Run]) -> np.ndarray:
    """All sums of one position of each; where there are too many, all that lie between the first and the last."""
    total = np.zeros(1, int)
    for run in sets:
        at = run.positions[run.positions < HOLE]
        if total.size * at.size > MOST:
            total = np.arange(total.min() + at.min(), total.max() + at.max() + 1)
        else:
            total = np.unique(total[:, None] + at)
    return total


def _less(positions: np.ndarray, start: np.ndarray) -> np.ndarray:
    return np.where(positions == HOLE, HOLE, positions - start)


def _run(axis: int, positions: np.ndarray) -> Run:
    """With one entry along each axis on which the positions don't depend."""
    for k, n in enumerate(positions.shape):
        if n > 1 and (positions == (first := positions.take([0], k))).all():
            positions = first
    return Run(axis, positions.shape, positions.astype(np.int32).tobytes())


def _set(axis: int, *positions: np.ndarray) -> Run:
    found = np.unique(np.concatenate([x[x < HOLE] for x in positions]))
    return Run(axis, found.shape, found.astype(np.int32).tobytes())
