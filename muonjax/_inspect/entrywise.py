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
    AxisFact,
    ParameterView,
    Projection,
    Value,
    all_projections,
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
    values = walk.inputs(node)
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
    walk.record_views(node, node.name, weights, "unknown" if has_data else "alone")
    projections = [m for v in values for m in v.projections]
    if has_no_rule:
        projections += _behind_logits(walk, node, values)
    walk.record_parts(projections)
    if not is_call and node.name not in _MIXING:
        for m in projections:
            if m.unmixed or has_no_rule:  # it may choose some of the columns, or use some together
                walk.record(node, "unknown", m.product.use.view, node.name)
    arrays = [x for x in node.inputs if walk.values[x].is_activation and walk.shape(x)]
    if is_call and len(arrays) > 2:
        parts = {(m.product, m.layout.region): m for m in projections}
        walk.opaque[node.index] = tuple(parts.values())
        walk.consumers.add(node.index)
    return [result] * len(node.outputs)


def _behind_logits(walk: Walk, node: Node, values: Iterable[Value]) -> list[Projection]:
    """The queries and keys of logits that the operation takes: of these it makes something unknown."""
    projections = []
    for logits in [x for v in values for x in v.logits]:
        walk.unseen[logits.product] = node.index
        for operand in walk.pairs[logits.product]:
            projections += operand.value.projections
    return projections


RULES |= dict.fromkeys([*_MIXING, "pad"], unknown)


# Numbers that are no function of the parameters.


@rule("iota")
def _iota(walk: Walk, node: Node) -> Sequence[Value]:
    shape = [1] * len(walk.shape(node.outputs[0]))
    axis = node.params["dimension"]
    shape[axis] = walk.shape(node.outputs[0])[axis]
    return [Value(facts=(AxisFact("counts", whole(tuple(shape))),))]


@rule("eq")
def _eq(walk: Walk, node: Node) -> Sequence[Value]:
    """An index equals one of the numbers that count along an axis, so the result is one hot along it."""
    values = spread_operands(walk, node)
    result = dependent(values)
    first, second = (v.axes("counts") for v in values)
    if not set(first).isdisjoint(second):
        return [result]
    counts = [m for v in values for m in v.facts if m.what == "counts"]
    return [result._replace(facts=tuple(m._replace(what="one hot") for m in counts))]


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


# Entry by entry. What is linear in an operand leaves its projections linear: sums and choices in all together, a
# product in each, a quotient in the first. After all other functions they are nonlinear.

_SCALES = ("mul", "div")
_MOST = 6  # projections of one value that are followed
_ENTRYWISE = """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex cos cosh cumlogsumexp cummax cummin cumprod cumsum digamma div erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igammac integer_pow is_finite join le lgamma log log1p log2 logistic lt max min mul ne nextafter not
    and one_minus_square or xor polygamma polynomial population_count pow random_gamma_grad rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
"""


def spread_operands(walk: Walk, node: Node) -> list[Value]:
    """The operands of an operation entry by entry, each repeated along the axes where it has one entry."""
    values = walk.inputs(node)
    if node.name == "join":
        return values
    shape = walk.shape(node.outputs[0])
    return [_spread(v, walk.shape(x), shape) for v, x in zip(values, node.inputs, strict=True)]


def _spread(value: Value, old: Sequence[int], shape: Sequence[int]) -> Value:
    if old == shape or not (value.depends_on or value.facts):
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
            for view in chosen:
                walk.record(node, "unknown", view, node.name)
            return result
    elif node.name in SUMS:
        # Python's `sum` begins with 0.
        values = [v for v, x in zip(values, operands, strict=True) if not is_zero(walk, x)]
        if len(values) == 1:
            (value,) = values
            changed = node.name == "sub"
            return value._replace(logits=softmax.scaled(node, value)) if changed else value
    if result.is_weight:
        return result._replace(views=_of_weights(walk, node, values))
    if not any(v.depends_on & PARAMETER for v in values):
        return result._replace(facts=_facts(node, values))
    return _of_activations(walk, node, result, chooser, values, operands)


def _chosen_parts(values: Sequence[Value]) -> list[ParameterView]:
    """Parameters of which one of several parts is chosen, before or after a product with them."""
    regions: dict[Any, set[Any]] = {}
    views: list[tuple[Any, ParameterView]] = []
    for v in values:
        for t in v.views:
            regions.setdefault(t.leaf, set()).add(t.layout.region)
            views.append((t.leaf, t))
        for m in v.projections:
            regions.setdefault(m.product, set()).add(m.layout.region)
            views.append((m.product, m.product.use.view))
    return [view for origin, view in views if len(regions[origin]) > 1]


