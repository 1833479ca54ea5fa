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
    def varying(self) -> frozenset[int]:
        """The axes of the array along which the positions differ."""
        return frozenset(k for k, n in enumerate(self.shape) if n > 1)

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

    def runs_along(self, axes: Iterable[int]) -> tuple[Run, ...]:
        """The positions of the origin along each of these axes."""
        along = []
        for k in axes:
            along += [_split(run, k)[0] for run in self._known if run.shape[k] > 1]
        return tuple(along)

    @property
    def _known(self) -> list[Run]:
        return [run for run in self.runs if run.axis >= 0]

    @property
    def varying(self) -> frozenset[int]:
        """The axes along which it is another part of the origin."""
        return frozenset().union(*(run.varying for run in self._known))

    @property
    def is_all(self) -> bool:
        """Whether all positions of the origin are there, those along one axis with all along another."""
        pairs = itertools.combinations(self.runs, 2)
        return not self.region and all(_is_product(a, b) for a, b in pairs if a.axis != b.axis)

    def runs_not_along(self, axes: Iterable[int]) -> tuple[Run, ...]:
        """Those along all others."""
        return self.runs_along(self.varying.difference(axes))

    def split(self, axes: Iterable[int]) -> tuple[Layout, tuple[Run, ...]]:
        """One entry along these axes, and the positions along them, which add to those that are left."""
        runs, removed = list(self.runs), []
        for k in axes:
            for run in [run for run in runs if run.shape[k] > 1]:
                along, rest = _split(run, k)
                runs.remove(run)
                runs += rest
                if run.axis >= 0:
                    removed.append(along)
        shape = tuple(1 if k in axes else n for k, n in enumerate(self.shape))
        return self._replace(shape=shape, runs=tuple(sorted(runs))), tuple(removed)

    def add_up(self, axes: Iterable[int]) -> Layout:
        """The sum over these axes, of which one entry is left."""
        rest, summed = self.split(axes)
        return rest._replace(taken=rest.taken + summed)

    def visit(self, axes: Sequence[int]) -> Layout:
        """One entry along axes that a loop, a lookup or a batch goes over."""
        rest, visited = self.split(axes)
        if not self.is_separable(axes) or self.placed(axes):
            visited = (*visited, UNORDERED)
        return rest._replace(loops=rest.loops + visited)

    def is_separable(self, axes: Iterable[int]) -> bool:
        """Whether an entry of one of these axes adds as much to all positions."""
        for run in self.runs:
            for k in run.varying.intersection(axes):
                _, rest = _split(run, k)
                if not rest and run.positions.size > run.shape[k]:
                    return False
        return True

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
        runs = []
        for run in self.runs:
            holes = run.positions == HOLE
            runs += [run for k in axes if (holes != holes.take([0], k)).any()]
        return runs

    def place(self, axis: int, start: int, size: int, zeros: bool = False) -> Layout:
        """From `start` on in a longer axis of `size`, whose other entries come from elsewhere, or are zeros."""
        n, rank = self.shape[axis], len(self.shape)
        width = [(0, 0)] * rank
        width[axis] = (start, size - start - n)
        along = [run for run in self.runs if run.shape[axis] > 1]
        runs = [run for run in self.runs if run not in along]
        if not along and not zeros:
            line = [1] * rank
            line[axis] = n
            along = [Run(OTHER, tuple(line), bytes(4 * n))]
        for run in along:
            runs.append(_run(run.axis, np.pad(run.positions, width, constant_values=HOLE)))
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
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
    runs = []
    for axis, n in enumerate(shape):
        if n > 1:
            line = [1] * len(shape)
            line[axis] = n
            runs.append(_run(axis, np.arange(n).reshape(line)))
    return Layout(shape, shape, tuple(runs))


