"""Where the entries of an array come from: their positions along each axis of one parameter or
product, its origin.

The positions along an axis of the origin are an array of NumPy's, with one entry along each axis on
which they don't depend. So an operation that moves entries moves the positions as it moves the
array. An entry that is a sum of several has the positions of each of them.

A kernel [16, 64], cut into four heads by a reshape to [16, 4, 16], has the layout

    run along axis 0 of the kernel, positions [1, 16, 1, 1]: 0, 1, ..., 15
    run along axis 1 of the kernel, positions [1, 1, 4, 16]: 0, 1, ..., 63

and its third head, [16, 16], has the positions 32, ..., 47 along axis 1. The sum over its heads has
four positions along axis 1 for each entry, [4, 1, 16]: 0, 16, 32 and 48 for the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

# Positions, with one entry along each axis of the array on which they don't depend.
Positions: TypeAlias = np.ndarray
# For each axis of which only a part is left, a mask that says of each of its positions whether it
# is there, as bytes.
Region: TypeAlias = frozenset[tuple[int, bytes]]

# In place of a position: the entry is not of the origin, or has fewer positions than others. It is
# larger than any position.
HOLE = 1 << 30
# The most entries of an array of positions. Arrays that would need more are not followed.
MOST = 1 << 22
# In place of an axis of the origin: the run along it, of zeros and holes,
# only says where the array has holes.
OTHER = -1


def other_axes(rank: int, axes: Collection[int | None]) -> list[int]:
    """The axes of an array of this rank besides these."""
    return [axis for axis in range(rank) if axis not in axes]


class NotFollowed(Exception):
    """Where an operation moves entries is not followed."""


class Run(NamedTuple):
    """Positions along one axis of the origin, either of each entry of an array,
    or a set of positions.

    - `Layout.runs` have those of each entry. For an array [4, 16] their shape is [n, 4, 16], or
      [n, 1, 16] if they are the same in all four rows. Each entry is a sum of n entries of the
      origin, whose positions are sorted.
    - All others, as of `Layout.runs_along`, are sets: sorted, of the shape [n].
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
        return frozenset(k for k, n in enumerate(self.shape[1:]) if n > 1)

    @property
    def stride(self) -> int:
        """The distance between neighbors in a set: 16 for {0, 16, 32},
        and 1 if there are several distances."""
        steps = np.unique(np.diff(self.positions))
        return int(steps[0]) if len(steps) == 1 else 1


