"""From softmax(Q Kᵀ) V to the parameters that a clip scales,
and to the place where the logits are."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from muonjax._inspect import follow_logits
from muonjax._inspect.clip_certificate import Certificate
from muonjax._inspect.clip_proposals import Refused, Spans, proposals_of
from muonjax._inspect.graph import LONG_EINSUM
from muonjax._inspect.layouts import NotFollowed
from muonjax._inspect.masks_or_biases import doubt_of_masks
from muonjax._inspect.measure import Probe
from muonjax._inspect.records import Records
from muonjax._inspect.values import Operand, ParameterView, grouped


class Call(NamedTuple):
    """One attention: what to scale, and where its largest logits are;
    or why it can't be clipped."""

    operation: int  # the product of queries and keys, or the call of a kernel
    views: tuple[ParameterView, ...] = ()  # the parameters of its queries and keys
    # What a clip may scale, the best first: both sides of the product, or the queries alone.
    proposals: tuple[Spans, ...] = ()
    raw: int = -1  # the array of its logits before a bias, or else what softmax takes
    probes: tuple[Probe, ...] = ()  # one for each call with the same queries
    spans: Spans = ()  # the proposal that is proved, queries first
    problem: str = ""  # why it can't be clipped
    doubt: str = ""  # what can't be told of its masks, for a warning


def attentions(records: Records) -> list[Call]:
    """The attentions that train, in the order of the program.

    Calls with the same queries are one: a clip of q scales softmax(q @ k1) and softmax(q @ k2),
    or both calls of a layer, and so it is proved for all of them together.
    """
    by_queries = []
    for call in sorted(_calls(records), key=lambda call: call.operation):
        # The last proposal scales the queries alone. A refused call has no proposal: then calls
        # with the same parameters are one attention, or, if these aren't known,
        # calls in the same line. So `key` has one of three types.
        key = call.proposals[-1:] or call.views or records.line(call.operation)
        by_queries.append((key, call))
    proved = []
    for group in grouped(by_queries).values():
        # No gradient changes the logits of the others, such as a teacher's.
        if any(call.operation in records.graph.trained for call in group):
            proved.append(_proved(records, group))
    return proved


def _calls(records: Records) -> Iterator[Call]:
    """All attentions, and all that may be one: each with proposals of what a clip scales, of which
    none is proved yet, or with a `problem`, which says why it is refused."""
    attention = records.attention
    # Products of queries and keys that were followed to their softmax. Each has a list,
    # `softmaxes`, with a pair for each product of weights and values: the logits that softmax
    # takes, and the axes that count keys. The first logits may stand for all: `_call` refuses a
    # product of which the pairs differ. Softmax takes one array, `value`, which may be a sum of
    # several products: these are one attention.
    by_array = grouped(
        (softmaxes[0][0].value, product)
        for product, softmaxes in attention.softmaxes.items()
    )
    for products in by_array.values():
        yield _call(records, products)
    # Calls of the program, such as a Pallas kernel's, that take three or more activations, perhaps
    # queries, keys and values. `views` are the parameters whose products they take.
    for i, views in attention.calls.items():
        node = records.nodes[i]
        call = str(node.params.get("name") or node.name)
        why = f"{call!r} is a call whose logits can't be seen; measure them with muonjax.max_logits"
        yield Call(i, views, problem=why)
    # Products whose exponentials the operation `reader` multiplies by something, perhaps values.
    # One that was followed to a softmax too is above, and `_call` refuses it.
    for product, reader in attention.other_readers.items():
        if product not in attention.softmaxes:
            yield _not_followed(records, product, reader)
    # An operation without a rule, the last one if there are several: it may be an attention,
    # or hide one.
    i = records.unlisted
    if i >= 0:
        name = records.nodes[i].name
        yield Call(i, problem=f"{name} is not followed, and may hide an attention")


