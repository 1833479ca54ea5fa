"""Operations that only move entries: what each does to the axes of an array."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from muonjax._inspect import follow_logits
from muonjax._inspect.entrywise_rules import projections_of_all
from muonjax._inspect.graph import Node
from muonjax._inspect.layouts import MOST, Layout, NotFollowed, other_axes
from muonjax._inspect.records import Records
from muonjax._inspect.rules import rule
from muonjax._inspect.values import DATA, ParameterView, Value, dependent, move_each

# They leave every entry where it is: casts, annotations, and what devices exchange with each other.
SAME = """
    convert_element_type copy copy_p sharding_constraint layout_constraint reduce_precision
    optimization_barrier reshard mesh_cast pvary pcast to_varying psum psum2 pmax psum_invariant
    ppermute device_put name real imag conj stop_gradient
"""
# They cut an array into a shard for each device, or put shards together:
# some axes have another size.
RESIZED = "shard unshard all_gather all_gather_invariant reduce_scatter psum_scatter all_to_all"
# Sums over devices, and the imaginary part, give other logits where the operand has some.
_OTHER_LOGITS = ("psum", "psum2", "psum_invariant", "imag")

Shape: TypeAlias = Sequence[int]
# Numbers for each entry of an array: its positions in an origin (`layouts`), or what a clip does to
# it (the tables of `clip_certificate`). They are [*any, *axes of the array], with one entry along
# each axis on which they don't depend.
Marks: TypeAlias = np.ndarray


@rule(SAME)
def _same(records: Records, node: Node) -> Sequence[Value]:
    """Operations that leave every entry where it is, such as a cast to bfloat16."""
    values = records.inputs(node)
    if node.name == "stop_gradient":
        return [v.without_gradient for v in values]
    if node.name in _OTHER_LOGITS or rounds_coarsely(records, node):
        return [
            v._replace(logits=follow_logits.through(node, v), mixed_by=())
            for v in values
        ]
    return values


def rounds_coarsely(records: Records, node: Node) -> bool:
    """Whether it keeps fewer than eight significant bits, as a cast to int8 or float8 does.

    Then logits times a factor are rounded to others than the logits:
    a factor changes what is rounded off.
    """
    if node.name not in ("convert_element_type", "reduce_precision"):
        return False
    # bfloat16, of two bytes, has seven bits of mantissa besides the leading one.
    size = records.graph.avals[node.outputs[0]].dtype.itemsize
    return size < 2 or node.params.get("mantissa_bits", 7) < 7


def axes_after(first: int, axes: Iterable[int]) -> tuple[int, ...]:
    """Axes of an array as axes of its marks, after the `first` ones: (2, 3) for the axes (0, 1)
    after two."""
    return tuple(first + axis for axis in axes)


def moved_by(records: Records, node: Node, x: Marks) -> Marks:
    """Marks of each entry of an operation's operand,
    as its result has them after the operation moves the entries.

    For `array.T` of an array [3, 4], marks [2, 3, 1], two for each row, become marks [2, 1, 3].

    Args:
      records: Where the shapes of arrays are known,
        and numbers such as the index of `jnp.take(array, 2, 1)`.
      node: The operation.
      x: The marks [*any, *axes of the operand], with one entry along each axis on which they don't
        depend.

    Raises:
      NotFollowed: There is no rule for the operation, or there would be too many marks.
    """
    old, new = records.shapes(node)
    params = node.params
    first = x.ndim - len(old)  # axis k of the operand is axis first + k of the marks
    if node.name == "transpose":
        return x.transpose(*range(first), *axes_after(first, params["permutation"]))
    # `lax.reshape` may transpose first, for which there is no rule.
    is_reshape = node.name == "reshape" and params.get("dimensions") is None
    if is_reshape or node.name == "squeeze":
        return _reshaped(x, old, new)
    if node.name == "broadcast_in_dim":
        # Marks don't depend on the new axes.
        added = other_axes(len(new), params["broadcast_dimensions"])
        return np.expand_dims(x, axes_after(first, added))
    if node.name == "tile":
        # Along an axis on which marks don't depend, all copies have the same ones. For the `first`
        # axes NumPy adds a one each.
        reps = np.where(np.array(x.shape[first:]) > 1, params["reps"], 1)
        return np.tile(x, reps)
    if node.name == "rev":
        return np.flip(x, axes_after(first, params["dimensions"]))
    if node.name == "scan_stack":  # the same marks for each iteration
        return np.expand_dims(x, first)
    if node.name == "slice":
        # [start, stop, stride] for each axis, as in x[2:8:3].
        strides = params["strides"] or [1] * len(old)
        all_bounds = zip(
            params["start_indices"], params["limit_indices"], strides, strict=True
        )
        for axis, bounds in enumerate(all_bounds, start=first):
            if x.shape[axis] > 1:
                x = x.take(range(*bounds), axis)
        return x
    if node.name == "gather":
        return _gathered(records, node, x)
    raise NotFollowed


def _gathered(records: Records, node: Node, x: Marks) -> Marks:
    """Marks (positions of a layout, or a clip's factors) after a `gather`, as `moved_by` says.

    At one index that the program contains, as in `jnp.take(array, 2, 1)`, they are those of the
    slice there: marks [4, 16] become [4]. At any other, as in `jnp.take(array, tokens, 1)`, they
    must not depend on the axis: with tokens [2, 8] marks [4, 1] become [4, 1, 1].
    """
    old, new = records.shapes(node)
    index = records.known(node.inputs[1])
    numbers = node.params["dimension_numbers"]
    sizes = node.params["slice_sizes"]
    first = x.ndim - len(old)  # axis k of the operand is axis first + k of the marks
    if index is not None and np.size(index) == 1:
        (axis,) = numbers.start_index_map
        # XLA clamps the start into the array, or fills a slice outside of it with NaN.
        start = int(np.clip(np.reshape(index, ()), 0, old[axis] - sizes[axis]))
        if x.shape[first + axis] > 1:
            x = x.take(range(start, start + sizes[axis]), first + axis)
    for n, size in zip(x.shape[first:], sizes, strict=True):
        if n > size:
            raise NotFollowed  # marks depend on an axis of which an unknown slice is taken
    # A slice has one entry along the axes that are gone, so one mark is left along each of them.
    # Marks don't depend on the axes of the indices.
    x = x.squeeze(axes_after(first, _gone(numbers)))
    added = other_axes(len(new), numbers.offset_dims)
    return np.expand_dims(x, axes_after(first, added))


def _gone(numbers: Any) -> tuple[int, ...]:
    """Axes of the operand of a `gather` that the result does not have."""
    return (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)


def _reshaped(x: Marks, old: Shape, new: Shape) -> Marks:
    """Marks [*any, *old] of an array after its reshape to `new`.

    Positions [4, 1] of an array [4, 16], which depend on the row alone, become [64] for the shape
    [64], each 16 times, and [2, 2, 1] for the shape [2, 2, 16].
    """
    first = x.ndim - len(old)
    # Only axes on which marks depend get an entry for each index: [4, 16] becomes [4, 1].
    full = list(x.shape[:first])
    result = list(full)
    # [4, 6, 5] -> [24, 5]: the axes (0, 1) become the axis 0, and 2 becomes 1.
    for before, after in _regrouped(old, new):
        # If marks depend on one axis of a group, all axes of the group get an entry for each index.
        is_varying = any(x.shape[first + axis] > 1 for axis in before)
        full += [old[axis] if is_varying else 1 for axis in before]
        result += [new[axis] if is_varying else 1 for axis in after]
    if math.prod(full) > MOST:
        raise NotFollowed
    return np.broadcast_to(x, full).reshape(result)


def _regrouped(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """The axes of a reshape that become others: [4, 6, 5] -> [24, 5] gives ((0, 1), (0,)) and
    ((2,), (1,))."""
    # How many entries the first k axes have together, for each k: 1, 4, 24, 120 and 1, 24, 120.
    # [2, 0, 64] -> [2, 0, 4, 16] of an empty array: 0 counts as a size that no other axis has. In
    # [2, 0] -> [0, 4] no groups are left.
    old_sizes = np.cumprod([1, *(n or MOST + 1 for n in old)])
    new_sizes = np.cumprod([1, *(n or MOST + 1 for n in new)])
    if old_sizes[-1] != new_sizes[-1]:
        raise NotFollowed
    old_start = new_start = 0
    # A group ends where the axes so far have as many entries in both shapes. The first group, of
    # one entry, has leading axes of size 1, or no axes.
    for size in np.intersect1d(old_sizes, new_sizes):
        old_stop = int(np.searchsorted(old_sizes, size, "right")) - 1
        new_stop = int(np.searchsorted(new_sizes, size, "right")) - 1
        yield range(old_start, old_stop), range(new_start, new_stop)
        old_start = old_stop
        new_start = new_stop


@rule("transpose reshape squeeze rev slice scan_stack broadcast_in_dim tile")
def _one_operand(records: Records, node: Node) -> Sequence[Value]:
    """Operations that move the entries of their first operand, as `moved_by` says."""
    x, *_ = records.inputs(node)
    # A gain that is broadcast to an activation repeats along the other axes.
    if node.name == "broadcast_in_dim":
        x = x.repeating(records.shape(node.inputs[0]))
    # A loop may go over heads, along which its logits have no positions: they end here.
    if node.name == "scan_stack":
        x = x._replace(logits=(), mixed_by=())
    shape = records.shape(node.outputs[0])
    move = functools.partial(moved_by, records, node)
    return [x.map(lambda layout: layout.moved(shape, move))]


@rule("concatenate")
def _concatenate(records: Records, node: Node) -> Sequence[Value]:
    """Arrays one after the other: each keeps its positions, with holes where the others are.

    The parameters in them go on only if all arrays are made of parameters and numbers alone.
    """
    axis = node.params["dimension"]
    size = records.shape(node.outputs[0])[axis]
    values = records.inputs(node)
    result = dependent(values)
    placed = []
    start = 0
    for value, x in zip(values, node.inputs, strict=True):
        place = functools.partial(Layout.place, axis=axis, start=start, size=size)
        placed.append(value.map(place))
        start += records.shape(x)[axis]
    views: list[ParameterView] = []
    if result.is_weight:
        views = [view for value in placed for view in value.views]
        # Parts of one parameter are not put together again: what becomes of it is unknown then.
        if len({view.leaf for view in views}) < len(views):
            raise NotFollowed
    else:
        # The result is no weight any more: here the parameters end. Those that data are in, as
        # w * mask, were recorded where the data came in.
        weights = [value for value in values if value.is_weight]
        records.record_views(node, "joined with data", weights)
    # A softmax may take logits next to a sink, one more number for each query, which has no logits.
    # If several of the arrays have logits, they end here, and their attention is refused.
    with_logits = [x.logits for x in placed if x.stage not in ("", "sum")]
    logits = with_logits[0] if len(with_logits) == 1 else ()
    logits = follow_logits.normalized(logits, placed)
    # Parts of one product become one projection again, as the halves of rotary features do.
    projections = projections_of_all(records, placed)
    return [result._replace(views=tuple(views), projections=projections, logits=logits)]


@rule("gather")
def _gather(records: Records, node: Node) -> Sequence[Value]:
    """Slices at indices: `jnp.take(x, 2, 1)`, look-ups `table[tokens]`,
    and logits that labels choose."""
    x, indices = records.inputs(node)
    # The indices, if the program contains them as numbers.
    known = records.known(node.inputs[1])
    # One index that the program contains, as in `jnp.take(x, 2, axis)`: which entries the slice
    # has is known, and `moved_by` moves them.
    if known is not None and records.shape(node.inputs[1]) == (1,):
        return _one_operand(records, node)
    # For each axis of the result the axis of x that it has all of:
    # [None, None, 1] for `table[tokens]`.
    sources = _sources_of_gather(records, node)
    old, _ = records.shapes(node)
    # The axes along which the indices choose: axis 0 in `table[tokens]`.
    picked = other_axes(len(old), sources)
    # Whether entries of a parameter, or columns of a product, differ along these axes:
    # then the indices choose some.
    chooses = _differs_along(x, picked)
    # Constant indices are taken for labels below, as those of data are. But 1, 0, 3, 2, which have
    # each column once, choose none: the columns are in another order, and which of them are parts
    # then is not followed.
    if chooses and known is not None:
        count = math.prod(old[axis] for axis in picked)
        if np.array_equal(np.sort(known, None), range(count)):
            raise NotFollowed
    # Without a parameter in `x` this may be a cross-entropy, which takes the logit of the label:
    # if the indices are data, the product whose columns they choose may be an output head.
    if not x.views:
        records.record_choice_by_labels(x, picked, indices)
        # Any column may be chosen, so that all of them are one part. Which one the result has is
        # not known: it has no projection, and depends on both.
        if chooses:
            records.record_parts(x.projections)
            return [dependent([x, indices])]
    # A parameter is recorded as a look-up if data choose, and goes on: what is chosen may be an
    # expert's matrix. The columns of an array without parameters, none of which are chosen here,
    # go on too.
    return [looked_up(records, node, [x, indices], sources)]


def _sources_of_gather(records: Records, node: Node) -> list[int | None]:
    """For each axis of the result the operand's axis that it has all of;
    None for an axis of indices or of a part.

    `table[tokens]` of a table [256, 64] and tokens [2, 8] gives [None, None, 1].
    """
    numbers = node.params["dimension_numbers"]
    sizes = node.params["slice_sizes"]
    old, new = records.shapes(node)
    sources: list[int | None] = [None] * len(new)
    # `offset_dims` are the axes of the result that the slices have; all others are of the indices.
    kept = other_axes(len(old), _gone(numbers))
    for axis, source in zip(numbers.offset_dims, kept, strict=True):
        if sizes[source] == old[source]:
            sources[axis] = source
    return sources


def _differs_along(x: Value, axes: Sequence[int]) -> bool:
    """Whether entries along these axes come from different entries of a parameter,
    or columns of a product."""
    return any(part.layout.runs_along(axes) for part in (*x.views, *x.projections))


def looked_up(
    records: Records, node: Node, values: Sequence[Value], sources: Sequence[int | None]
) -> Value:
    """Entries of an array, the first of the values,
    at indices that are known only when it runs: the other values.

    Args:
      records: Gets a record of each parameter that data look up.
      node: The operation.
      values: The array, whose axes without a source count matrices from here on (`Layout.loops`),
        and its indices; none for what an iteration of a scan takes.
      sources: For each axis of the result the axis of the array that it has all of, if it is one.
        So [None, None, 1] of a table [256, 64] are its rows at indices [2, 8]. Along all other axes
        of the array one entry is taken.
    """
    x, *indices = values
    shape = records.shape(node.outputs[0])
    order = tuple(sources)

    # Tokens look up rows of an embedding; the index of a loop takes the weights of its layer.
    is_look_up = dependent(indices).depends_on & DATA
    views = []
    for view in x.views:
        # (table @ w)[tokens], a factored embedding: both are factors of a product (`inner`). Tokens
        # choose rows of the table, and w multiplies these, which is not followed: both are left to
        # names. A loop may take one such product after the other.
        if is_look_up and view.inner:
            raise NotFollowed
        # The axes along which one entry is taken. If the parameter does not differ along them, as a
        # bias that repeats, nothing of it is looked up.
        gone = other_axes(len(view.layout.shape), order)
        rows = view.layout.runs_along(gone)
        if is_look_up and rows:
            records.record(node, "looked up", view, rows=rows)
        # It is followed on: an index may choose the matrix of an expert, which is multiplied then.
        layout = view.layout.visit(gone).pick(order, shape)
        views.append(view._replace(layout=layout))
    # Columns of products go on: they differ along no axis that is gone, or a loop takes one after
    # the other, and the first stands for all. With a parameter in the array too, as in w * (x @ v),
    # they end: there `_gather` lets them come even if the index chooses some.
    columns = () if views else x.projections
    projections = move_each(columns, lambda layout: layout.pick(order, shape))
    return dependent(values)._replace(views=tuple(views), projections=projections)


@rule("scan_slice")
def _scan_slice(records: Records, node: Node) -> Sequence[Value]:
    """What an iteration of a scan takes of an array [iterations, ...], without its first axis."""
    rank = len(records.shape(node.outputs[0]))
    return [looked_up(records, node, records.inputs(node), range(1, 1 + rank))]


@rule(f"dynamic_slice {RESIZED}")
def _resize(records: Records, node: Node) -> Sequence[Value]:
    """The result of an operation that changes the sizes of some axes.
    Which entries it has is known only when it runs.

    A `dynamic_slice` takes one entry, as a loop takes its layer's weights, or a stretch, such as a
    block of columns. The others make shards of an array or put them together.
    """
    values = records.inputs(node)
    old, new = records.shapes(node)
    # An untiled `all_gather` adds an axis that counts devices.
    if len(old) != len(new):
        raise NotFollowed
    sources = [axis if n == old[axis] else None for axis, n in enumerate(new)]
    resized = other_axes(len(old), sources)
    # `looked_up` takes the first entry for all. So it may where a loop takes one after the other,
    # and not for a stretch or a shard, if columns or entries of a parameter differ along these
    # axes: then nothing is known of the result.
    is_entry = node.name == "dynamic_slice" and all(new[axis] == 1 for axis in resized)
    if not is_entry and _differs_along(values[0], resized):
        raise NotFollowed
    return [looked_up(records, node, values, sources)]