class Layout(NamedTuple):
    """Which entries of the origin each entry of an array is made of."""

    shape: tuple[int, ...]  # of the array
    origin: tuple[int, ...]  # the shape of the origin
    # Positions along axes of the origin, of each axis once. The first run is one along `OTHER`.
    runs: tuple[Run, ...]
    # Positions that a loop, a lookup or a batch axis visits: sets.
    loops: tuple[Run, ...] = ()

    @property
    @functools.lru_cache(4096)  # noqa: B019
    def region(self) -> Region:
        """Which part of the origin this is: nothing if it is all of it.

        In a kernel [16, 6] with the columns q, k, v, q, k, v the queries have {(1, bytes of the
        mask 100100)}. An axis without a run counts as whole, such as the rows of a kernel after the
        product with it.
        """
        region = []
        for run in self.runs[1:]:  # without the one along `OTHER`
            is_there = np.isin(np.arange(self.origin[run.axis]), run.positions)
            if not is_there.all():
                region.append((run.axis, is_there.tobytes()))
        return frozenset(region)

    @property
    def varying(self) -> frozenset[int]:
        """The axes of the array along which it is another part of the origin."""
        return frozenset().union(*(run.varying for run in self.runs[1:]))

    def runs_along(self, axes: Collection[int]) -> tuple[Run, ...]:
        """The positions of the origin along each of these axes of the array, as sets.

        A kernel [16, 64] as [16, 4, 16] has {0, 16, 32, 48} of its axis 1 along axis 1,
        and {0, ..., 15} along axis 2.
        """
        return self.split(axes)[1]

    def runs_not_along(self, axes: Collection[int]) -> tuple[Run, ...]:
        """The positions of the origin along all other axes of the array, as sets."""
        return self.runs_along(self.varying.difference(axes))

    def split(self, axes: Collection[int]) -> tuple[Layout, tuple[Run, ...]]:
        """The layout with one entry along these axes,
        and sets of how far the other entries are from it.

        A kernel [16, 64] as [16, 4, 16], split along axis 1, leaves the head with the lowest
        positions, [16, 1, 16] with 0, ..., 15 along axis 1 of the kernel,
        and the set of distances {0, 16, 32, 48}.

        The layout loses a run that varies along this axis alone, such as the layers of a stack, and
        one whose positions are no sum of a start and a distance, such as 0, 1 and 5, 3 of [2, 2]:
        its set has all of its positions.
        """
        runs: Sequence[Run] = self.runs
        distances: list[Run] = []
        for axis in axes:
            kept: list[Run] = []
            for run in runs:
                # Each is a list of one run, or of none.
                distance, rest = _split_run(run, axis)
                distances += distance
                kept += rest
            runs = kept
        return self._with_one_entry(axes, runs), tuple(distances)

    def _with_one_entry(self, axes: Collection[int], runs: Sequence[Run]) -> Layout:
        """A layout with these runs, for an array with one entry along these axes."""
        shape = [1 if axis in axes else n for axis, n in enumerate(self.shape)]
        return self._replace(shape=tuple(shape), runs=tuple(runs))

    def add_up(self, axes: Collection[int]) -> Layout:
        """The sum over these axes, of which one entry is left: it has the positions of all."""
        runs = self.runs
        for axis in axes:
            runs = tuple(_added_up(run, axis) for run in runs)
        return self._with_one_entry(axes, runs)

    def visit(self, axes: Collection[int]) -> Layout:
        """One entry along axes that a loop, a lookup or a batch goes over.

        Raises:
          NotFollowed: Along one of these axes the array was put together with others.
        """
        if self.is_placed(axes):
            raise NotFollowed
        rest, visited = self.split(axes)
        return rest._replace(loops=rest.loops + visited)

    @functools.lru_cache(4096)  # noqa: B019
    def pick(self, sources: tuple[int | None, ...], shape: tuple[int, ...]) -> Layout:
        """Axis i is the axis `sources[i]` of this array, or a new one of `shape[i]` entries.

        An axis that is no source is gone, as `split` leaves it: (0, 2) of a kernel [16, 64] as
        [16, 4, 16] is the first head. In an array x [3, 4, 5], which is its own origin, each run is
        along one axis: (2, None) keeps that of axis 2, and nothing of axes 0 and 1.
        """
        # Axis 0 of positions counts the terms of an entry that is a sum;
        # axis i of the array is their axis 1 + i.
        kept = [source for source in sources if source is not None]
        new = [1 + axis for axis, source in enumerate(sources) if source is None]
        order = [0, *(1 + source for source in kept)]

        def move(positions: Positions) -> Positions:
            # A transpose without the axes that are gone, of which each has one entry.
            in_order = np.einsum(positions, range(positions.ndim), order)
            # A new axis has one position for all of its entries, which repeat.
            return np.expand_dims(in_order, new)

        # Without the axes that are gone. How far entries along them are from each other, the second
        # result, does not matter.
        rest, _ = self.split(other_axes(len(self.shape), kept))
        # `moved` gives None where no entry of the origin is left. Here one is left:
        # `or self` is for the types alone.
        return rest.moved(shape, move) or self

    def moved(
        self, shape: Sequence[int], move: Callable[[Positions], Positions]
    ) -> Layout | None:
        """The layout after an operation that moves entries as `move` moves positions;
        None if it leaves only holes.

        Raises:
          NotFollowed: As `move`.
        """
        runs = tuple(_run_of(run.axis, move(run.positions)) for run in self.runs)
        moved = self._replace(shape=tuple(shape), runs=runs)
        # An empty slice of columns has no entry of the origin, nor has a slice of q's padding an
        # entry of q. An empty batch is along an axis on which no positions depend.
        is_empty = any(0 in run.shape for run in runs)
        return None if is_empty or moved.holes.all() else moved

    @property
    def holes(self) -> Positions:
        """Which entries of the array are not of the origin,
        with one entry along axes on which that doesn't depend."""
        return self.runs[0].positions[0] == HOLE

    def is_placed(self, axes: Collection[int]) -> bool:
        """Whether the holes differ along one of these axes:
        there it was put together with other arrays."""
        return not self.runs[0].varying.isdisjoint(axes)

    def place(self, axis: int, start: int, size: int) -> Layout:
        """The layout as a part of a concatenation: from `start` on in an axis of `size` entries.

        Positions 7, 8 at start 1 of 4 become HOLE, 7, 8, HOLE.
        """
        shape = list(self.shape)
        # How many holes come before and after the entries, along each axis of positions
        holes = [(0, 0)] * (1 + len(shape))
        holes[1 + axis] = start, size - start - shape[axis]
        runs: list[Run] = []
        for run in self.runs:
            # The run along `OTHER` says where holes are, and gets the new ones. Another run needs
            # them only if it has positions for each index along the axis: one position for all of
            # them is not put in a place of its own.
            if axis in run.varying or run.axis == OTHER:
                full = list(run.shape)
                full[1 + axis] = shape[axis]
                positions = np.broadcast_to(run.positions, full)
                placed = np.pad(positions, holes, constant_values=HOLE)
                run = _run_of(run.axis, placed)
            runs.append(run)
        shape[axis] = size
        return self._replace(shape=tuple(shape), runs=tuple(runs))


