"""Where the entries of an array come from: their positions along each axis of one parameter or product, its origin.

The positions along an axis of the origin are an array of NumPy's, with one entry along each axis on which they don't
depend. So an operation that moves entries moves the positions as it moves the array. An axis that is added up, mixed or
visited by a loop is gone; the positions along it stay known as a set.

A kernel [16, 64], cut into four heads by a reshape to [16, 4, 16], has the layout

    run along axis 0 of the kernel, positions [16, 1, 1]: 0, 1, ..., 15
    run along axis 1 of the kernel, positions [1, 4, 16]: 0, 1, ..., 63

and its third head, [16, 16], has the positions 32, ..., 47 along axis 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

# Positions, with one entry along each axis of the array on which they don't depend.
Positions: TypeAlias = np.ndarray
# For each axis of which only a part is left, whether each position is there, up to where that repeats.
Region: TypeAlias = frozenset[tuple[int, bytes]]

# In place of a position: the entry is not of the origin. It is larger than any position.
HOLE = 1 << 30
# The most entries of an array of positions. Arrays that would need more are not followed.
MOST = 1 << 22
# In place of an axis of the origin: a run along it only says where the array has holes, or nothing at all.
OTHER = -1


def other_axes(rank: int, axes: Collection[int | None]) -> list[int]:
    """The axes of an array of this rank besides these."""
    return [axis for axis in range(rank) if axis not in axes]


class NotFollowed(Exception):
    """Where an operation moves entries is not followed."""


class Run(NamedTuple):
    """Positions along one axis of the origin: one for each entry of an array, or a set of them.

    The positions of an array [4, 16] have the shape [4, 16], or [1, 16] if they are the same in all four rows. A set is
    sorted and has one axis.
    """

    axis: int
    shape: tuple[int, ...]
    packed: bytes  # the positions as bytes, so that runs can be compared and be keys

    @property
    def positions(self) -> Positions:
        return np.frombuffer(self.packed, np.int32).reshape(self.shape)

    @property
    def varying(self) -> frozenset[int]:
        """The axes of the array along which the positions differ."""
        return frozenset(k for k, n in enumerate(self.shape) if n > 1)

    @property
    def stride(self) -> int:
        """The distance between neighbors in a set: 16 for {0, 16, 32}, and 1 if there are several distances."""
        steps = np.diff(self.positions)
        if len(steps) == 0 or (steps != steps[0]).any():
            return 1
        return int(steps[0])

    @property
    def is_known(self) -> bool:
        """Whether it says anything: positions of the origin, or at least where there are none."""
        return self.axis != OTHER or self.positions.max() == HOLE


class Layout(NamedTuple):
    """Which entry of the origin each entry of an array is."""

    shape: tuple[int, ...]  # of the array
    origin: tuple[int, ...]  # the shape of the origin
    # Positions along axes of the origin, of each axis once. A run along `OTHER` has only holes.
    runs: tuple[Run, ...]
    # Positions that are added up or mixed: sets. The array is made of all sums of one of them and one of the run.
    taken: tuple[Run, ...] = ()
    # Positions that a loop, a lookup or a batch axis visits: sets.
    loops: tuple[Run, ...] = ()

    @property
    @functools.lru_cache(4096)  # noqa: B019
    def region(self) -> Region:
        """Which part of the origin this is: nothing if it is all of it.

        In a kernel [16, 24] with columns q, k, v, q, k, v, ..., the queries have {(1, bytes of [True, False, False])}.
        """
        region = []
        for axis, n in enumerate(self.origin):
            runs, taken = _of_axis(self.runs, axis), _of_axis(self.taken, axis)
            # Nothing says which positions are there, as along the rows of a kernel after the product with it.
            if not runs and not taken:
                continue
            positions = sums([*runs, *taken])
            is_there = np.isin(np.arange(n), positions)
            # A mask that repeats, such as 10101010 of every second column, is kept as 10.
            if not is_there.all():
                region.append((axis, is_there[: _period(is_there)].tobytes()))
        return frozenset(region)

    @property
    def varying(self) -> frozenset[int]:
        """The axes of the array along which it is another part of the origin."""
        axes: set[int] = set()
        for run in self.runs:
            if run.axis != OTHER:
                axes |= run.varying
        return frozenset(axes)

    @property
    def holes(self) -> Positions:
        """Which entries of the array are not of the origin, with one entry along axes on which that doesn't depend."""
        holes = np.zeros([1] * len(self.shape), bool)
        for run in self.runs:
            holes = holes | (run.positions == HOLE)
        return holes

    def runs_along(self, axes: Collection[int]) -> tuple[Run, ...]:
        """The positions of the origin along each of these axes of the array, as sets.

        A kernel [16, 64] as [16, 4, 16] has {0, 16, 32, 48} of its axis 1 along axis 1, and {0, ..., 15} along axis 2.
        """
        return self.split(axes)[1]

    def runs_not_along(self, axes: Collection[int]) -> tuple[Run, ...]:
        """The positions of the origin along all other axes of the array, as sets."""
        return self.runs_along(self.varying.difference(axes))

    def split(self, axes: Collection[int]) -> tuple[Layout, tuple[Run, ...]]:
        """The first entry along these axes of the array, and as sets how far the others are from it.

        A kernel [16, 64] as [16, 4, 16], split along axis 1, leaves its first head [16, 1, 16], whose positions are
        0, ..., 15, and the set {0, 16, 32, 48}. Positions that are no such sum are all in the set, and none are left.
        """
        runs, removed = list(self.runs), []
        shape = list(self.shape)
        for axis in axes:
            shape[axis] = 1
            kept = []
            for run in runs:
                if run.shape[axis] == 1:
                    kept.append(run)
                    continue
                along, rest = _split(run, axis)
                if rest is not None:
                    kept.append(rest)
                if run.axis != OTHER:  # holes are no positions
                    removed.append(along)
            runs = kept
        rest = self._replace(shape=tuple(shape), runs=tuple(sorted(runs)))
        return rest, tuple(removed)

    def add_up(self, axes: Collection[int]) -> Layout:
        """The sum over these axes, of which one entry is left."""
        rest, summed = self.split(axes)
        return rest._replace(taken=rest.taken + summed)

    def visit(self, axes: Collection[int]) -> Layout:
        """One entry along axes that a loop, a lookup or a batch goes over.

        Raises:
          NotFollowed: The first iteration does not stand for all of them.
        """
        # It does if the others are as far from it everywhere, with the same holes. In ((0, 1, 2), (4, 5, 6)) the second
        # row adds 4 everywhere, and in ((0, 1, 2), (6, 4, 5)) it adds 6, 3 and 3.
        for run in self.runs:
            for axis in run.varying.intersection(axes):
                # `_split` gives no start where the positions are no such sum, or if nothing but this axis moves them.
                _, start = _split(run, axis)
                if start is None and run.positions.size > run.shape[axis]:
                    raise NotFollowed
        if self.placed(axes):
            raise NotFollowed
        rest, visited = self.split(axes)
        return rest._replace(loops=rest.loops + visited)

    @functools.lru_cache(4096)  # noqa: B019
    def pick(self, sources: tuple[int | None, ...], shape: tuple[int, ...]) -> Layout:
        """Axis i is the axis `sources[i]` of this array, or a new one of `shape[i]` entries.

        An axis that is no source is left with its first entry: (2, None) of an array x [3, 4, 5] gives
        x[0, 0, :, None].
        """
        kept, new = [], []
        for axis, source in enumerate(sources):
            if source is None:
                new.append(axis)
            else:
                kept.append(source)
        gone = other_axes(len(self.shape), kept)

        def move(positions: Positions) -> Positions:
            # The axes that are gone have one entry each.
            in_order = positions.transpose(*gone, *kept)
            without = in_order.reshape(in_order.shape[len(gone) :])
            return np.expand_dims(without, new)

        rest, _ = self.split(gone)
        return rest.moved(shape, move) or self  # never None: no run has holes alone

    def moved(
        self, shape: Sequence[int], move: Callable[[Positions], Positions]
    ) -> Layout | None:
        """The layout after an operation that moves entries as `move` moves positions; None if it leaves only holes.

        Raises:
          NotFollowed: As `move`.
        """
        runs = []
        for run in self.runs:
            moved = _run_of(run.axis, move(run.positions))
            # HOLE is larger than any position: the array has no entry of the origin any more, as a slice of its padding
            # has none.
            if moved.positions.min(initial=HOLE) == HOLE:
                return None
            runs.append(moved)
        # What was taken or visited before is so wherever the entries go.
        return self._replace(shape=tuple(shape), runs=_canonical(runs))

    def placed(self, axes: Iterable[int]) -> list[Run]:
        """The runs whose holes differ along one of these axes: there it was put together with other arrays."""
        runs = []
        for run in self.runs:
            holes = run.positions == HOLE
            for axis in axes:
                if (holes != holes.take([0], axis)).any():
                    runs.append(run)
        return runs

    def place(self, axis: int, start: int, size: int, zeros: bool = False) -> Layout:
        """The layout as a part of a concatenation: from `start` on in an axis of `size` entries.

        Positions 7, 8 at start 1 of 4 become HOLE, 7, 8, HOLE. If the other entries are `zeros` and the positions don't
        depend on the axis, they stay as they are: zeros count as entries of the origin.
        """
        length, rank = self.shape[axis], len(self.shape)
        width = [(0, 0)] * rank
        width[axis] = (start, size - start - length)
        runs: list[Run] = []
        for run in self.runs:
            if run.shape[axis] > 1:
                padded = np.pad(run.positions, width, constant_values=HOLE)
                run = _run_of(run.axis, padded)
            runs.append(run)
        if runs == list(self.runs) and not zeros:
            # No run depends on the axis, so that none shows the holes: one along `OTHER` does.
            holes = np.full(size, HOLE)
            holes[start : start + length] = 0
            runs.append(_run_of(OTHER, _line(holes, axis, rank)))
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return self._replace(shape=shape, runs=_canonical(runs))


