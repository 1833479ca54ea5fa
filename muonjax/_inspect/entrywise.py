"""What operations entry by entry and reductions do to what is known of their operands; all rules by primitive."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from muonjax._inspect import softmax
from muonjax._inspect.findings import Walk
from muonjax._inspect.graph import Node
from muonjax._inspect.layout import Layout
from muonjax._inspect.layout import whole as all_of
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
    """What is not followed. Without a rule it may be an exponential, a product, one hot, or a kernel of attention."""
    is_call = any(word in node.name for word in ("call", "attention"))  # a kernel, a callback
    values = walk.operands(node)
    result = dependent(values)
    if has_no_rule := not (is_call or node.name in RULES):
        result = result._replace(no_rule=node.index, weights=max(result.weights, result.scores))
        walk.normalized.add(result.weights)
        walk.no_rule.add(node.index)
    alone = all(
        v.is_weight or not v.depends_on for v in values
    )  # a penalty perhaps, as a determinant
    weights = [v for v in values if v.is_weight or has_no_rule]
    walk.record_terms(node, node.name, weights, "alone" if alone else "unknown")
    images = [m for v in values for m in v.images]
    if has_no_rule:
        taken = [x.product for v in values for x in v.logits]
        walk.unseen |= dict.fromkeys(taken, node.index)
        images += [
            m for product in taken for side in walk.pairs[product] for m in side.value.images
        ]
    walk.record_parts(images)
    for m in images if not is_call and node.name not in _MIXING else ():
        if (
            m.apart or has_no_rule
        ):  # which of its columns are used together, or chosen, is not known any more
            walk.record(node, "unknown", m.product.use.term, node.name)
    parts = {(m.product, m.layout.region): m for m in images}
    arrays = [
        v for v, x in zip(values, node.inputs, strict=True) if v.is_activation and walk.shape(x)
    ]
    if is_call and len(arrays) > 2:
        walk.opaque[node.index] = tuple(parts.values())
        walk.consumers.add(node.index)
    return [result] * len(node.outputs)


RULES |= dict.fromkeys([*_MIXING, "pad"], unknown)


# Numbers that are no function of the parameters.


@rule("iota")
def _iota(walk: Walk, node: Node) -> Sequence[Value]:
    shape, axis = walk.shape(node.outputs[0]), node.params["dimension"]
    counting = all_of(tuple(n if k == axis else 1 for k, n in enumerate(shape)))
    return [Value(marks=(Mark("counts", counting),))]


@rule("eq")
def _eq(walk: Walk, node: Node) -> Sequence[Value]:
    """An index equals one of the numbers that count along an axis, so the result is one hot along it."""
    values = spread_operands(walk, node)
    counting, index = (v.axes("counts") for v in values)
    marks = [
        m for v in values for m in v.marks if m.what == "counts" and set(counting).isdisjoint(index)
    ]
    return [dependent(values)._replace(marks=tuple(m._replace(what="one hot") for m in marks))]


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
    **dict.fromkeys(
        ["broadcast_in_dim", "convert_element_type", "pcast", "pvary", "reshape"], lambda x: x
    ),
}


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
    name, whole, operands = node.name, dependent(values), node.inputs
    which = Value()
    if name in CHOICES:
        which, values, operands = values[0], values[1:], operands[1:]
    elif name in SUMS:  # Python's sum begins with 0
        values = [v for v, x in zip(values, operands, strict=True) if not is_zero(walk, x)]
        if len(values) == 1:
            (v,) = values
            return v._replace(logits=softmax.scaled(node, v)) if name == "sub" else v
    if name in CHOICES and (parts := _parts(values)):
        for term in parts:
            walk.record(node, "unknown", term, name)
        return whole
    if whole.is_weight:
        return whole._replace(terms=_of_weights(walk, node, name, values))
    if not dependent(values).depends_on & PARAMETER:
        kept = ("input", "one hot") if name in _SCALES else ("input",) if name in SUMS else ()
        return whole._replace(marks=tuple(m for v in values for m in v.marks if m.what in kept))
    weights = [v for v in values if v.is_weight]
    walk.record_terms(
        node, ADDED if name in SUMS else MULTIPLIED if name in _SCALES else name, weights
    )
    if name in _SCALES:
        walk.record_factors(node, *values)
    elif name in SUMS:
        walk.record_meeting_parts(values)
    if name in (*softmax.EXPONENTIALS, "pow"):
        whole = whole._replace(weights=whole.scores)
    images = all_images(v._replace(images=_images(walk, node, v, values)) for v in values)
    images = latest(walk, node, images)
    if name in SUMS:
        walk.record_sum(images if name not in CHOICES else ())
        biases = tuple(t for v in weights for t in v.terms)
        images = tuple(m._replace(biases=tuple(dict.fromkeys(m.biases + biases))) for m in images)
    logits = softmax.after(walk.graph, node, which, values, operands)
    is_seen = name != "pow" and any(x.lost < 0 or x.product == whole.scores for x in logits)
    if name in (*softmax.EXPONENTIALS, "pow") and not is_seen:
        walk.unseen[whole.scores] = node.index
    # A masked parameter, or one of several that data choose or mix.
    is_mixed = (
        not images and not logits and all(v.terms for v in values if v.depends_on & PARAMETER)
    )
    kept = values if name in _SCALES or (name in SUMS and is_mixed) else ()
    no_rule = -1 if name in SUMS and images else whole.no_rule  # no residual stream is one hot
    terms = tuple(t for v in kept for t in v.terms)
    return whole._replace(terms=terms, images=images, logits=logits, no_rule=no_rule)


def _parts(values: Sequence[Value]) -> list[Term]:
    """Parameters of which one of several parts is chosen, before or after a product with them."""
    held: list[tuple[Any, Any, Term]] = [
        (t.leaf, t.layout.region, t) for v in values for t in v.terms
    ]
    held += [(m.product, m.layout.region, m.product.use.term) for v in values for m in v.images]
    return [t for x, region, t in held if any(x == y and region != part for y, part, _ in held)]


def is_zero(walk: Walk, value: int) -> bool:
    known = walk.known(value)
    return known is not None and np.ndim(known) == 0 and known == 0


def _of_weights(walk: Walk, node: Node, name: str, values: Sequence[Value]) -> tuple[Term, ...]:
    """Parameters entry by entry are used as they are; one that repeats, as a bias or a gain does, is only that."""
    several = sum(bool(v.terms) for v in values) > 1
    noisy = name in _SCALES and any(v.depends_on & NOISE and not v.is_weight for v in values)
    cover, terms = [_cover(v) for v in values], []
    if name in SUMS:  # of a column and a row, as of any that repeat along an axis of the sum
        cover = [*cover, frozenset().union(*cover)]
    for v, mine in zip(values, cover, strict=False):
        for t in v.terms:
            if any(t.leaf == u.leaf and mine < _cover(w) for w in values for u in w.terms):
                continue  # its own mean, say
            if any(mine < other for other in cover) or (several and t.noisy):
                walk.record(node, "other", t, ADDED if name in SUMS else MULTIPLIED)
            else:
                terms.append(t._replace(noisy=t.noisy or noisy))
    return tuple(dict.fromkeys(terms))


def _cover(v: Value) -> frozenset[int]:
    """The axes along which a value made of parameters differs."""
    return frozenset().union(*(t.layout.varying for t in v.terms))


def _images(walk: Walk, node: Node, v: Value, values: Sequence[Value]) -> tuple[Image, ...]:
    """The images in one operand after the operation."""
    name, images = node.name, []
    axes = [node.params["axis"]] if "axis" in node.params else []  # of running sums
    factor = next((u for u in values if u is not v), v)
    own = {(m.product, m.layout) for m in factor.images}  # of a function of itself, as SiLU
    # A mask puts zeros or the like in their place.
    may_add = [u for u in values if not u.is_weight and not u.images]
    strangers = [u for u in may_add if u.depends_on or name not in CHOICES]
    is_divisor = name == "div" and v is values[1]
    if (
        strangers == []
        if name in SUMS
        else name in _SCALES and not (factor.is_activation or is_divisor)
    ):
        return v.images
    for m in v.images:
        if name in SUMS:
            apart = all(_keeps_apart(m, u) for u in strangers)
        elif name in _SCALES:
            apart = (m.product, m.layout) in own or (
                factor.is_activation and _keeps_apart(m, factor)
            )
        else:
            apart = not m.layout.atoms(axes) or bool(m.layout.atoms_beside(axes))
            walk.record_reduced([m] if m.layout.atoms(axes) else [], axes)
        images.append(bent(walk, m, node, apart))
    return tuple(images)


def _keeps_apart(m: Image, u: Value) -> bool:
    """Whether it comes from elsewhere, or is a statistic of some columns, as in a norm of each head."""
    if not m.product.bit & u.depends_on:
        return True
    repeats = u.axes("repeats")
    return bool(repeats and not u.images and m.layout.atoms_beside(repeats))


def bent(walk: Walk, image: Image, node: Node, apart: bool = False) -> Image:
    """After an operation that does not commute with scaling; `apart` where each entry is still one column's."""
    if not apart:
        walk.record_parts([image])
    return image._replace(
        bent_by=node.index if image.linear else image.bent_by, apart=image.apart and apart
    )


