"""What operations entry by entry and reductions do to what is known of their operands; all rules by primitive."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from muonjax._inspect import softmax
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import Layout, whole
from muonjax._inspect.values import (
    ADDED,
    CHOICES,
    MULTIPLIED,
    NOISE,
    PARAMETER,
    SUMS,
    Image,
    Mark,
    Term,
    Value,
    all_images,
    dependent,
)

Rule = Callable[[Walk, Node], Sequence[Value]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for these primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# Operations that mix columns: what they are given is a part.
_MIXES = """
    approx_top_k bitcast_convert_type cholesky custom_linear_solve dynamic_update_slice eig eigh fft lu mulhi qr
    ragged_all_to_all reduce reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_gather_add select_and_scatter
    select_and_scatter_add sort svd swap top_k triangular_solve tridiagonal_solve zeta
"""
_MIXING = frozenset(_MIXES.split())


def unknown(walk: Walk, node: Node) -> Sequence[Value]:
    """An operation that is not followed.

    One without a rule may be an exponential, a product, or something that is one hot; a call may be a kernel of
    attention, or go to the host.
    """
    values = walk.operands(node)
    result = dependent(values)
    is_call = "call" in node.name or "attention" in node.name
    has_no_rule = not is_call and node.name not in RULES
    if has_no_rule:
        result = result._replace(no_rule=node.index, weights=max(result.weights, result.scores))
        walk.normalized.add(result.weights)
        walk.no_rule.add(node.index)
    # Without data it may be a penalty, such as a determinant.
    has_data = any(v.depends_on and not v.is_weight for v in values)
    weights = [v for v in values if v.is_weight or has_no_rule]
    walk.record_terms(node, node.name, weights, "unknown" if has_data else "alone")
    images = [m for v in values for m in v.images]
    if has_no_rule:
        images += _behind_logits(walk, node, values)
    walk.record_parts(images)
    if not is_call and node.name not in _MIXING:
        for m in images:
            if m.apart or has_no_rule:  # it may choose some of the columns, or use some together
                walk.record(node, "unknown", m.product.use.term, node.name)
    arrays = [x for x in node.inputs if walk.values[x].is_activation and walk.shape(x)]
    if is_call and len(arrays) > 2:
        parts = {(m.product, m.layout.region): m for m in images}
        walk.opaque[node.index] = tuple(parts.values())
        walk.consumers.add(node.index)
    return [result] * len(node.outputs)


def _behind_logits(walk: Walk, node: Node, values: Iterable[Value]) -> list[Image]:
    """The queries and keys of logits that the operation takes: of these it makes something unknown."""
    images = []
    for logits in [x for v in values for x in v.logits]:
        walk.unseen[logits.product] = node.index
        for side in walk.pairs[logits.product]:
            images += side.value.images
    return images


RULES |= dict.fromkeys([*_MIXING, "pad"], unknown)


# Numbers that are no function of the parameters.


@rule("iota")
def _iota(walk: Walk, node: Node) -> Sequence[Value]:
    shape = [1] * len(walk.shape(node.outputs[0]))
    axis = node.params["dimension"]
    shape[axis] = walk.shape(node.outputs[0])[axis]
    return [Value(marks=(Mark("counts", whole(tuple(shape))),))]


@rule("eq")
def _eq(walk: Walk, node: Node) -> Sequence[Value]:
    """An index equals one of the numbers that count along an axis, so the result is one hot along it."""
    values = spread_operands(walk, node)
    result = dependent(values)
    first, second = (v.axes("counts") for v in values)
    if not set(first).isdisjoint(second):
        return [result]
    counts = [m for v in values for m in v.marks if m.what == "counts"]
    return [result._replace(marks=tuple(m._replace(what="one hot") for m in counts))]


@rule(
    "axis_index platform_index random_bits random_clone random_wrap random_unwrap random_seed random_fold_in "
    "random_split random_gamma threefry2x32 rng_bit_generator rng_uniform"
)
def _number(walk: Walk, node: Node) -> Sequence[Value]:
    """The number of a device, or random ones."""
    return [Value(0 if node.name.endswith("_index") else NOISE)] * len(node.outputs)


# Operations on numbers that the program contains, such as an index that may be negative.
FOLDED: dict[str, Callable[..., Any]] = {
    "lt": operator.lt,
    "add": operator.add,
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
}
for _name in ("broadcast_in_dim", "convert_element_type", "pcast", "pvary", "reshape"):
    FOLDED[_name] = lambda x: x


# Entry by entry. What is linear in an operand leaves its images linear: sums and choices in all together, a product in
# each, a quotient in the first. All other functions bend them.

_SCALES = ("mul", "div")
_MOST = 6  # images of one value that are followed
_ENTRYWISE = """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex cos cosh cumlogsumexp cummax cummin cumprod cumsum digamma div erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igammac integer_pow is_finite join le lgamma log log1p log2 logistic lt max min mul ne nextafter not
    and one_minus_square or xor polygamma polynomial population_count pow random_gamma_grad rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