def _not_followed(records: Records, product: int, reader: int) -> Call:
    """The refusal of a product that has no softmax,
    though `reader` multiplies its exponentials by something."""
    problem = (
        "it can't be followed from parameters through queries and keys to its values"
    )
    # "an einsum of three or more operands (split it)": the order of its products depends on their
    # sizes, so the reader does not follow it.
    if records.nodes[reader].name == LONG_EINSUM:
        problem = f"{LONG_EINSUM} takes its weights"
    problem = f"{problem}: {records.line(reader)}"
    operands = records.attention.operands.get(product, ())
    # A product with operands had logits, which were lost on the way. `_check_readers` refuses the
    # operation that lost them, whose line says more than that of `reader`.
    if operands:
        try:
            _check_readers(records, product)
        except Refused as refused:
            problem = str(refused)
    return Call(product, _views(operands), problem=problem)


def _views(operands: Iterable[Operand]) -> tuple[ParameterView, ...]:
    """The parameters in the projections of these."""
    return tuple(x.view for operand in operands for x in operand.value.projections)


# What a clip scales and where its logits are.


def _call(records: Records, products: Sequence[int]) -> Call:
    """The attention whose logits are the sum of these products of queries and keys: what a clip may
    scale (`_proved` proves one of the proposals), and where its logits are; or why it is refused.
    """
    first = products[0]
    operands: list[Operand] = []
    for product in products:
        operands += records.attention.operands[product]
    call = Call(first, _views(operands))
    # Softmax takes the sum, one array, to which one list of masks and biases was added: the first
    # product's logits stand for those of all.
    logits, _ = records.attention.softmaxes[first][0]
    try:
        for product in products:
            _check_softmaxes(records, product)
            _check_readers(records, product)
        doubt = doubt_of_masks(records.graph, logits.added)
        proposals = tuple(proposals_of(records, products))
        # The largest logits are those before a bias was added, such as ALiBi's: `raw`. Without one
        # they are those that softmax takes, `value`.
        raw = logits.raw if logits.is_biased else logits.value
        probe = _probe(records, logits.value, raw)
    except Refused as refused:
        return call._replace(problem=str(refused))
    return call._replace(proposals=proposals, raw=raw, probes=(probe,), doubt=doubt)


def _check_softmaxes(records: Records, product: int) -> None:
    """Refuses logits that are not what one softmax over keys takes."""
    attention = records.attention
    # For each product of softmax's weights and values: the logits that softmax takes, and the axes
    # of the product of queries and keys that count keys.
    softmaxes = attention.softmaxes[product]
    # weights[:, :8] @ v1 and weights[:, 8:] @ v2 have one softmax: that of one array,
    # along the same keys.
    different = {(logits.value, keys) for logits, keys in softmaxes}
    # `other_readers` has this product if an operation multiplies an array by exponentials of it
    # whose logits were lost on the way, as softmax(logits)² @ values, or weights @ values by a sum
    # of weights that may go over several heads. So do derivatives of the model in a loss, as of a
    # physicist's network.
    if len(different) > 1 or product in attention.other_readers:
        raise Refused(
            "several softmaxes take its logits, weights @ values are not just divided by the sum "
            "of the weights, or the function takes derivatives of it: "
            f"{records.line(product)}"
        )


def _check_readers(records: Records, product: int) -> None:
    """Refuses logits of which something else is made than a softmax: a clip would change that, too.

    Such are tanh(logits + bias), their concatenation with others, a penalty on them, and their sum
    with the next layer's logits. (A tanh of logits alone is followed, and the certificate decides.)
    """
    graph, values = records.graph, records.values
    # Arrays of the product's logits and of their maximum: the list grows while it is gone through.
    followed = [*records.nodes[product].outputs]
    for value in followed:
        for i in graph.readers[value]:
            node = records.nodes[i]
            # What has no gradient, such as a number for a log, may change too.
            if i not in graph.trained:
                continue
            for result in node.outputs:
                # A result has no logits of this product where they became something else. Their
                # maximum and softmax's weights still have them, at another `stage`.
                if not any(x.product == product for x in values[result].logits):
                    raise Refused(_why_not_alone(records, i))
                # After an exponential come softmax's weights, which change as the clip wants it.
                if (
                    node.name not in follow_logits.EXPONENTIALS
                    and result not in followed
                ):
                    followed.append(result)