def latest(walk: Walk, node: Node, images: tuple[Image, ...]) -> tuple[Image, ...]:
    """Those that are followed on, of the many in a residual stream, which is the sum of all layers."""
    if len(images) > _MOST:  # a product with data has summed over the columns of some
        gone = {m for m in images if not m.layout.atoms(range(len(m.layout.shape)))}
        walk.record_parts(gone)
        images = tuple(m for m in images if m not in gone)
    if len(images) > _MOST:
        images = tuple(bent(walk, m, node) for m in images)[-_MOST:]
    return images


@rule("reduce_max argmax reduce_min argmin reduce_and reduce_or reduce_prod")
def _reduce(walk: Walk, node: Node) -> Sequence[Value]:
    (x,) = walk.operands(node)
    walk.record_reduced(x.images, node.params["axes"])
    is_softmax = node.name == "reduce_max" and x.logits and x.logits[0].stage == "logits"
    largest = (x.logits[0]._replace(stage="largest"),) if is_softmax else ()
    return [_without(dependent([x])._replace(logits=largest), node)]


@rule("reduce_sum")
def _reduce_sum(walk: Walk, node: Node) -> Sequence[Value]:
    (x,), axes = walk.operands(node), node.params["axes"]
    terms = _reduced_terms(node, x, axes)
    towers = walk.entrywise.get(node.inputs[0], ())
    if (
        len({m.product for m in towers if m.layout.atoms(axes)}) > 1
    ):  # a product over features, as by einsum
        walk.consumers.add(node.index)
        x = x._replace(scores=node.index)
    own = [m for m in x.images if m.product.use.node == x.weights]
    if (own or (x.weights, 0) not in walk.products) and not any(m.layout.atoms(axes) for m in own):
        walk.normalized.add(x.weights)
    linear = tuple(image for image in x.images if image.linear)
    walk.record_reduced([image for image in x.images if not image.linear], axes)
    for image in linear:
        image.product.added_up.update(image.layout.atoms(axes))
    totals = tuple(x._replace(stage="largest") for x in x.logits if x.stage == "weights")
    return [_without(x._replace(terms=terms, images=linear, logits=totals), node)]


def _reduced_terms(node: Node, x: Value, axes: Sequence[int]) -> tuple[Term, ...]:
    """Parameters that are summed: a mixture of several, or a product of two; nothing of a norm or a penalty."""
    terms = [t for t in x.terms if t.layout.atoms(axes) and t.layout.varying.difference(axes)]
    factors = len({t.layout.varying.difference(axes) for t in terms}) > 1
    found = []
    for k, t in enumerate(terms):
        summed = t.layout.atoms(axes)
        if factors:
            t = t._replace(inner=(summed, *t.inner) if k else (*t.inner, summed))
        else:
            t = t._replace(layout=t.layout.visit(axes))
        found.append(t)
    return tuple(found)


def _without(x: Value, node: Node) -> Value:
    """Without the axes that are reduced."""
    axes = node.params["axes"]

    def kept(layout: Layout) -> Layout:
        left = [k for k in range(len(layout.shape)) if k not in axes]
        return layout.add_up(axes).pick(tuple(left), tuple(layout.shape[k] for k in left))

    return x.map(kept)
