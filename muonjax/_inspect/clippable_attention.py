"""From softmax(Q Kᵀ) V to the parameters that a clip scales, and to the place where the logits are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from muonjax._clip.scaled_entries import PlacedScale
from muonjax._inspect import follow_logits
from muonjax._inspect.certificate import Certificate
from muonjax._inspect.graph import LONG_EINSUM, Place
from muonjax._inspect.layouts import NotFollowed
from muonjax._inspect.masks_or_biases import doubt_of_masks
from muonjax._inspect.measure import Probe
from muonjax._inspect.move_rules import reshaped
from muonjax._inspect.proposals import QueriesAndKeys, Refused, proposals_of
from muonjax._inspect.records import Records
from muonjax._inspect.values import (
    Logits,
    ParameterView,
    Projection,
    Value,
    grouped,
)


class Call(NamedTuple):
    """One attention: what to scale, and where its largest logits are; or why it can't be clipped."""

    line: str
    operation: int  # the product of queries and keys, or the call
    views: tuple[ParameterView, ...] = ()  # the parameters of its queries and keys
    # What a clip may scale, the best first: both sides of the product, or the queries alone.
    proposals: tuple[tuple[PlacedScale, ...], ...] = ()
    probes: tuple[Probe, ...] = ()  # one for each call with the same queries
    spans: tuple[PlacedScale, ...] = ()  # the proposal that is proved
    problem: str = ""
    doubt: str = ""  # what can't be told of its masks, for a warning


def attentions(records: Records) -> list[Call]:
    """The attentions that train, in the order of the program.

    A clip of q scales softmax(q @ k1) and softmax(q @ k2): these are proved together, and become one.
    """
    # Followed to their softmax; then calls of kernels, and exponentials that multiply something unknown.
    calls = {
        product: _call(records, product) for product in records.attention.softmaxes
    }
    for i, projections in records.attention.calls.items():
        calls[i] = _opaque_call(records, i, projections)
    for product, reader in records.attention.readers.items():
        if product not in records.attention.softmaxes:
            calls[product] = _not_followed(records, product, reader)
    # It may be an attention, or hide one.
    i = records.unlisted
    if i >= 0:
        problem = f"{records.nodes[i].name} is not followed, and may hide an attention"
        calls[i] = Call(records.graph.line(i), i, problem=problem)
    # Calls with the same queries are one attention, as the two softmaxes above, or a layer that is called twice.
    by_queries = []
    for _, call in sorted(calls.items()):
        # The last proposal scales the queries alone. A refused call has no proposal: then calls with the same
        # parameters are one attention, or, if these aren't known, calls in the same line.
        key = call.proposals[-1:] or call.views or call.line
        by_queries.append((key, call))
    proved = []
    for group in grouped(by_queries).values():
        if any(call.operation in records.graph.trained for call in group):
            proved.append(_proved(records, group))
    return proved


def _opaque_call(
    records: Records, operation: int, projections: Iterable[Projection]
) -> Call:
    """The call of a kernel, of which nothing but its operands is known."""
    node = records.nodes[operation]
    name = str(node.params.get("name") or node.name)
    why = f"{name!r} is a call whose logits can't be seen; measure them with muonjax.max_logits"
    return Call(
        records.graph.line(operation), operation, problem=why, views=_views(projections)
    )


def _not_followed(records: Records, product: int, reader: int) -> Call:
    """A product whose exponentials multiply something in the operation `reader`."""
    why = "it can't be followed from parameters through queries and keys to its values"
    if records.nodes[reader].name == LONG_EINSUM:
        why = f"{LONG_EINSUM} takes its weights"
    problem = f"{why}: {records.graph.line(reader)}"
    return Call(records.graph.line(product), product, problem=problem)


def _views(projections: Iterable[Projection]) -> tuple[ParameterView, ...]:
    return tuple(projection.view for projection in projections)


# What a clip scales and where its logits are.


def _call(records: Records, product: int) -> Call:
    """The attention whose queries and keys this operation multiplies: what a clip may scale, or why it is refused.

    Its `views`, of which it gets its name, are the parameters of queries and keys.
    """
    # If several softmaxes take the logits, `_check_logits` asks for equal ones.
    logits, normalized = records.attention.softmaxes[product][0]
    # Logits may be a sum of products, q1 @ k1 + q2 @ k2, each with queries and keys.
    pairs = []
    for summand, keys in logits.products_and_keys(normalized):
        pairs.append(QueriesAndKeys(records, summand, keys))
    projections = []
    for pair in pairs:
        projections += (*pair.query.value.projections, *pair.key.value.projections)
    call = Call(records.graph.line(product), product, _views(projections))
    try:
        _check_logits(records, logits, normalized)
        _check_readers(records, logits)
        doubt = doubt_of_masks(records.graph, logits.added)
        proposals = tuple(proposals_of(pairs))
        probe = _probe(records, logits)
    except Refused as refused:
        return call._replace(problem=str(refused))
    return call._replace(probes=(probe,), proposals=proposals, doubt=doubt)


