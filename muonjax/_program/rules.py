"""What each primitive does to what is known of its operands: one rule for each."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from muonjax._program.graph import Node
from muonjax._program.values import (
    DATA,
    NOISE,
    PARAMETER,
    Image,
    Logits,
    Value,
    concatenated,
    dependent,
    summed,
)

if TYPE_CHECKING:
    from muonjax._program.walk import Walk

Rule = Callable[["Walk", int, Node, Sequence[Value]], Sequence[Value]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for these primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# Structure: entries move, nothing is computed.


@rule(
    """
    convert_element_type copy copy_p sharding_constraint layout_constraint reduce_precision optimization_barrier reshard
    mesh_cast pvary pcast to_varying psum psum2 psum_invariant pmax ppermute device_put name neg real imag conj
    stop_gradient rev
    """
)
def _same(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    return values


@rule("transpose squeeze broadcast_in_dim")
def _pick(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (at, *_), out = node.inputs, node.outputs[0]
    old, new = walk.shape(at), walk.shape(out)
    sources: list[int | None] = [None] * len(new)
    if node.name == "transpose":
        sources[:] = node.params["permutation"]
    elif node.name == "squeeze":
        sources[:] = [axis for axis in range(len(old)) if axis not in node.params["dimensions"]]
    else:
        for axis, to in enumerate(node.params["broadcast_dimensions"]):
            sources[to] = axis if old[axis] == new[to] else None
    return [_picked(values[0], sources, new)]


@rule("tile")
def _tile(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    return [values[0].map(lambda layout: layout.tile(node.params["reps"]))]


def _picked(x: Value, sources: Sequence[int | None], shape: Sequence[int]) -> Value:
    """Axis i is the axis `sources[i]`, or a new one along which entries repeat."""
    moved = x.map(lambda layout: layout.pick(sources, shape))
    repeats = (
        to for to, source in enumerate(sources) if source in x.repeats or (source is None and shape[to] > 1)
    )
    return moved._replace(
        one_hot=_positions(x.one_hot or (), sources) or None,
        counts=next(iter(_positions((x.counts,), sources)), None) if x.counts is not None else None,
        repeats=frozenset(repeats),
    )


def _positions(axes: Sequence[int], sources: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(sources.index(axis) for axis in axes if axis in sources)


@rule("reshape")
def _reshape(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    if [n for n in old if n > 1] == [n for n in new if n > 1]:  # only axes of one entry come and go
        longer = [axis for axis, n in enumerate(old) if n > 1]
        longer.reverse()
        return [_picked(values[0], [longer.pop() if n > 1 else None for n in new], new)]
    return [values[0].map(lambda layout: layout.reshape(new))]


@rule("slice")
def _slice(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    starts, stops = node.params["start_indices"], node.params["limit_indices"]
    steps, x = node.params["strides"] or [1] * len(starts), values[0]
    for axis, (start, stop, step) in enumerate(zip(starts, stops, steps, strict=True)):
        x = _cut(x, axis, start, stop, step)
    return [x]


def _cut(x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
    return x.map(lambda layout: layout.cut(axis, int(start), int(stop), int(step)))


@rule("split")
def _split(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    ends = list(itertools.accumulate(node.params["sizes"], initial=0))
    return [_cut(values[0], node.params["axis"], *at) for at in itertools.pairwise(ends)]


@rule("unstack")
def _unstack(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    axis, shape = node.params["axis"], walk.shape(node.outputs[0])
    kept = [k for k in range(len(shape) + 1) if k != axis]
    return [_picked(_cut(values[0], axis, k, k + 1), kept, shape) for k in range(len(node.outputs))]


@rule("concatenate")
def _concatenate(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    axis = node.params["dimension"]
    return [_put_together(walk, i, values, axis, [walk.shape(x)[axis] for x in node.inputs])]


@rule("stack")
def _stack(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    axis, shape = node.params["axis"], list(walk.shape(node.outputs[0]))
    shape[axis] = 1
    sources: list[int | None] = list(range(len(shape) - 1))
    sources.insert(axis, None)
    return [_put_together(walk, i, [_picked(v, sources, shape) for v in values], axis, [1] * len(values))]


def _put_together(walk: Walk, i: int, values: Sequence[Value], axis: int, sizes: Sequence[int]) -> Value:
    if len(values) == 1:
        return values[0]
    whole, starts = dependent(values), [sum(sizes[:k]) for k in range(len(sizes))]
    if whole.is_weight:
        terms = (
            t._replace(layout=t.layout.place(axis, start, sum(sizes)))
            for v, start in zip(values, starts, strict=True)
            for t in v.terms
        )
        return whole._replace(terms=tuple(terms))
    values = [walk.as_input(v) if v.is_weight else v for v in values]
    walk.record_terms(i, "joined with data", values)
    images = concatenated(values, axis, sizes)
    if not all(v.images for v in values):
        images = tuple(_bent(walk, m, "put together with something else", i) for m in images)
    logits = tuple(
        x._replace(layout=x.layout.place(axis, start, sum(sizes)))
        for v, start in zip(values, starts, strict=True)
        for x in v.logits
    )
    if len(logits) > 1 and logits[0].stage == "logits":
        logits = (logits[0]._replace(problem=logits[0].problem or ("its logits are joined with others", i)),)
    return whole._replace(images=images, logits=logits)


@rule("dynamic_update_slice")
def _update(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    x, update = values[:2]
    old, new = walk.shape(node.inputs[1]), walk.shape(node.outputs[0])
    sources = [axis if n == m else None for axis, (n, m) in enumerate(zip(old, new, strict=True))]
    wider = [axis for axis, source in enumerate(sources) if source is None]
    if x.terms or update.terms or not _is_zero(walk, node.inputs[0]) or _atoms(update, wider):
        return walk.unknown(i, node, values)
    return [dependent(values)._replace(images=_picked(update, sources, new).images)]  # zeros around it


def _atoms(value: Value, axes: Sequence[int]) -> bool:
    return any(m.layout.atoms(axes) for m in value.images)


@rule("pad")
def _pad(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    x, shape = values[0], walk.shape(node.outputs[0])
    for axis, (low, high, inside) in enumerate(node.params["padding_config"]):
        if low or high or inside:
            at = (axis, max(low, 0), shape[axis])
            if inside or low < 0 or high < 0:
                return [dependent(values)]
            x = x.map(lambda layout, at=at: layout.place(*at))
    return [x._replace(kind=x.kind | values[1].kind)]


@rule("gather")
def _gather(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    x, indices = values
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    old, new = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    by_data = bool(indices.kind & DATA)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(old)) if axis not in gone]
    sources: list[int | None] = [None] * len(new)
    start = walk.known(node.inputs[1])
    if start is not None and walk.shape(node.inputs[1]) == (1,):  # `jnp.take(x, 2, axis)`
        (axis,) = numbers.start_index_map
        first = min(max(int(start), 0), old[axis] - sizes[axis])
        sources = [kept[numbers.offset_dims.index(at)] for at in range(len(new))]
        return [_picked(_cut(x, axis, first, first + sizes[axis]), sources, new)]
    for at, axis in zip(numbers.offset_dims, kept, strict=True):
        sources[at] = axis if sizes[axis] == old[axis] else None
    picked = [axis for axis in range(len(old)) if axis not in sources and old[axis] > 1]
    if not x.terms:
        walk.record_read(x, picked, indices)
        if _atoms(x, picked):
            walk.record_parts(i, x.images)
            return [dependent(values)]
        return [dependent(values)._replace(images=_picked(x, sources, new).images)]
    return [_looked_up(walk, i, x, picked, sources, new, by_data, dependent(values))]


def _looked_up(
    walk: Walk, i: int, x: Value, picked: Sequence[int], sources: Sequence[int | None], shape: Sequence[int],
    by_data: bool, result: Value,
) -> Value:  # fmt: skip
    """Entries of `picked` axes of a parameter, at indices that are known only when it runs."""
    terms = []
    for k, t in enumerate(x.terms):
        if by_data and t.inner and not t.layout.atoms(picked):  # a table times a matrix: rows of the product
            every = t.layout.atoms(range(len(t.layout.axes)))
            walk.record(i, "product", t, k=k, rows=t.inner[0], columns=every)
            continue
        rows = t.layout.atoms(picked)
        layout = t.layout._replace(loops=(*t.layout.loops, *rows)).pick(sources, shape)
        if by_data and rows:
            walk.record(i, "looked up", t, rows=rows)
            t = t._replace(looked=(*t.looked, i))
        terms.append(t._replace(layout=layout))
    return result._replace(terms=tuple(terms))


@rule("dynamic_slice")
def _dynamic_slice(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    x, old, new = values[0], walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    starts = [walk.known(s) for s in node.inputs[1:]]
    if all(s is not None for s in starts):
        for axis, (start, n, m) in enumerate(zip(starts, old, new, strict=True)):
            first = min(max(int(start), 0), n - m)
            x = _cut(x, axis, first, first + m)
        return [x]
    sources = [axis if n == m else None for axis, (n, m) in enumerate(zip(old, new, strict=True))]
    picked = [axis for axis, source in enumerate(sources) if source is None]
    by_data = any(v.kind & DATA for v in values[1:])
    if not x.terms:
        images = tuple(m.map(lambda layout: layout.pick(sources, new)) for m in x.images)
        return [dependent(values)._replace(images=images)]
    return [_looked_up(walk, i, x, picked, sources, new, by_data, dependent(values))]


@rule("scan_slice")
def _scan_slice(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (x,) = values
    for t in x.terms:
        if t.layout.atoms([0]):
            walk.layers[node.params["scan"]].add(t.leaf)
    return [x.map(lambda layout: layout.loop(0))]


@rule("scan_stack")
def _scan_stack(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (x,), shape = values, walk.shape(node.outputs[0])
    return [x.map(lambda layout: layout.pick([None, *range(len(shape) - 1)], shape))._replace(logits=())]


@rule("shard unshard all_gather all_gather_invariant reduce_scatter psum_scatter all_to_all")
def _resize(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    axes = [a if isinstance(a, tuple) else (a,) if a else () for a in node.params.get("spec", ())]
    return [
        x.map(lambda layout, n=out: layout.resize(walk.shape(n), axes))
        if len(walk.shape(at)) == len(walk.shape(out))
        else x.opaque()
        for x, at, out in zip(values, node.inputs, node.outputs, strict=True)
    ]


# Numbers that are no function of the parameters.


@rule("iota")
def _iota(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    return [Value(counts=node.params["dimension"])]


@rule("eq")
def _eq(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    for counting, index in (values, values[::-1]):
        if counting.counts is not None and index.kind & DATA:
            return [dependent(values)._replace(one_hot=(counting.counts,))]
    return [dependent(values)]


@rule(
    "random_bits random_wrap random_unwrap random_seed random_fold_in random_split random_gamma threefry2x32 "
    "rng_bit_generator rng_uniform"
)
def _random(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    return [Value(NOISE)] * len(node.outputs)


# Of a number that stands in the program, as an index that may be negative.
FOLDED: dict[str, Callable[..., Any]] = {
    "lt": operator.lt,
    "add": operator.add,
    "select_n": lambda which, *cases: cases[int(which)],
    **dict.fromkeys(["broadcast_in_dim", "convert_element_type", "reshape", "squeeze"], lambda x: x),
}


# Sums, products, and everything else entry by entry.


def spread(x: Value, old: Sequence[int], shape: Sequence[int]) -> Value:
    """Repeated along the axes where it has one entry: operations entry by entry do so by themselves."""
    if old == shape or not (x.kind or x.counts is not None):
        return x
    old = old or [-1] * len(shape)  # a scalar beside an array
    return _picked(x, [k if n == shape[k] else None for k, n in enumerate(old)], shape)


@rule("add sub add_any select_n join complex")
def _sum(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    whole = dependent(values)
    if node.name in ("select_n", "join"):
        values = values[1:]
    elif len(values) == 2:  # Python's sum begins with 0
        values = [v for v, x in zip(values, node.inputs, strict=True) if not _is_zero(walk, x)]
        if len(values) == 1:
            return values
    if whole.is_weight:
        return [_of_weights(walk, i, "added", values)]
    followed = dependent(values)
    if not followed.kind & PARAMETER:
        return [whole._replace(inputs=tuple(m for v in values for m in v.inputs))]
    if node.name not in ("select_n", "join"):
        values = [walk.as_input(v) if v.is_weight else v for v in values]
    weights = [v for v in values if v.is_weight]
    activations = [v for v in values if v.images or v.logits]
    walk.record_terms(i, "added", weights)
    if not activations:
        # A masked parameter, or one of several that data choose or mix.
        followed_terms = all(v.terms for v in values if v.kind & PARAMETER)
        return [whole._replace(terms=tuple(t for v in values for t in v.terms) if followed_terms else ())]
    if any(not m.linear for v in activations for m in v.images):
        for v in activations:
            walk.record_parts(i, v.images)
    images = summed(activations)
    walk.record_sum(images)
    biases = tuple(t._replace(layout=t.layout.settled) for v in weights for t in v.terms)
    if biases:
        images = tuple(m._replace(biases=m.biases + biases) for m in images)
    plain = node.name in ("select_n", "join")  # zeros or the like instead: a mask
    strangers = [
        v for v in values if not v.is_weight and not v.images and not (plain and not v.kind & PARAMETER)
    ]
    if strangers and node.name != "complex":
        images = tuple(_bent(walk, m, "added to something else", i) for m in images)
    return [whole._replace(images=images, logits=_sum_of_logits(i, node, values))]


def _is_zero(walk: Walk, value: int) -> bool:
    known = walk.known(value)
    return known is not None and np.ndim(known) == 0 and known == 0


def _of_weights(walk: Walk, i: int, kind: str, values: Sequence[Value]) -> Value:
    """Parameters entry by entry are used as they are; one that repeats, as a bias or a gain does, is only that."""
    cover, terms = [_cover(v) for v in values], []
    several = sum(bool(v.terms) for v in values) > 1
    for v, mine in zip(values, cover, strict=True):
        for t in v.terms:
            if any(mine < other for other in cover) or (several and t.noisy):
                walk.record(i, kind, t)
            else:
                terms.append(t)
    return dependent(values)._replace(terms=tuple(dict.fromkeys(terms)))


def _cover(v: Value) -> frozenset[int]:
    """The axes along which a value made of parameters differs."""
    return frozenset(a for t in v.terms for a, atoms in enumerate(t.layout.axes) if t.layout.atoms([a]))


def _sum_of_logits(i: int, node: Node, values: Sequence[Value]) -> tuple[Logits, ...]:
    held = [v for v in values if v.logits]
    if not held:
        return ()
    first = held[0].logits[0]
    others = [v for v in values if v is not held[0]]
    if first.stage == "weights":  # of several softmaxes
        return tuple(dict.fromkeys(x for v in held for x in v.logits if x.stage == "weights"))
    if node.name in ("select_n", "join"):
        if any(x.product != first.product for v in held for x in v.logits):
            first = first._replace(problem=first.problem or ("its logits are one of two kinds", i))
        return (_at(first, node) if first.stage == "logits" else first,)
    (other,) = others
    if other.logits:
        second = other.logits[0]
        if "largest" in (first.stage, second.stage):  # the largest logit is subtracted
            return (first if first.stage == "logits" else second,)
        return (first._replace(problem=first.problem or ("a second term is added to the logits", i)),)
    if other.kind & PARAMETER:
        learned = ("a learned bias is added to the logits", i)
        return (_at(first, node)._replace(problem=first.problem or learned),)
    raw = node.inputs[values.index(held[0])], first.layout  # as they are here, not where they were scaled
    return (_at(first, node)._replace(raw=first.raw or raw),)


def _at(logits: Logits, node: Node) -> Logits:
    return logits._replace(value=node.outputs[0], seen=logits.layout)


def _bent(walk: Walk, image: Image, why: str, i: int) -> Image:
    walk.record_parts(i, [image])
    return image._replace(linear=False, after=image.after or (why, i))


@rule("mul div")
def _mul(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    whole, (x, y) = dependent(values), values
    is_div = node.name == "div"
    if whole.is_weight:
        if not (x.is_weight and y.is_weight):
            noisy = bool((x.kind | y.kind) & NOISE)
            terms = tuple(t._replace(noisy=t.noisy or noisy) for v in values for t in v.terms)
            return [whole._replace(terms=terms)]
        return [_of_weights(walk, i, "multiplied", values)]
    one_hot = x.one_hot or y.one_hot
    if not whole.kind & PARAMETER:
        return [whole._replace(one_hot=one_hot, inputs=x.inputs + y.inputs)]
    x, y = values = [walk.as_input(v) if v.is_weight and other.images else v for v, other in ((x, y), (y, x))]
    for v, labels in ((x, y), (y, x)):
        if v.is_weight and len(labels.repeats) == len([n for n in walk.shape(node.outputs[0]) if n > 1]):
            for t in v.terms:  # one factor for all of it, as a spectral norm
                walk.scales[t.leaf] |= labels.before
        walk.record_read(v, labels.one_hot or (), labels)
    walk.record_terms(i, "multiplied", [v for v in values if v.is_weight])
    terms = tuple(t for v in values for t in v.terms)
    images: list[Image] = []
    for v, factor in ((x, y), (y, x)):
        bent = factor.kind & PARAMETER and factor.kind & DATA
        walk.record_meeting(v.images, factor)
        for m in v.images:
            own = walk.bit(m.product) & factor.before
            if bent and not own:
                walk.record_gate(m, factor.repeats)
            if bent or (is_div and v is y):
                why = "normalized" if own else "multiplied by another activation"
                images.append(_bent(walk, m, why, i))
            else:
                images.append(m)
    if (
        x.images
        and y.images
        and x.before != y.before
        and all(map(_is_linear_or_normalized, x.images + y.images))
    ):
        walk.entrywise[node.outputs[0]] = x.images + y.images
    merged = summed([whole._replace(images=tuple(images))]) if len(images) > 1 else tuple(images)
    return [whole._replace(terms=terms, images=merged, logits=_scaled_logits(i, node, x, y))]


def _is_linear_or_normalized(image: Image) -> bool:
    return image.linear or (image.after or ("",))[0] == "normalized"


def _scaled_logits(i: int, node: Node, x: Value, y: Value) -> tuple[Logits, ...]:
    for v, factor in ((x, y), (y, x)):
        if v.logits:
            first = v.logits[0]
            if first.stage != "logits":
                return v.logits
            problem = first.problem
            if factor.kind & DATA and factor.kind & PARAMETER:
                problem = problem or ("the logits are multiplied by another activation", i)
            if first.raw is not None:
                problem = problem or ("something is added to the logits before they are scaled", i)
            return (_at(first, node)._replace(problem=problem),)
    return ()


@rule("exp exp2 logistic")
def _exp(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (x,) = values
    (result,) = _elementwise(walk, i, node, values)
    if x.logits and x.logits[0].stage == "logits":
        result = result._replace(logits=(x.logits[0]._replace(stage="weights"),))
    return [result]


@rule("max min clamp")
def _max(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (result,) = _elementwise(walk, i, node, values)
    found = next((x for v in values for x in v.logits), None)
    if found is not None and found.stage != "logits":
        result = result._replace(logits=(found,))
    return [result]


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (x,) = values
    walk.record_parts(i, x.images)
    result = x.opaque()
    if node.name == "reduce_max" and x.logits and x.logits[0].stage == "logits":
        largest = x.logits[0]._replace(stage="largest")
        result = result._replace(logits=_without(Value(logits=(largest,)), node.params["axes"]).logits)
    return [result]


@rule("reduce_sum")
def _reduce_sum(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (x,), axes = values, node.params["axes"]
    if x.is_weight:  # a norm of a parameter, or a mean
        return [x.opaque()]
    towers = walk.entrywise.get(node.inputs[0], ())
    if len({m.product for m in towers if m.layout.atoms(axes)}) > 1:  # a product over features, as by einsum
        walk.consume(i, *node.inputs)
    for image in x.images:
        if image.linear:
            walk.summed[image.product].update(image.layout.atoms(axes))
    linear = tuple(image for image in x.images if image.linear)
    totals = tuple(x._replace(stage="largest") for x in x.logits if x.stage == "weights")
    return [_without(x._replace(terms=(), images=linear, logits=totals), axes)]


def _without(x: Value, axes: Sequence[int]) -> Value:
    def kept(layout: Any) -> Any:
        return layout.pick(
            [a for a in range(len(layout.axes)) if a not in axes], [1] * (len(layout.axes) - len(axes))
        )

    return x.map(kept)


def _elementwise(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    """Any function entry by entry: what it makes is no linear image any more."""
    whole = dependent(values)
    if whole.is_weight and node.name in _BENDS:
        values = [walk.as_input(v) for v in values]
        whole = dependent(values)
    if whole.is_weight:  # an exponential of a parameter, say; it is still used as the parameter is
        several = [v for v in values if v.terms]
        return [whole._replace(terms=several[0].terms if len(several) == 1 else ())]
    walk.record_terms(i, node.name, [v for v in values if v.is_weight])
    images = tuple(_bent(walk, m, node.name, i) for v in values for m in v.images)
    if len({m.product for m in images}) < len(images):
        images = summed([Value(images=images)])
    logits = ()
    if held := [v.logits[0] for v in values if v.logits]:
        first = held[0]
        capped = ("the logits are capped" if node.name == "tanh" else f"the logits pass {node.name}", i)
        is_bent = first.stage == "logits"
        logits = (_at(first, node)._replace(problem=first.problem or capped) if is_bent else first,)
    return [whole._replace(images=images, logits=logits)]


_BENDS = frozenset({"tanh", "logistic", "erf", "erfc", "max", "sin", "cos"})  # of activations, not of weights
_FUNCTIONS = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clz cos cosh
    cumlogsumexp cummax cumprod cumsum digamma erf erf_inv erfc expm1 floor ge gt igamma integer_pow is_finite le lgamma
    log log1p lt ne nextafter not and or xor polygamma population_count pow random_gamma_grad rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh
"""
rule(_FUNCTIONS)(_elementwise)
SPREADING = frozenset(f"{_FUNCTIONS} add sub mul div max min add_any select_n eq complex clamp".split())