"""


def spread_operands(walk: Walk, node: Node) -> list[Value]:
    """The operands of an operation entry by entry, each repeated along the axes where it has one entry."""
    values = walk.operands(node)
    if node.name == "join":
        return values
    shape = walk.shape(node.outputs[0])
    return [_spread(v, walk.shape(x), shape) for v, x in zip(values, node.inputs, strict=True)]


def _spread(value: Value, old: Sequence[int], shape: Sequence[int]) -> Value:
    if old == shape or not (value.depends_on or value.marks):
        return value
    beside = old or [-1] * len(shape)  # a scalar next to an array
    sources = [k if n == shape[k] else None for k, n in enumerate(beside)]
    return value.repeated(old, sources, shape)


@rule(_ENTRYWISE)
def _entrywise(walk: Walk, node: Node) -> Sequence[Value]:
    return [entrywise(walk, node, spread_operands(walk, node))]


def entrywise(walk: Walk, node: Node, values: Sequence[Value]) -> Value:
    """The result of an operation entry by entry on operands of its shape."""
    result, chooser, operands = dependent(values), Value(), node.inputs
    if node.name in CHOICES:
        chooser, *values = values
        operands = operands[1:]
        if chosen := _chosen_parts(values):
            for term in chosen:
                walk.record(node, "unknown", term, node.name)
            return result
    elif node.name in SUMS:
        # Python's `sum` begins with 0.
        values = [v for v, x in zip(values, operands, strict=True) if not is_zero(walk, x)]
        if len(values) == 1:
            (value,) = values
            changed = node.name == "sub"
            return value._replace(logits=softmax.scaled(node, value)) if changed else value
    if result.is_weight:
        return result._replace(terms=_of_weights(walk, node, values))
    if not any(v.depends_on & PARAMETER for v in values):
        return result._replace(marks=_marks(node, values))
    return _of_activations(walk, node, result, chooser, values, operands)


def _chosen_parts(values: Sequence[Value]) -> list[Term]:
    """Parameters of which one of several parts is chosen, before or after a product with them."""
    regions: dict[Any, set[Any]] = {}
    terms: list[tuple[Any, Term]] = []
    for v in values:
        for t in v.terms:
            regions.setdefault(t.leaf, set()).add(t.layout.region)
            terms.append((t.leaf, t))
        for m in v.images:
            regions.setdefault(m.product, set()).add(m.layout.region)
            terms.append((m.product, m.product.use.term))
    return [term for origin, term in terms if len(regions[origin]) > 1]


def is_zero(walk: Walk, value: int) -> bool:
    known = walk.known(value)
    return known is not None and np.ndim(known) == 0 and known == 0


def _marks(node: Node, values: Sequence[Value]) -> tuple[Mark, ...]:
    """What stays true of numbers without parameters: a sum of an argument's entries is made of these still."""
    kept: tuple[str, ...] = ()
    if node.name in _SCALES:
        kept = ("input", "one hot")
    elif node.name in SUMS:
        kept = ("input",)
    return tuple(m for v in values for m in v.marks if m.what in kept)


def _of_weights(walk: Walk, node: Node, values: Sequence[Value]) -> tuple[Term, ...]:
    """What is left of parameters in a sum or a product of parameters, such as a weight and its mask.

    One that repeats along an axis of another, as a bias or a gain does, is recorded as that and not followed on.
    """
    is_sum, is_scale = node.name in SUMS, node.name in _SCALES
    several = sum(bool(v.terms) for v in values) > 1
    noisy = is_scale and any(v.depends_on & NOISE and not v.is_weight for v in values)
    varying = [_varying(v) for v in values]
    wider = list(varying)
    if is_sum:  # of a column and a row, both repeat
        wider.append(frozenset().union(*varying))
    terms = []
    for v, axes in zip(values, varying, strict=True):
        for t in v.terms:
            if _is_statistic(t, axes, values):
                continue
            if any(axes < others for others in wider) or (several and t.noisy):
                walk.record(node, "other", t, ADDED if is_sum else MULTIPLIED)
            else:
                terms.append(t._replace(noisy=t.noisy or noisy))
    return tuple(dict.fromkeys(terms))