def _why_not_alone(records: Records, operation: int) -> str:
    """Why a clip can't go through this operation, at which the certificate failed;
    or why the logits that it takes end there (`_check_readers`)."""
    node, line = records.nodes[operation], records.line(operation)
    values = records.inputs(node)
    has_weight = any(value.is_weight for value in values)
    has_activation = any(value.is_activation for value in values)
    # An operand is made of parameters that the clip scales. If it is neither weight nor activation,
    # it went through a stop_gradient: the parameters are used once more, as those of a teacher.
    if not has_weight and not has_activation:
        return (
            f"a clip would change a copy of its parameters under stop_gradient too: {line} "
            f"({node.name}); give that "
            "copy as another argument"
        )
    # Logits plus parameters alone.
    if node.name in ("add", "sub") and has_weight and has_activation:
        return f"a clip would not scale its logits alone, as a learned bias is added: {line}"
    return f"a clip would not scale its logits alone: {line} ({node.name})"


def _probe(records: Records, logits: int, raw: int) -> Probe:
    """Where the logits that enter softmax are measured: the path to one of the bodies that have
    them as a variable, this variable, and that of `raw` there.

    `logits` is the array that softmax takes, and `raw` is that before a bias, or the same one.
    A `jit` in a scan, say, is a body in a body, and logits that it returns are a variable of both.
    `Certificate.located` adds to the probe which loops go over layers, and which axes count heads.

    Raises:
      Refused: They can't be measured before a bias, or what may be one, is added;
        or the body is in a loop without a gradient.
    """
    # `measure` takes the largest `raw` logits among the entries that are not hidden in `logits`:
    # it compares both arrays entry by entry, so they need the same axes in the same order. That is
    # so if the layouts say the same of where axes of queries @ keys.T are. Any product will do if
    # the logits are a sum of several: all lie in one array.
    before, after = (records.values[x].logits[0] for x in (raw, logits))
    if before.layout != after.layout:
        raise Refused("something is added to its logits before their axes change")
    # The variable that holds the array in each body that has one, by the path to the body from the
    # outermost one. `measure` needs those of both arrays in one body.
    variables = records.graph.variables[logits]
    raw_variables = records.graph.variables[raw]
    places = [place for place in variables if place in raw_variables]
    if not places:
        raise Refused(
            "something is added to its logits in a function that does not return them without it"
        )
    # The outermost of them: `measure` has to run a function with derivatives of its own
    # (`jax.custom_jvp`) a second time for logits inside of it, and not for those that it returns.
    place = min(places, key=len)
    if any(step.kind == "while" for step in place):
        raise Refused("it is inside of a loop of unknown length, which has no gradient")
    return Probe(place, variables[place], raw_variables[place])


# The proof.


def _proved(records: Records, calls: Sequence[Call]) -> Call:
    """One attention in place of calls with the same queries: the first of them, with the first
    proposal that is exact and the probes of all; or, if none is, with the problem of the last one.

    One clip scales the logits of all of these calls: a problem of one is a problem of all.
    `attentions` groups calls by their last proposal, which scales the queries alone. So all of them
    have this proposal; or none has any, since each was refused before: then the problem of the
    first is the answer.
    """
    first = calls[0]
    problem = first.problem
    # The arrays of their logits, before a bias or else what softmax takes, at which a certificate
    # ends, and where each is measured: so far a probe for each call, and none if they were refused.
    logits = [call.raw for call in calls]
    probes: list[Probe] = []
    for call in calls:
        probes += call.probes
    for spans in first.proposals:
        # A proposal that scales keys of the first call alone fits no other.
        if not all(spans in call.proposals for call in calls):
            continue
        certificate = Certificate(records, probes, logits, spans)
        # The first operation that this clip may not pass, or one that makes a loss which it changes
        # otherwise than by the logits; or None.
        operation = certificate.failure()
        if operation is not None:
            problem = _why_not_alone(records, operation)
            continue
        try:
            # Each probe with the axes of its logits that count layers and heads, if every logit
            # gets the factor of its head.
            located = tuple(map(certificate.located, probes, logits))
        except NotFollowed:
            problem = (
                "a clip would not give each of its logits the factor of its head: some are of "
                "padding or a sink, one softmax goes over several heads, heads are in another "
                "order, or one parameter makes queries and keys"
            )
        else:
            return first._replace(spans=spans, probes=located)
    # A refusal makes a warning about its masks needless.
    return first._replace(problem=problem, doubt="")