@functools.lru_cache(4096)
def whole(shape: tuple[int, ...]) -> Layout:
    """All of an array, which is its own origin: of shape [3, 4] the runs 0, 1, 2 and 0, 1, 2, 3."""
    runs = [_run_of(OTHER, np.zeros([1] * (1 + len(shape))))]
    for axis, positions in enumerate(np.indices(shape, sparse=True)):
        # An axis of one entry needs no run: all entries are at 0.
        if positions.size > 1:
            runs.append(_run_of(axis, positions[None]))
    return Layout(shape, shape, tuple(runs))


@functools.lru_cache(4096)
def merged(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of a sum of parts of one origin, or of a concatenation,
    whose parts have holes for each other.

    All layouts have one shape, one origin and the same loops. Each entry has the positions of all
    parts: 0, 1, HOLE, HOLE and HOLE, HOLE, 2, 3, which are put side by side, give 0, 1, 2, 3. The
    sum of 0, 1 and 2, 3 has two positions for each entry: 0 and 2 for the first,
    1 and 3 for the second.
    """
    # Entries that at least one part has. An entry that none has, as of a sink next to both halves
    # of the queries, stays a hole in the first run, along `OTHER`, which only says where holes are.
    # No other run gets a new hole for it: it would differ along the axis of the sink then, as if
    # that went over columns.
    filled = ~np.logical_and.reduce(
        np.broadcast_arrays(*(layout.holes for layout in layouts))
    )
    # For each axis of the origin, and `OTHER`, the parts' runs along it, each with its holes that
    # other parts fill: there the part gives no position.
    by_axis: dict[int, list[tuple[Run, Positions]]] = {}
    for layout in layouts:
        of_others = layout.holes & filled
        for run in layout.runs:
            by_axis.setdefault(run.axis, []).append((run, of_others))
    runs = []
    # `OTHER`, -1, comes first again.
    for axis, parts in sorted(by_axis.items()):
        run, _ = parts[0]
        # Equal runs are one, as along the rows of a kernel of which only columns were cut. Else
        # each entry gets the positions of all parts, and where heads of a sum share columns, as in
        # q + q[::-1], those of all heads.
        if len({run for run, _ in parts}) > 1:
            run = _sum_of(axis, parts)
            # Entries of one part may be sums of more terms, `shape[0]`, than those of another. If a
            # rotation of x[1:] is put behind x[:1], the entries of the first token have one
            # position, and all others, sums of two features, have two: tokens would look like
            # heads, which have columns of their own. So along the axes on which parts are put
            # together, where their holes (`runs[0]`) differ, each entry gets the positions of all.
            if len({run.shape[0] for run, _ in parts}) > 1:
                for k in frozenset().union(*(x.runs[0].varying for x in layouts)):
                    run = _added_up(run, k)
        runs.append(run)
    return layouts[0]._replace(runs=tuple(runs))


def _sum_of(axis: int, parts: Sequence[tuple[Run, Positions]]) -> Run:
    """The run along one axis of the origin of a sum or a concatenation: each entry has the
    positions of all parts. `parts` has the run of each, and its holes: entries that others have.

    The heads of q[:2] + q[2:] have columns of their own: q[0] and q[2], q[1] and q[3], at one
    distance. In q + q[::-1] two heads share their columns, and the distance differs from head to
    head. Then no head has columns of its own: each gets the positions of all.
    """
    terms = []
    for run, holes in parts:
        # The n positions of each entry, [n, *array], are n terms.
        terms.extend(np.where(holes, HOLE, run.positions))
    positions = np.stack(np.broadcast_arrays(*terms))
    run = _run_of(axis, positions)
    # A hole is larger than any position. Terms with holes are taken for a concatenation, in which
    # each entry comes from one term: there are no distances to compare.
    if positions.max() >= HOLE:
        return run
    # How far each term is from the first one, entry by entry
    distances = positions - positions[:1]
    for k in range(positions.ndim - 1):
        # Axis k of the array is axis 1 + k of the positions.
        first = distances.take([0], 1 + k)
        if (distances != first).any():
            run = _added_up(run, k)
    return run


@functools.lru_cache(4096)
def _split_run(run: Run, axis: int) -> tuple[Sequence[Run], Sequence[Run]]:
    """A run as `Layout.split` divides it: the set of distances along an axis from the entry with
    the lowest positions, and the run of that entry.

    Positions 0, ..., 63 of shape [4, 16] along axis 0 are the set {0, 16, 32, 48} and the run 0,
    ..., 15 of shape [1, 16]. Each comes in a list, which is empty if there is none. If the
    positions are no such sum, or vary along this axis alone, the set has all of them and no run is
    left. A run that does not vary along it stays as it is, without a set.
    """
    if axis not in run.varying:
        return [], [run]
    # It has no positions, only holes: a hole is left where all entries along the axis are holes.
    if run.axis == OTHER:
        return [], [_added_up(run, axis)]
    # Holes are masked: minima and the comparison leave them out.
    positions = np.ma.masked_equal(run.positions, HOLE)
    others = tuple(other_axes(positions.ndim, [1 + axis]))
    # positions[i, j] = start[j] + step[i], with i along the axis and j along all others. One start
    # alone is no run: the positions vary along this axis only.
    start = positions.min(1 + axis, keepdims=True)
    step = (positions - start).min(others, keepdims=True)
    if start.size > 1 and (start + step == positions).all():
        first = _run_of(run.axis, start.filled(HOLE))
        return [set_of(run.axis, step.filled(HOLE))], [first]
    return [set_of(run.axis, run.positions)], []


@functools.lru_cache(4096)
def _added_up(run: Run, axis: int) -> Run:
    """The positions of all entries along an axis of the array, for one that is the sum of them."""
    # Positions [n, *array] have the axis of the array as axis 1 + axis; axis 0 counts the terms.
    terms = np.split(run.positions, run.shape[1 + axis], 1 + axis)
    return _run_of(run.axis, np.concatenate(terms))


def _run_of(axis: int, positions: Positions) -> Run:
    """The run of positions [n, *axes of the array], where each entry is a sum of n entries of the
    origin. The same sets of positions give the same run.

    The positions of an entry are sorted, each once,
    and an axis on which they don't depend has one entry.
    """
    if len(positions) > 1:
        positions = np.sort(positions, 0)
        # An entry that has a position twice gets a hole in its place. Holes are larger than all
        # positions: a second sort puts them last. Terms that are holes in all entries are left out.
        is_repeated = positions[1:] == positions[:-1]
        positions[1:][is_repeated] = HOLE
        positions.sort(0)
        is_term = positions.reshape(len(positions), -1).min(1) < HOLE
        is_term[0] = True  # also if all entries are holes
        positions = positions[is_term]
    for k, n in enumerate(positions.shape[1:], start=1):
        if n > 1:
            first = positions.take([0], k)
            positions = first if (positions == first).all() else positions
    return Run(axis, positions.shape, positions.astype(np.int32).tobytes())


def axes_of(runs: Iterable[Run]) -> frozenset[int]:
    """The axes of the origin along which these runs are."""
    return frozenset(run.axis for run in runs)


def set_of(axis: int, positions: Positions) -> Run:
    """All of these positions as a set, without holes."""
    union = np.unique(positions)
    union = union[union < HOLE]
    return Run(axis, union.shape, union.astype(np.int32).tobytes())