def is_zero(walk: Walk, value: int) -> bool:
    known = walk.known(value)
    return known is not None and np.ndim(known) == 0 and known == 0


def _facts(node: Node, values: Sequence[Value]) -> tuple[AxisFact, ...]:
    """What stays true of numbers without parameters: a sum of an argument's entries is made of these still."""
    kept: tuple[str, ...] = ()
    if node.name in _SCALES:
        kept = ("input", "one hot")
    elif node.name in SUMS:
        kept = ("input",)
    return tuple(m for v in values for m in v.facts if m.what in kept)


def _of_weights(walk: Walk, node: Node, values: Sequence[Value]) -> tuple[ParameterView, ...]:
    """What is left of parameters in a sum or a product of parameters, such as a weight and its mask.

    One that repeats along an axis of another, as a bias or a gain does, is recorded as that and not followed on.
    """
    is_sum, is_scale = node.name in SUMS, node.name in _SCALES
    several = sum(bool(v.views) for v in values) > 1
    noisy = is_scale and any(v.depends_on & NOISE and not v.is_weight for v in values)
    varying = [_varying(v) for v in values]
    wider = list(varying)
    if is_sum:  # of a column and a row, both repeat
        wider.append(frozenset().union(*varying))
    views = []
    for v, axes in zip(values, varying, strict=True):
        for t in v.views:
            if _is_statistic(t, axes, values):
                continue
            if any(axes < others for others in wider) or (several and t.noisy):
                walk.record(node, "other", t, ADDED if is_sum else MULTIPLIED)
            else:
                views.append(t._replace(noisy=t.noisy or noisy))
    return tuple(dict.fromkeys(views))


def _is_statistic(view: ParameterView, axes: frozenset[int], values: Sequence[Value]) -> bool:
    """Whether an operand has all of the parameter of which this is a mean, say, that differs along `axes`."""
    for v in values:
        if axes < _varying(v) and any(t.leaf == view.leaf for t in v.views):
            return True
    return False


def _varying(v: Value) -> frozenset[int]:
    """The axes along which a value made of parameters differs."""
    return frozenset().union(*(t.layout.varying for t in v.views))


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
    walk.record_views(node, ADDED if is_sum else MULTIPLIED if is_scale else name, weights)
    if is_scale:
        walk.record_factors(node, *values)
    elif is_sum:
        walk.record_meeting_parts(values)
    if is_exponential:
        result = result._replace(weights=result.scores)
    held = [v._replace(projections=_projections(walk, node, v, values)) for v in values]
    projections = limited(walk, node, all_projections(held))
    if is_sum:
        if name not in CHOICES:
            walk.record_sum(projections)
        biases = [t for v in weights for t in v.views]
        projections = tuple(
            m._replace(biases=tuple(dict.fromkeys((*m.biases, *biases)))) for m in projections
        )
    logits = softmax.after(walk.graph, node, chooser, values, operands)
    if is_exponential:
        is_followed = any(x.lost < 0 or x.product == result.scores for x in logits)
        if name == "pow" or not is_followed:
            walk.unseen[result.scores] = node.index
    views: tuple[ParameterView, ...] = ()
    if is_scale or (is_sum and not projections and not logits and _all_parameters(values)):
        views = tuple(t for v in values for t in v.views)
    columns = [m for v in values for m in v.facts if m.what == "columns"]
    latest_product = max((m.product for m in columns), default=-1)
    facts = tuple(dict.fromkeys(m for m in columns if m.product == latest_product))
    result = result._replace(views=views, projections=projections, logits=logits, facts=facts)
    # A residual stream is not one hot, whatever is added to it.
    return result._replace(no_rule=-1) if is_sum and projections else result


def _all_parameters(values: Sequence[Value]) -> bool:
    """Whether all that is made of parameters is a masked one, or one of several that data choose or mix."""
    return all(v.views for v in values if v.depends_on & PARAMETER)