_DERIVATIVES = "the function takes derivatives of it, which a clip would change too"


def _check_logits(records: Records, logits: Logits, normalized: frozenset[int]) -> None:
    """Refuses logits that are not what one softmax over keys takes.

    Args:
      records: What is known of the function.
      logits: What enters the first softmax of a product of queries and keys.
      normalized: The axes of the product that this softmax normalizes.
    """
    attention = records.attention
    for product, _ in logits.products_and_keys(normalized):
        # An exponential, or an operation without a rule, takes them in a way that is not followed.
        if product in attention.unseen:
            raise Refused(_not_alone(records, attention.unseen[product]))
    for other, axes in attention.softmaxes[logits.product]:
        # Two halves of the weights that multiply values are of one softmax: their layouts alone differ.
        if (other._replace(layout=logits.layout), axes) != (logits, normalized):
            line = records.graph.line(logits.product)
            # A loss that is made of the model's derivatives, as of a physicist's network.
            if records.nodes[logits.product].gradient_pass:
                raise Refused(f"{_DERIVATIVES}: {line}")
            raise Refused(f"several softmaxes take its logits: {line}")
    # An operation made something else of them, such as a concatenation with other logits, or a tanh of masked ones.
    if logits.is_lost:
        i = records.graph.producer[logits.lost]
        if len(follow_logits.products(records.inputs(records.nodes[i]))) > 1:
            raise Refused(
                f"its logits are made of several products: {records.graph.line(i)}"
            )
        raise Refused(_not_alone(records, i))
    # One number for each query may be subtracted, and not another one for some of its keys.
    if logits.shifted and logits.shifted & normalized:
        raise Refused(
            "the maximum subtracted from its logits is not taken over its keys"
        )


def _check_readers(records: Records, logits: Logits) -> None:
    """Refuses logits that another operation reads than those of their softmax: a clip would change its results, too.

    Such are a penalty on the logits, their distillation, and the next layer's logits, which these are added to.
    """
    graph = records.graph
    # The certificate follows the readers of all arrays before the first mask or bias.
    pending = {logits.raw if logits.is_biased else logits.value}
    followed: set[int] = set()
    while pending:
        value = pending.pop()
        followed.add(value)
        for i in graph.readers[value]:
            node = records.nodes[i]
            # Such as a number for a log; or the maximum that an online softmax carries from block to block.
            if i not in graph.trained or node.name == "carry":
                continue
            for result in node.outputs:
                if not _is_of_softmax(records.values[result], logits):
                    why = "something else than its softmax reads its logits"
                    raise Refused(f"{why}: {graph.line(i)}")
                # Softmax's weights change as the clip wants it.
                if (
                    node.name not in follow_logits.EXPONENTIALS
                    and result not in followed
                ):
                    pending.add(result)


def _is_of_softmax(value: Value, logits: Logits) -> bool:
    """Whether an array is made of these logits on the way to their softmax: masked, their maximum, or the weights."""
    for x in value.logits:
        # The weights of another softmax, as of softmax(logits / 2), are made of another array.
        is_other_softmax = x.stage == "weights" and x.value != logits.value
        if x.product == logits.product and not is_other_softmax:
            return True
    return False


def _not_alone(records: Records, operation: int) -> str:
    """Why a clip can't go through this operation."""
    node, line = records.nodes[operation], records.graph.line(operation)
    if node.gradient_pass and node.name == "add_any":
        return f"{_DERIVATIVES}: {line}"
    values = records.inputs(node)
    is_biased = any(value.is_weight for value in values)
    has_logits = any(value.is_activation for value in values)
    if node.name in ("add", "sub") and is_biased and has_logits:
        return f"a clip would not scale its logits alone, as a learned bias is added: {line}"
    return f"a clip would not scale its logits alone: {line} ({node.name})"


def _probe(records: Records, logits: Logits) -> Probe:
    """Where the logits that enter softmax are measured: in one of the bodies that have them as a variable.

    A `jit` in a scan, say, is a body in a body, and logits that it returns are a variable of both. `raw` logits are
    those before a mask or a bias was added.
    """
    variables = records.graph.variables[logits.value]
    raw_variables = records.graph.variables[logits.raw] if logits.is_biased else {}
    made_in = records.nodes[records.graph.producer[logits.value]].place

    def cost(place: Place) -> tuple[int, bool, bool]:
        # First, prefer to be outside of functions with derivatives of their own (`jax.custom_vjp`): inside, the logits
        # have to be computed once more. Next, prefer a body that has the raw logits too; last, the one that makes the
        # logits.
        custom_calls = sum(step.kind.startswith("custom_") for step in place)
        return custom_calls, place not in raw_variables, place != made_in

    place = min(variables, key=cost)
    if any(step.kind == "while" for step in place):
        raise Refused("it is inside of a loop of unknown length, which has no gradient")
    if logits.is_biased:  # a mask was added, or a bias as ALiBi's
        _check_added(records, logits, raw_is_visible=place in raw_variables)
    raw = raw_variables.get(place)
    return Probe(place, variables[place], raw=raw, unit=logits.unit)