@functools.lru_cache(4096)
def merged(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of a sum of parts of one origin. Where they differ, all of their positions are taken."""
    first, *others = layouts
    if all(x == first for x in others):
        return first
    taken = tuple(t for t in first.taken if all(t in x.taken for x in others))
    loops = tuple(dict.fromkeys(run for x in layouts for run in x.loops))
    holes = _holes_beside_others(layouts)
    runs: list[Run] = []
    mixed: list[Run] = []
    for axis in _axes_of(layouts, taken):
        along = [[run for run in x.runs if run.axis == axis] for x in layouts]
        added = [[t for t in x.taken if t.axis == axis and t not in taken] for x in layouts]
        if not any(added) and all(x == along[0] for x in along):
            runs += along[0]
            continue
        if all(len(x) == 1 for x in along):
            positions = [x[0].positions for x in along]
            if holes is not None:
                there = [
                    np.where(hole, HOLE, at) for hole, at in zip(holes, positions, strict=True)
                ]
                runs.append(_run(axis, functools.reduce(np.minimum, there)))
                continue
            shared = _shared(np.stack(np.broadcast_arrays(*positions)))
            if shared is not None:
                run, starts = shared
                runs.append(_run(axis, run))
                along = [[_set(axis, start)] for start in starts]
        if axis >= 0:
            sets = [sums([*x, *y]) for x, y in zip(along, added, strict=True)]
            mixed.append(_set(axis, *sets))
    known = tuple(sorted(run for run in runs if run.is_known))
    return Layout(first.shape, first.origin, known, (*taken, *mixed), loops)


def _axes_of(layouts: Sequence[Layout], taken: Sequence[Run]) -> list[int]:
    """Axes of the origin along which some have positions besides those that all have taken."""
    axes: dict[int, None] = {}
    for layout in layouts:
        for run in (*layout.runs, *layout.taken):
            if run not in taken:
                axes[run.axis] = None
    return list(axes)


def _holes_beside_others(layouts: Sequence[Layout]) -> list[np.ndarray] | None:
    """Where each has holes, if in all places but one of them has: so are parts put together. None otherwise."""
    first = layouts[0]
    if any((x.taken, x.loops) != (first.taken, first.loops) for x in layouts):
        return None
    holes = []
    for x in layouts:
        of_runs = [run.positions == HOLE for run in x.runs]
        holes.append(np.any(np.broadcast_arrays(False, *of_runs), 0))
    there = sum(np.asarray(~hole, int) for hole in holes)
    return holes if np.all(there <= 1) else None


def _shared(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """A run in which positions [layouts, ...] agree but for where it starts, and what is left of each."""
    axes = tuple(range(1, positions.ndim))
    for k in axes:
        run = positions.min(k, keepdims=True)
        run = _less(run, run.min(axes, keepdims=True))
        if (run == run[0]).all():
            return run[0], _less(positions, run)
    return None


@functools.lru_cache(4096)
def _region(layout: Layout) -> Region:
    region = []
    for axis, n in enumerate(layout.origin):
        along = [run for run in (*layout.runs, *layout.taken) if run.axis == axis]
        visited = [run for run in layout.loops if run.axis == axis and run.positions.size > 1]
        is_there = np.isin(np.arange(n), sums([*along, *visited]))
        if along and not is_there.all() and _is_product_of(layout, axis, along):
            region.append((axis, is_there[: _period(is_there)].tobytes()))
    return frozenset(region)


def _is_product_of(layout: Layout, axis: int, along: Sequence[Run]) -> bool:
    """Whether all positions along this axis come with all along the others."""
    others = [run for run in layout.runs if run.axis not in (axis, OTHER)]
    return all(_is_product(a, b) for a in along for b in others)


def _period(pattern: np.ndarray) -> int:
    """After how many entries the pattern repeats."""
    n = len(pattern)
    periods = (p for p in range(1, n + 1) if n % p == 0)
    return next(p for p in periods if (pattern[p:] == pattern[:-p]).all())


def _is_product(a: Run, b: Run) -> bool:
    """Whether all positions of one come with all of the other."""
    if len(a.shape) != len(b.shape) or a.varying.isdisjoint(b.varying):
        return True
    x, y = np.broadcast_arrays(a.positions.astype(np.int64), b.positions)
    there = (x < HOLE) & (y < HOLE)
    pairs, first, second = (np.unique(z[there]) for z in (x * HOLE + y, x, y))
    return len(pairs) == len(first) * len(second)


@functools.lru_cache(4096)
def _split(run: Run, axis: int) -> tuple[Run, tuple[Run, ...]]:
    """The positions along an axis, and those of its first entry, where that differs along others."""
    at, start = run.positions, run.positions.min(axis, keepdims=True)
    others = tuple(k for k in range(at.ndim) if k != axis)
    along = _less(at, start).min(others, keepdims=True)
    # at[i, j] = start[j] + along[i]
    if start.size > 1 and np.array_equal(np.where(at == HOLE, HOLE, start + along), at):
        return _set(run.axis, along), (_run(run.axis, start),)
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
    union = np.unique(np.concatenate([x[x < HOLE] for x in positions]))
    return Run(axis, union.shape, union.astype(np.int32).tobytes())