def _projections(
    walk: Walk, node: Node, value: Value, values: Sequence[Value]
) -> tuple[Projection, ...]:
    """The projections in one of the operands after the operation."""
    name = node.name
    if name in SUMS:
        # A mask puts zeros or the like in the place of what it hides.
        added = [u for u in values if not u.is_weight and not u.projections]
        added = [u for u in added if u.depends_on or name not in CHOICES]
        if not added:
            return value.projections
        return tuple(
            after_nonlinearity(walk, m, node, all(_keeps_apart(m, u) for u in added))
            for m in value.projections
        )
    if name in _SCALES:
        factor = values[1] if value is values[0] else values[0]
        is_divisor = name == "div" and value is values[1]
        if not factor.is_activation and not is_divisor:
            return value.projections
        itself = {
            (m.product, m.layout) for m in factor.projections
        }  # times a function of it, as in SiLU
        return tuple(
            after_nonlinearity(
                walk,
                m,
                node,
                (m.product, m.layout) in itself
                or (factor.is_activation and _keeps_apart(m, factor)),
            )
            for m in value.projections
        )
    # Running sums, maxima and products mix the columns along an axis.
    axes = [node.params["axis"]] if "axis" in node.params else []
    projections = []
    for m in value.projections:
        is_mixed = bool(m.layout.runs_along(axes))
        if is_mixed:
            walk.record_reduced([m], axes)
        projections.append(
            after_nonlinearity(walk, m, node, not is_mixed or bool(m.layout.runs_not_along(axes)))
        )
    return tuple(projections)


def _keeps_apart(projection: Projection, other: Value) -> bool:
    """Whether it comes from elsewhere, or is a statistic of some columns, as in a norm of each head."""
    if not projection.product.bit & other.depends_on:
        return True
    repeats = other.axes("repeats")
    return bool(repeats and not other.projections and projection.layout.runs_not_along(repeats))


def after_nonlinearity(
    walk: Walk, projection: Projection, node: Node, unmixed: bool = False
) -> Projection:
    """After an operation that does not commute with scaling; `unmixed` where each entry is still one column's."""
    if not unmixed:
        walk.record_parts([projection])
    nonlinear_at = node.index if projection.linear else projection.nonlinear_at
    return projection._replace(nonlinear_at=nonlinear_at, unmixed=projection.unmixed and unmixed)


def limited(walk: Walk, node: Node, projections: tuple[Projection, ...]) -> tuple[Projection, ...]:
    """Those that are followed on, of the many in a residual stream, which is the sum of all layers."""
    if len(projections) <= _MOST:
        return projections
    # A product with data has summed over the columns of some.
    summed = {m for m in projections if not m.layout.runs_along(range(len(m.layout.shape)))}
    walk.record_parts(summed)
    projections = tuple(m for m in projections if m not in summed)
    if len(projections) <= _MOST:
        return projections
    return tuple(after_nonlinearity(walk, m, node) for m in projections)[-_MOST:]


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(walk: Walk, node: Node) -> Sequence[Value]:
    (value,) = walk.inputs(node)
    walk.record_reduced(value.projections, node.params["axes"])
    logits = ()
    if node.name == "reduce_max" and value.logits and value.logits[0].stage == "logits":
        logits = (value.logits[0]._replace(stage="largest"),)
    return [_without(dependent([value])._replace(logits=logits), node)]


@rule("reduce_sum")
def _reduce_sum(walk: Walk, node: Node) -> Sequence[Value]:
    (value,), axes = walk.inputs(node), node.params["axes"]
    views = _reduced_views(value, axes)
    factors = walk.entrywise.get(node.inputs[0], ())
    if len({m.product for m in factors if m.layout.runs_along(axes)}) > 1:
        # The features of two activations, multiplied and added up: a product of these, as by an einsum.
        walk.consumers.add(node.index)
        value = value._replace(scores=node.index)
    _record_normalized(walk, value, axes)
    linear = tuple(m for m in value.projections if m.linear)
    walk.record_reduced([m for m in value.projections if not m.linear], axes)
    for m in linear:
        m.product.added_up.update(m.layout.runs_along(axes))
    totals = tuple(x._replace(stage="largest") for x in value.logits if x.stage == "weights")
    return [_without(value._replace(views=views, projections=linear, logits=totals), node)]


def _record_normalized(walk: Walk, value: Value, axes: Sequence[int]) -> None:
    """A sum of exponentials of a product normalizes them, but for one along the columns of a parameter, a router's."""
    projections = [m for m in value.projections if m.product.use.node == value.weights]
    if any(m.layout.runs_along(axes) for m in projections):
        walk.routers.add(value.weights)
        return
    if projections or (value.weights, 0) not in walk.products:
        walk.normalized.add(value.weights)


def _reduced_views(value: Value, axes: Sequence[int]) -> tuple[ParameterView, ...]:
    """Parameters that are summed: a mixture of several, or a product of two; nothing of a norm or a penalty."""
    views = [
        t for t in value.views if t.layout.runs_along(axes) and t.layout.varying.difference(axes)
    ]
    are_factors = len({t.layout.varying.difference(axes) for t in views}) > 1
    reduced = []
    for k, t in enumerate(views):
        summed = t.layout.runs_along(axes)
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
