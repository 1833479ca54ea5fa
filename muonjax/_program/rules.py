"""What operations entry by entry and reductions do to what is known of their operands; all rules by primitive."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from muonjax._program.graph import Node
from muonjax._program.layout import whole as all_of
from muonjax._program.values import (
    DATA,
    NOISE,
    PARAMETER,
    Image,
    Logits,
    Mark,
    Value,
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


# Numbers that are no function of the parameters.


@rule("iota")
def _iota(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    shape, axis = walk.shape(node.outputs[0]), node.params["dimension"]
    counting = all_of([n if k == axis else 1 for k, n in enumerate(shape)])
    return [Value(marks=(Mark("counts", counting),))]


@rule("eq")
def _eq(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    for counting, index in (values, values[::-1]):
        if index.kind & DATA and (found := [m for m in counting.marks if m.what == "counts"]):
            return [dependent(values)._replace(marks=(Mark("one hot", found[0].layout),))]
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
    if old == shape or not (x.kind or x.marks):
        return x
    beside = old or [-1] * len(shape)  # a scalar beside an array
    return x.repeated(old, [k if n == shape[k] else None for k, n in enumerate(beside)], shape)


@rule("add sub add_any select_n join complex")
def _sum(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    whole = dependent(values)
    if node.name in ("select_n", "join"):
        values = values[1:]
    elif len(values) == 2:  # Python's sum begins with 0
        values = [v for v, x in zip(values, node.inputs, strict=True) if not is_zero(walk, x)]
        if len(values) == 1:
            return values
    if whole.is_weight:
        return [_of_weights(walk, i, "added", values)]
    followed = dependent(values)
    if not followed.kind & PARAMETER:
        return [whole._replace(marks=_kept(values, "input"))]
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
        images = tuple(bent(walk, m, "something else is added", i) for m in images)
    return [whole._replace(images=images, logits=_sum_of_logits(i, node, values))]


def _kept(values: Sequence[Value], *what: str) -> tuple[Mark, ...]:
    return tuple(m for v in values for m in v.marks if m.what in what)


def is_zero(walk: Walk, value: int) -> bool:
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


def bent(walk: Walk, image: Image, why: str, i: int) -> Image:
    walk.record_parts(i, [image])
    return image._replace(after=image.after or (why, i))


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
    if not whole.kind & PARAMETER:
        return [whole._replace(marks=_kept(values, "input", "one hot"))]
    x, y = values = [walk.as_input(v) if v.is_weight and other.images else v for v, other in ((x, y), (y, x))]
    for v, labels in ((x, y), (y, x)):
        if v.is_weight and len(labels.axes("repeats")) == len(
            [n for n in walk.shape(node.outputs[0]) if n > 1]
        ):
            for t in v.terms:  # one factor for all of it, as a spectral norm
                walk.scales[t.leaf] |= labels.before
        walk.record_read(v, labels.axes("one hot"), labels)
    walk.record_terms(i, "multiplied", [v for v in values if v.is_weight])
    terms = tuple(t for v in values for t in v.terms)
    images: list[Image] = []
    for v, factor in ((x, y), (y, x)):
        is_bent = factor.kind & PARAMETER and factor.kind & DATA
        walk.record_meeting(v.images, factor)
        for m in v.images:
            own = walk.bit(m.product) & factor.before
            if is_bent and not own:
                walk.record_gate(m, factor.axes("repeats"))
            if is_bent or (is_div and v is y):
                why = "normalized" if own else "multiplied by another activation"
                images.append(bent(walk, m, why, i))
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
    return [whole._replace(terms=terms, images=merged, logits=scaled_logits(i, node, x, y))]


def _is_linear_or_normalized(image: Image) -> bool:
    return image.after is None or image.after[0] == "normalized"


def scaled_logits(i: int, node: Node, x: Value, y: Value) -> tuple[Logits, ...]:
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
    result = dependent([x])
    if node.name == "reduce_max" and x.logits and x.logits[0].stage == "logits":
        largest = x.logits[0]._replace(stage="largest")
        result = result._replace(logits=_without(Value(logits=(largest,)), node.params["axes"]).logits)
    return [result]


@rule("reduce_sum")
def _reduce_sum(walk: Walk, i: int, node: Node, values: Sequence[Value]) -> Sequence[Value]:
    (x,), axes = values, node.params["axes"]
    if x.is_weight:  # a norm of a parameter, or a mean
        return [dependent([x])]
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
    images = tuple(bent(walk, m, node.name, i) for v in values for m in v.images)
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