def _is_statistic(term: Term, axes: frozenset[int], values: Sequence[Value]) -> bool:
    """Whether an operand has all of the parameter of which this is a mean, say, that differs along `axes`."""
    for v in values:
        if axes < _varying(v) and any(t.leaf == term.leaf for t in v.terms):
            return True
    return False


def _varying(v: Value) -> frozenset[int]:
    """The axes along which a value made of parameters differs."""
    return frozenset().union(*(t.layout.varying for t in v.terms))


def _of_activations(
    walk: Walk,
    node: Node,
    result: Value,
    chooser: Value,
    values: Sequence[Value],
    operands: Sequence[int],
) -> Value:
    """The result where some operand is made of parameters and data."""
    name = node.name
    is_sum, is_scale = name in SUMS, name in _SCALES
    is_exponential = name in softmax.EXPONENTIALS or name == "pow"
    weights = [v for v in values if v.is_weight]
    walk.record_terms(node, ADDED if is_sum else MULTIPLIED if is_scale else name, weights)
    if is_scale:
        walk.record_factors(node, *values)
    elif is_sum:
        walk.record_meeting_parts(values)
    if is_exponential:
        result = result._replace(weights=result.scores)
    held = [v._replace(images=_images(walk, node, v, values)) for v in values]
    images = latest(walk, node, all_images(held))
    if is_sum:
        if name not in CHOICES:
            walk.record_sum(images)
        biases = [t for v in weights for t in v.terms]
        images = tuple(
            m._replace(biases=tuple(dict.fromkeys((*m.biases, *biases)))) for m in images
        )
    logits = softmax.after(walk.graph, node, chooser, values, operands)
    if is_exponential:
        is_followed = any(x.lost < 0 or x.product == result.scores for x in logits)
        if name == "pow" or not is_followed:
            walk.unseen[result.scores] = node.index
    terms: tuple[Term, ...] = ()
    if is_scale or (is_sum and not images and not logits and _all_parameters(values)):
        terms = tuple(t for v in values for t in v.terms)
    columns = [m for v in values for m in v.marks if m.what == "columns"]
    latest_product = max((m.product for m in columns), default=-1)
    marks = tuple(dict.fromkeys(m for m in columns if m.product == latest_product))
    result = result._replace(terms=terms, images=images, logits=logits, marks=marks)
    # A residual stream is not one hot, whatever is added to it.
    return result._replace(no_rule=-1) if is_sum and images else result


def _all_parameters(values: Sequence[Value]) -> bool:
    """Whether all that is made of parameters is a masked one, or one of several that data choose or mix."""
    return all(v.terms for v in values if v.depends_on & PARAMETER)


def _images(walk: Walk, node: Node, value: Value, values: Sequence[Value]) -> tuple[Image, ...]:
    """The images in one of the operands after the operation."""
    name = node.name
    if name in SUMS:
        # A mask puts zeros or the like in the place of what it hides.
        added = [u for u in values if not u.is_weight and not u.images]
        added = [u for u in added if u.depends_on or name not in CHOICES]
        if not added:
            return value.images
        return tuple(
            bent(walk, m, node, all(_keeps_apart(m, u) for u in added)) for m in value.images
        )
    if name in _SCALES:
        factor = values[1] if value is values[0] else values[0]
        is_divisor = name == "div" and value is values[1]
        if not factor.is_activation and not is_divisor:
            return value.images
        itself = {
            (m.product, m.layout) for m in factor.images
        }  # times a function of it, as in SiLU
        return tuple(
            bent(
                walk,
                m,
                node,
                (m.product, m.layout) in itself
                or (factor.is_activation and _keeps_apart(m, factor)),
            )
            for m in value.images
        )
    # Running sums, maxima and products mix the columns along an axis.
    axes = [node.params["axis"]] if "axis" in node.params else []
    images = []
    for m in value.images:
        is_mixed = bool(m.layout.atoms(axes))
        if is_mixed:
            walk.record_reduced([m], axes)
        images.append(bent(walk, m, node, not is_mixed or bool(m.layout.atoms_beside(axes))))
    return tuple(images)