def _check_added(records: Records, logits: Logits, raw_is_visible: bool) -> None:
    """Refuses a mask or a bias where its logits are not at hand, entry by entry, before it was added.

    `measure` takes the largest of the logits before it that the mask leaves, so both arrays have to be variables of one
    body (`raw_is_visible`) and have one order of axes.
    """
    if not raw_is_visible:
        raise Refused(
            "something is added to its logits in a function that does not return them without it"
        )
    raw, seen = (records.values[x].logits[0].layout for x in (logits.raw, logits.value))
    moved = None
    with contextlib.suppress(NotFollowed):
        moved = raw.moved(seen.shape, lambda x: reshaped(x, raw.shape, seen.shape))
    if moved != seen:
        raise Refused("something is added to its logits before their axes change order")


# The proof.


def _proved(records: Records, calls: Sequence[Call]) -> Call:
    """The first of these calls, for all of them, with the first proposal that scales the logits of each head alone.

    One clip scales the logits of all of these calls: a problem of one is a problem of all.
    """
    first = calls[0]
    for spans in first.proposals:
        if not all(spans in call.proposals for call in calls):
            continue
        try:
            probes = _located(records, calls, spans)
        except Refused as refused:
            first = first._replace(problem=str(refused))
        else:
            return first._replace(spans=spans, probes=probes, problem="")
    return first


def _located(
    records: Records, calls: Sequence[Call], spans: tuple[PlacedScale, ...]
) -> tuple[Probe, ...]:
    """The probes of the calls, with the axes of the logits that count layers and heads, if a clip of `spans` is exact.

    Args:
      records: What is known of the function.
      calls: Calls that have `spans` among their proposals, and so a probe each.
      spans: What the clip scales; the first is one of the queries.

    Raises:
      Refused: A clip would not scale the logits of each head alone.
    """
    logs = _random_logarithms(spans)
    probes = [call.probes[0] for call in calls]
    # `_check_logits` has seen that the softmaxes of a call take equal logits.
    logits = [records.attention.softmaxes[call.operation][0][0] for call in calls]
    # A clip scales the logits before a mask or a bias is added, and the probe sees them after that.
    raw = [x.raw if x.is_biased else x.value for x in logits]
    certificate = Certificate(records, probes, raw)
    for of_leaf in grouped((span.leaf, span) for span in spans).values():
        certificate.touch(of_leaf, logs)
    failure = certificate.failure()
    if failure is not None:
        raise Refused(_not_alone(records, failure))
    located = []
    for probe, value, x in zip(probes, raw, logits, strict=True):
        # The logits of a head get γ, "whole": what its queries and its keys get, "query" and "key", is multiplied.
        with_heads = certificate.located(probe, value, x.value, logs["whole"])
        if with_heads is None:
            raise Refused(_why_not_located(certificate))
        located.append(with_heads)
    return tuple(located)


def _why_not_located(certificate: Certificate) -> str:
    """Why the logits of some head got another factor than its own."""
    if any((table[0] == 0).any() for table in certificate.at.values()):
        return "some of its logits, as of a sink or of padding, are not made of the queries that a clip scales"
    return "the heads of its logits are not those of its projections"


def _random_logarithms(spans: Sequence[PlacedScale]) -> dict[str, np.ndarray]:
    """Random logarithms of what a clip multiplies by, [*layers, heads] for each name of a factor.

    "whole" is the factor of a head's logits: its query takes it where no key is scaled. Otherwise

        log(query) + log(key) = log(whole).

    A key takes half of the least logarithm of the heads that it serves. For "whole" 8, 6, 2, 4 of four heads of
    queries, and two heads of keys for two of them each, "key" is 3, 1 and "query" 5, 3, 1, 3.

    `spans` begins with one of the queries.
    """
    heads, layers = spans[0].entries, spans[0].layers
    # Even whole numbers: half of each is whole too, and no sum is rounded.
    whole = 2.0 * np.random.default_rng(0).integers(1, 1 << 40, (*layers, heads))
    heads_of_keys = next(
        (span.entries for span in spans if span.factor == "key"), heads
    )
    keys = whole.reshape(*layers, heads_of_keys, -1).min(-1) / 2
    queries = whole - np.repeat(keys, heads // heads_of_keys, -1)
    return {"whole": whole, "key": keys, "query": queries}
