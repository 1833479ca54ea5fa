"""Where the entries along each axis of an array come from: runs of positions along the axes of one parameter.

A reshape only splits and joins runs, a slice shortens one, an index removes one. So the axes of a parameter can be
followed through any spelling of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

OTHER = -1  # the axis of a run that counts something else: a batch, positions
# Says where in a longer axis the runs after it are, as in a concatenation: at `start` of `of`. With a stride they are
# in another order.
PLACED = -2


class Atom(NamedTuple):
    """A run of positions along one axis of the origin: `(start + i) * stride` for i < size."""

    axis: int
    stride: int
    size: int
    start: int
    of: int  # the size of the run that this one is cut from

    @property
    def is_whole(self) -> bool:
        return self.size == self.of


class Run(NamedTuple):
    """Positions along one axis of the origin whose remainder by `period` is in [start, stop)."""

    axis: int
    period: int
    start: int
    stop: int


Region: TypeAlias = frozenset[Run]


def length(atoms: Sequence[Atom]) -> int:
    """The size of an axis with these runs."""
    if atoms and atoms[0].axis == PLACED:
        return atoms[0].of
    return math.prod(a.size for a in atoms)


def other(size: int) -> tuple[Atom, ...]:
    return (Atom(OTHER, 0, size, 0, size),) if size > 1 else ()


class Layout(NamedTuple):
    """The axes of an array as runs of its origin, in row-major order.

    Attributes:
      axes: The runs along each axis; their sizes multiply to its size. An axis of one entry has none.
      taken: Runs out of which a constant index or a slice took a part.
      loops: Runs that a loop, a lookup or a batch axis enumerates: every position is visited. What else is there, no
        run of the origin, tells that they are visited in another order, or with other entries between them.
    """

    axes: tuple[tuple[Atom, ...], ...]
    taken: tuple[Atom, ...] = ()
    loops: tuple[Atom, ...] = ()

    @property
    def region(self) -> Region:
        """Which part of the origin this is; nothing if it is all of it."""
        parts = (a for a in (*(a for atoms in self.axes for a in atoms), *self.taken) if a.axis >= 0)
        return frozenset(
            Run(a.axis, a.stride * a.of, a.stride * a.start, a.stride * (a.start + a.size))
            for a in parts
            if not a.is_whole
        )

    def atoms(self, axes: Iterable[int]) -> tuple[Atom, ...]:
        """The runs of the origin along these axes."""
        return tuple(a for i in axes for a in self.axes[i] if a.axis >= 0)

    def atoms_beside(self, axes: Iterable[int]) -> tuple[Atom, ...]:
        """Those along all others."""
        return self.atoms(set(range(len(self.axes))).difference(axes))

    def pick(self, sources: Sequence[int | None], shape: Sequence[int]) -> Layout:
        """Axis i is the axis `sources[i]` of this array, or a new one of `shape[i]` entries."""
        axes = (other(n) if s is None else self.axes[s] for s, n in zip(sources, shape, strict=True))
        return self._replace(axes=tuple(axes))

    def place(self, axis: int, start: int, size: int) -> Layout:
        """From `start` on in a longer axis of `size`, whose other entries come from elsewhere."""
        return self._with(axis, (Atom(PLACED, 0, 1, start, size), *self.axes[axis]))

    def reorder(self, axis: int, size: int) -> Layout:
        """As many entries of one axis, in an order that is not followed."""
        atoms = self.axes[axis]
        if size == 1 or all(a.axis == OTHER for a in atoms):
            return self.add_up([axis])._with(axis, other(size))
        return self._with(axis, (Atom(PLACED, 1, 1, 0, size), *atoms))

    @property
    def is_reordered(self) -> bool:
        return any(a.axis == PLACED and a.stride for atoms in (*self.axes, self.taken) for a in atoms)

    def is_placed(self, axis: int) -> bool:
        """Whether an axis has entries next to the runs of the origin that are not the origin's."""
        return self.axes[axis][:1] != () and self.axes[axis][0].axis == PLACED and bool(self.atoms([axis]))

    def resize(self, shape: Sequence[int]) -> Layout:
        """Another number of entries, on one device of several or on all of them."""
        axes = []
        for atoms, n in zip(self.axes, shape, strict=True):
            first, old = (atoms[0] if atoms else None), length(atoms)
            if n == old:
                axes.append(atoms)
            elif first is None or first.axis < 0 or not first.is_whole or (first.size * n) % old:
                axes.append(other(n))
            else:
                size = first.size * n // old
                axes.append((first._replace(size=size, of=size), *atoms[1:]))
        return self._replace(axes=tuple(axes))

    def cut(self, axis: int, start: int, stop: int, step: int = 1) -> Layout | None:
        """Entries start:stop:step of one axis; None if none of them are of the origin."""
        atoms = self.axes[axis]
        if atoms and atoms[0].axis == PLACED and step == 1:
            return self._cut_placed(axis, start, stop)
        count = -(-(stop - start) // step)
        each = len(atoms) == 1 and start < step and atoms[0].axis >= 0 and count * step == atoms[0].size
        if step > 1 and each and (split := _split(atoms[0], step)):  # x[..., 1::2]: one of each run of `step`
            return self._with(axis, split[:1])._take(split[1], start, 1)
        inner = math.prod(a.size for a in atoms[1:])
        if atoms and step == 1 and start % inner == 0 and stop % inner == 0:
            first = atoms[0]
            part = first._replace(start=first.start + start // inner, size=(stop - start) // inner)
            if part.size == 1:
                return self._with(axis, atoms[1:])._take(first, start // inner, 1)
            return self._with(axis, (part, *atoms[1:]))
        hull = tuple(a for a in atoms if a.axis != OTHER)
        return self._with(axis, other(count))._replace(taken=(*self.taken, *hull))

    def _cut_placed(self, axis: int, start: int, stop: int) -> Layout | None:
        place, *atoms = self.axes[axis]
        plain, size = self._with(axis, atoms), length(atoms)
        if place.stride:
            return plain.reorder(axis, stop - start)
        low, high = max(start - place.start, 0), min(stop - place.start, size)
        if low >= high:
            return None
        part = plain.cut(axis, low, high)
        if part is None or high - low == stop - start:
            return part
        return part.place(axis, place.start + low - start, stop - start)

    def add_up(self, axes: Iterable[int]) -> Layout:
        """Entries along these axes, which are then gone, are added up."""
        return self._replace(taken=(*self.taken, *self.atoms(axes)))

    def loop(self, axis: int) -> Layout:
        """One entry of an axis that a loop, a lookup or a batch visits entry by entry."""
        kept = (*self.axes[:axis], *self.axes[axis + 1 :])
        return self._replace(axes=kept, loops=(*self.loops, *(self.axes[axis] if self.atoms([axis]) else ())))

    @property
    def settled(self) -> Layout:
        """Constant indices count as a loop's, as in layers that are taken from a stack one by one."""
        single = tuple(a for a in self.taken if a.size == 1 and a.axis >= 0)
        return self._replace(
            taken=tuple(a for a in self.taken if a not in single), loops=(*self.loops, *single)
        )

    def reshape(self, shape: Sequence[int]) -> Layout:
        longer = [atoms for atoms in self.axes if length(atoms) > 1]
        if list(map(length, longer)) == [n for n in shape if n > 1]:  # axes of one entry come and go
            return self._replace(axes=tuple(longer.pop(0) if n > 1 else () for n in shape))
        if any(atoms and atoms[0].axis == PLACED for atoms in self.axes):
            return self._reshape_placed(shape)
        queue, axes = [a for atoms in self.axes for a in joined(atoms)], []
        queue.reverse()
        for size in shape:
            got: list[Atom] = []
            while size > 1:
                atom = queue.pop() if queue else None
                if atom is None:
                    return self._lost(shape)
                if size % atom.size == 0:
                    got.append(atom)
                    size //= atom.size
                elif atom.size % size == 0 and (split := _split(atom, atom.size // size)):
                    got.append(split[0])
                    queue.append(split[1])
                    size = 1
                else:
                    return self._lost(shape)
            axes.append(joined(got))
        return self._replace(axes=tuple(axes))

    def _reshape_placed(self, shape: Sequence[int]) -> Layout:
        """A placed axis stays if the reshape leaves it alone; of any other only the place stays."""
        old = [length(atoms) for atoms in self.axes]
        (axis, *more) = (i for i, atoms in enumerate(self.axes) if atoms and atoms[0].axis == PLACED)
        before = math.prod(old[:axis])
        where = [j for j, n in enumerate(shape) if n == old[axis] and math.prod(shape[:j]) == before]
        if (more or not where) and self.atoms([axis]):
            return self._lost(shape)
        stood = self._with(axis, other(old[axis])).reshape(shape)
        if more or not where:
            return stood._replace(taken=(*stood.taken, *self.axes[axis][:1]))
        return stood._with(where[0], self.axes[axis])

    def _lost(self, shape: Sequence[int]) -> Layout:
        """A reshape that divides no run evenly: only the parts that were taken and the places stay known."""
        taken = (*self.taken, *(a for atoms in self.axes for a in atoms if a.axis != OTHER))
        return self._replace(axes=tuple(other(n) for n in shape), taken=taken)

    def _with(self, axis: int, atoms: Sequence[Atom]) -> Layout:
        return self._replace(axes=(*self.axes[:axis], tuple(atoms), *self.axes[axis + 1 :]))

    def _take(self, atom: Atom, start: int, size: int) -> Layout:
        if atom.axis < 0:
            return self
        return self._replace(taken=(*self.taken, atom._replace(start=atom.start + start, size=size)))


def whole(shape: Sequence[int], *, least: int = 2) -> Layout:
    """All of an array; axes shorter than `least` have no run."""
    return Layout(tuple((Atom(i, 1, n, 0, n),) if n >= least else () for i, n in enumerate(shape)))


def merged(
    layouts: Sequence[Layout], axis: int | None = None, sizes: Sequence[int] = (), rejoin: bool = True
) -> Layout:
    """The layout of a sum of parts of one origin, or of their concatenation along `axis`.

    Where the parts differ, the runs are mixed: the smallest run that holds all of them stays known as taken.
    """
    if axis is not None and rejoin and (rejoined := _rejoined(layouts, axis)):
        return rejoined
    first, axes, mixed = layouts[0], [], []
    for i, alternatives in enumerate(zip(*(x.axes for x in layouts), strict=True)):
        size = sum(sizes) if i == axis else length(alternatives[0])
        if len(set(alternatives)) == 1 and i != axis:
            axes.append(alternatives[0])
        else:
            axes.append(other(size))
            mixed += [a for atoms in alternatives for a in atoms]
    taken = [x.taken for x in layouts]
    common = tuple(a for a in first.taken if all(a in t for t in taken))
    mixed += [a for t in taken for a in t if a not in common]
    lost = tuple(dict.fromkeys(a for t in taken for a in t if a.axis == PLACED and a not in common))
    loops = tuple(dict.fromkeys(a for x in layouts for a in x.loops))
    return Layout(tuple(axes), common + lost + _hulls(mixed), loops)


def _rejoined(layouts: Sequence[Layout], axis: int) -> Layout | None:
    """Neighboring slices of one run put together again."""
    outside = {(x.axes[:axis], tuple(joined(x.axes[axis])[1:]), x.axes[axis + 1 :], x.taken) for x in layouts}
    if len(outside) > 1 or not all(x.axes[axis] for x in layouts):
        return None
    firsts = [joined(x.axes[axis])[0] for x in layouts]
    ends = [a.start + a.size for a in firsts]
    same = len({(a.axis, a.stride, a.of) for a in firsts}) == 1 and firsts[0].axis >= 0
    if not same or [a.start for a in firsts[1:]] != ends[:-1]:
        return None
    run = firsts[0]._replace(size=ends[-1] - firsts[0].start)
    return layouts[0]._with(axis, (run, *joined(layouts[0].axes[axis])[1:]))


def _hulls(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """For each axis of the origin the smallest part that holds all of these."""
    groups: dict[int, list[Atom]] = {}
    for a in atoms:
        groups.setdefault(a.axis, []).append(a)
    return tuple(_hull(found) for axis, found in groups.items() if axis >= 0)


def _hull(atoms: Sequence[Atom]) -> Atom:
    stride, end = min(a.stride for a in atoms), max(a.stride * a.of for a in atoms)
    outer = [a for a in atoms if a.stride * a.of == end]
    start = min(a.stride * a.start for a in outer) // stride
    stop = max(a.stride * (a.start + a.size) for a in outer) // stride
    return Atom(outer[0].axis, stride, stop - start, start, end // stride)


def _split(atom: Atom, inner: int) -> tuple[Atom, Atom] | None:
    """A run as runs of `inner` positions, counted by an outer one; None where it is cut elsewhere."""
    if atom.start % inner or atom.of % inner:
        return None
    outer = Atom(atom.axis, atom.stride * inner, atom.size // inner, atom.start // inner, atom.of // inner)
    return outer, Atom(atom.axis, atom.stride, inner, 0, inner)


def joined(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Neighboring runs that are one."""
    out: list[Atom] = []
    for atom in atoms:
        last = out[-1] if out else None
        if last and atom.is_whole and last.axis == atom.axis and last.stride == atom.stride * atom.size:
            n = atom.size
            out[-1] = Atom(atom.axis, atom.stride, last.size * n, last.start * n, last.of * n)
        else:
            out.append(atom)
    return tuple(out)