def _keeps_apart(image: Image, other: Value) -> bool:
    """Whether it comes from elsewhere, or is a statistic of some columns, as in a norm of each head."""
    if not image.product.bit & other.depends_on:
        return True
    repeats = other.axes("repeats")
    return bool(repeats and not other.images and image.layout.atoms_beside(repeats))


def bent(walk: Walk, image: Image, node: Node, apart: bool = False) -> Image:
    """After an operation that does not commute with scaling; `apart` where each entry is still one column's."""
    if not apart:
        walk.record_parts([image])
    bent_by = node.index if image.linear else image.bent_by
    return image._replace(bent_by=bent_by, apart=image.apart and apart)


def latest(walk: Walk, node: Node, images: tuple[Image, ...]) -> tuple[Image, ...]:
    """Those that are followed on, of the many in a residual stream, which is the sum of all layers."""
    if len(images) <= _MOST:
        return images
    # A product with data has summed over the columns of some.
    summed = {m for m in images if not m.layout.atoms(range(len(m.layout.shape)))}
    walk.record_parts(summed)
    images = tuple(m for m in images if m not in summed)
    if len(images) <= _MOST:
        return images
    return tuple(bent(walk, m, node) for m in images)[-_MOST:]


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(walk: Walk, node: Node) -> Sequence[Value]:
    (value,) = walk.operands(node)
    walk.record_reduced(value.images, node.params["axes"])
    logits = ()
    if node.name == "reduce_max" and value.logits and value.logits[0].stage == "logits":
        logits = (value.logits[0]._replace(stage="largest"),)
    return [_without(dependent([value])._replace(logits=logits), node)]


@rule("reduce_sum")
def _reduce_sum(walk: Walk, node: Node) -> Sequence[Value]:
    (value,), axes = walk.operands(node), node.params["axes"]
    terms = _reduced_terms(value, axes)
    factors = walk.entrywise.get(node.inputs[0], ())
    if len({m.product for m in factors if m.layout.atoms(axes)}) > 1:
        # The features of two activations, multiplied and added up: a product of these, as by an einsum.
        walk.consumers.add(node.index)
        value = value._replace(scores=node.index)
    _record_normalized(walk, value, axes)
    linear = tuple(m for m in value.images if m.linear)
    walk.record_reduced([m for m in value.images if not m.linear], axes)
    for m in linear:
        m.product.added_up.update(m.layout.atoms(axes))
    totals = tuple(x._replace(stage="largest") for x in value.logits if x.stage == "weights")
    return [_without(value._replace(terms=terms, images=linear, logits=totals), node)]


def _record_normalized(walk: Walk, value: Value, axes: Sequence[int]) -> None:
    """A sum of exponentials of a product normalizes them, but for one along the columns of a parameter, a router's."""
    images = [m for m in value.images if m.product.use.node == value.weights]
    if any(m.layout.atoms(axes) for m in images):
        walk.routers.add(value.weights)
        return
    if images or (value.weights, 0) not in walk.products:
        walk.normalized.add(value.weights)


def _reduced_terms(value: Value, axes: Sequence[int]) -> tuple[Term, ...]:
    """Parameters that are summed: a mixture of several, or a product of two; nothing of a norm or a penalty."""
    terms = [t for t in value.terms if t.layout.atoms(axes) and t.layout.varying.difference(axes)]
    are_factors = len({t.layout.varying.difference(axes) for t in terms}) > 1
    reduced = []
    for k, t in enumerate(terms):
        summed = t.layout.atoms(axes)
        if are_factors:
            reduced.append(t._replace(inner=(summed, *t.inner) if k else (*t.inner, summed)))
        else:
            reduced.append(t._replace(layout=t.layout.visit(axes)))
    return tuple(reduced)


def _without(value: Value, node: Node) -> Value:
    """Without the axes that are reduced."""
    axes = node.params["axes"]

    def reduced(layout: Layout) -> Layout:
        left = tuple(k for k in range(len(layout.shape)) if k not in axes)
        return layout.add_up(axes).pick(left, tuple(layout.shape[k] for k in left))

    return value.map(reduced)