@functools.lru_cache(4096)
def whole(shape: tuple[int, ...]) -> Layout:
    """All of an array, which is its own origin: of shape [3, 4] the runs 0, 1, 2 and 0, 1, 2, 3."""
    runs = []
    for axis, n in enumerate(shape):
        # An axis of one entry needs no run: all entries are at 0.
        if n > 1:
            runs.append(_run_of(axis, _line(np.arange(n), axis, len(shape))))
    return Layout(shape, shape, tuple(runs))


@functools.lru_cache(4096)
def merged(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of a sum of parts of one origin, or of a concatenation, whose parts have holes for each other.

    All layouts have one shape and one origin. Along each axis of the origin the result has one run where the parts say
    which; otherwise all of their positions are taken. The halves 0, 1, HOLE, HOLE and HOLE, HOLE, 2, 3 give the run 0,
    1, 2, 3. The sum of the halves 0, 1 and 2, 3 along the last axis of arrays [8, 2] has the run 0, 1, and {0, 2} are
    taken.
    """
    first = layouts[0]
    if len(set(layouts)) == 1:
        return first
    # What is taken in each of them is taken in their sum.
    taken = first.taken
    loops: dict[Run, None] = {}
    for layout in layouts:
        taken = tuple(run for run in taken if run in layout.taken)
        loops |= dict.fromkeys(layout.loops)
    holes = _holes_of_parts(layouts)
    runs: list[Run] = []
    for axis in range(OTHER, len(first.origin)):
        # For each part its run, if it has one, and what else is taken.
        parts = [_of_axis(layout.runs, axis) for layout in layouts]
        others = []
        for layout in layouts:
            of_part = _of_axis(layout.taken, axis)
            others.append([run for run in of_part if run not in taken])
        # As along the rows of a kernel, where only its columns were cut.
        if parts.count(parts[0]) == len(parts) and not any(others):
            runs += parts[0]
            continue
        positions = _stacked(parts)
        if positions is not None and holes is not None:
            # A concatenation: of each entry all parts but one have HOLE, the largest number.
            runs.append(_run_of(axis, np.where(holes, HOLE, positions).min(0)))
            continue
        # A sum of heads, with the columns 0 to 15 and 16 to 31: the features stay the run 0, ..., 15, and {0, 16} are
        # taken.
        if positions is not None:
            run, starts = _common_run(positions)
            runs.append(_run_of(axis, run))
            parts = [[_set_of(axis, start)] for start in starts]
        # Each entry of the sum is made of what is left of every part. `OTHER` is no axis of the origin: along it there
        # are no positions that the sum could take.
        if axis != OTHER:
            sets = [
                sums((*part, *more)) for part, more in zip(parts, others, strict=True)
            ]
            taken = (*taken, _set_of(axis, *sets))
    return Layout(first.shape, first.origin, _canonical(runs), taken, tuple(loops))


def _canonical(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The runs, sorted, without those that say nothing: so equal layouts have equal runs.

    A run along `OTHER` without holes says nothing.
    """
    return tuple(sorted(run for run in runs if run.is_known))


def _of_axis(runs: Iterable[Run], axis: int) -> list[Run]:
    """The runs along an axis of the origin."""
    return [run for run in runs if run.axis == axis]


def _stacked(parts: Sequence[Sequence[Run]]) -> Positions | None:
    """The positions [parts, *array], if each part has one run."""
    positions = []
    for part in parts:
        # In one part the axis may be added up, or visited by a loop, and in another not.
        if len(part) != 1:
            return None
        positions.append(part[0].positions)
    return np.stack(np.broadcast_arrays(*positions))


def _holes_of_parts(layouts: Sequence[Layout]) -> Positions | None:
    """Where each of these has holes, [layouts, *array], if they are the parts of a concatenation; None otherwise.

    They are if no entry comes from two of them.
    """
    first = layouts[0]
    for layout in layouts:
        # Sums of other columns, or of other iterations, are not parts of one array.
        if (layout.taken, layout.loops) != (first.taken, first.loops):
            return None
    holes = np.stack(np.broadcast_arrays(*(layout.holes for layout in layouts)))
    is_of_two = (~holes).sum(0) > 1
    return None if is_of_two.any() else holes


def _common_run(positions: Positions) -> tuple[Positions, Positions]:
    """A run in which positions [layouts, *array] agree but for where it starts, and what is left of each.

    Two layouts of arrays [2, 3], ((4, 5, 6), (20, 21, 22)) and ((0, 1, 2), (9, 10, 11)), have the run ((0, 1, 2),), the
    same in both rows, and 4 and 20, 0 and 9 are left. Without such a run it is 0, and all positions are left.
    """
    axes = tuple(range(1, positions.ndim))
    for axis in axes:
        # If positions[layout, i, j] = start[layout, i] + run[j], with i along this axis and a run whose least is 0, the
        # least over i is the run plus a number for each layout.
        least = positions.min(axis, keepdims=True)
        run = _minus(least, least.min(axes, keepdims=True))
        if (run == run[0]).all():
            return run[0], _minus(positions, run)
    return np.zeros_like(positions[0]), positions


def _period(pattern: Positions) -> int:
    """After how many entries a pattern repeats: 3 for 100100100100, and 4 for 1000."""
    n = len(pattern)
    for period in range(1, n):
        is_repeated = (pattern[period:] == pattern[:-period]).all()
        if n % period == 0 and is_repeated:
            return period
    return n


@functools.lru_cache(4096)
def _split(run: Run, axis: int) -> tuple[Run, Run | None]:
    """The positions along an axis of the array as a set, and the run of its first entry.

    Positions 0, ..., 63 of shape [4, 16] along axis 0 are the set {0, 16, 32, 48} and the run 0, ..., 15 of shape
    [1, 16]. Where the positions are no such sum, or vary along this axis alone, they are all in the set, and there is
    no rest.
    """
    positions = run.positions
    others = tuple(other_axes(positions.ndim, [axis]))
    # positions[i, j] = start[j] + step[i]
    start = positions.min(axis, keepdims=True)
    step = _minus(positions, start).min(others, keepdims=True)
    total = np.where(positions == HOLE, HOLE, start + step)
    is_sum = np.array_equal(total, positions)
    if start.size > 1 and is_sum:
        return _set_of(run.axis, step), _run_of(run.axis, start)
    return _set_of(run.axis, positions), None


def sums(sets: Iterable[Run]) -> Positions:
    """All sums of one position of each, sorted: of {0, 16} and {0, 1, 2} 0, 1, 2, 16, 17, 18."""
    # Sums that are equal count once.
    total = np.zeros(1, int)
    for run in sets:
        positions = run.positions[run.positions < HOLE]
        total = np.unique(total[:, None] + positions)
    return total


def _line(positions: Positions, axis: int, rank: int) -> Positions:
    """Positions along one axis of an array of this rank, of shape [1, n, 1] along axis 1 of three."""
    shape = [1] * rank
    shape[axis] = -1
    return positions.reshape(shape)


def _minus(positions: Positions, start: Positions) -> Positions:
    """positions - start, and holes where there are holes."""
    return np.where(positions == HOLE, HOLE, positions - start)


def _run_of(axis: int, positions: Positions) -> Run:
    """These positions, with one entry along each axis of the array on which they don't depend."""
    # So runs are small, and equal where the positions are.
    for k, n in enumerate(positions.shape):
        if n > 1:
            first = positions.take([0], k)
            positions = first if (positions == first).all() else positions
    return Run(axis, positions.shape, positions.astype(np.int32).tobytes())


def _set_of(axis: int, *positions: Positions) -> Run:
    """All of these positions as a set, without holes."""
    union = np.unique(np.concatenate([x.reshape(-1) for x in positions]))
    union = union[union < HOLE]
    return Run(axis, union.shape, union.astype(np.int32).tobytes())
