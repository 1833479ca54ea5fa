"""A jaxpr that also returns each head's largest attention logit, and is otherwise the one that it was.

The softmax computes the maximum of its logits anyway. `report` adds this maximum, reduced to one number a head, to the
outputs of the body that holds it and of every body around it. Nothing is evaluated: scopes, contexts, custom
derivatives, random numbers and the order of operations stay.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, unmapped_aval
from jax.sharding import PartitionSpec

from muonjax._program import versions
from muonjax._program.versions import Body, opened

MASKED = -1e4  # what is added to a logit to mask it is this or less; an ALiBi bias of this size masks as well


class Step(NamedTuple):
    """One enclosing equation on the way from the outermost jaxpr to the logits."""

    equation: int  # index among the enclosing jaxpr's equations
    body: int = 0  # which of its bodies: the branch of a cond, 0 otherwise
    layer: bool = False  # of a scan: its iterations are layers, and a leading axis; otherwise maximized over
    sharded: tuple[
        tuple[str, ...], ...
    ] = ()  # of a shard_map: mesh axes that divide each kept axis; () if none


class Probe(NamedTuple):
    """Where logits are, and which of their axes are kept."""

    path: tuple[Step, ...]
    variable: Var  # the logits after scale, bias and mask, in the innermost body
    softmax_axis: int
    heads: tuple[int, ...]  # the axes kept, in this order; all others are maximized over
    raw: Var | None = None  # the logits before mask and bias: measured where `variable` does not mask
    around: tuple[
        tuple[int, ...], ...
    ] = ()  # of each kept axis: entries outside of a head, heads, entries inside


class _Manual(NamedTuple):
    """A `shard_map` around a body: what tracing needs to know of it."""

    mesh: Any
    axis_names: frozenset[Any]
    check_vma: bool


def report(closed: ClosedJaxpr, probes: Sequence[Probe]) -> ClosedJaxpr:
    """`closed` with one more output for each probe: the largest logits, float32 [*layers, *heads].

    NaN stays NaN; a head whose logits are all masked, or whose branch is not taken, has -inf. No derivative passes.

    Raises:
        ValueError: for a probe inside of an equation that can't return more, such as a custom derivative's.
    """
    return _reporting(closed, tuple(probes), ())


def _cached(f: Callable[..., Any]) -> Callable[..., Any]:
    """One result for one body: 80 calls of a layer's jaxpr are 80 calls of one rewritten jaxpr, in every step."""
    results: weakref.WeakKeyDictionary[Body, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(f)
    def cached(body: Body, *rest: Any) -> Any:
        known = results.setdefault(body, {})
        if rest not in known:
            known[rest] = f(body, *rest)
        return known[rest]

    return cached


@_cached
def _reporting(body: Body, probes: tuple[Probe, ...], inside: tuple[_Manual, ...]) -> Body:
    """`body` with the maximum of each probe as a further output; `inside` are the `shard_map`s around it."""
    eqns: list[JaxprEqn] = []
    maxima: dict[Probe, Any] = {}
    here: dict[Var, list[Probe]] = {}
    deeper: dict[int, list[Probe]] = {}
    for probe in dict.fromkeys(probes):
        if probe.path:
            deeper.setdefault(probe.path[0].equation, []).append(probe)
        else:
            here.setdefault(probe.variable, []).append(probe)

    def measure(variable: Var, like: JaxprEqn) -> None:
        for probe in here.pop(variable):
            logits = [variable] if probe.raw is None else [variable, probe.raw]
            settings = {"axis": probe.softmax_axis, "heads": probe.heads, "around": probe.around}
            maxima[probe] = _append(eqns, _largest, logits, like, inside, **settings)

    for index, eqn in enumerate(opened(body).eqns):
        # Where the logits are read first, softmax computes its maximum, in the same scope.
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom in here:
                measure(atom, eqn)
        if index in deeper:
            maxima |= zip(deeper[index], _enclosing(eqns, eqn, tuple(deeper[index]), inside), strict=True)
        else:
            eqns.append(eqn)
    for variable in list(here):
        measure(variable, opened(body).eqns[-1])
    return versions.extended(body, eqns, [maxima[probe] for probe in probes])


def _enclosing(
    eqns: list[JaxprEqn], eqn: JaxprEqn, probes: tuple[Probe, ...], inside: tuple[_Manual, ...]
) -> list[Any]:
    """Appends `eqn`, which now returns the probes' maxima; returns their variables."""
    name = eqn.primitive.name
    deeper = tuple(probe._replace(path=probe.path[1:]) for probe in probes)
    if name.startswith("custom_") or name == versions.CUDNN:
        # Its outputs are fixed: the logits are computed from its operands once more.
        eqns.append(eqn)
        ((_, body),) = versions.bodies(eqn)
        alone = [_reporting(body, (probe,), inside) for probe in deeper]
        return [_append(eqns, _last_output, eqn.invars, eqn, inside, body=new) for new in alone]
    if name not in versions.EXTENSIBLE:
        raise ValueError(
            f"report(closed, probes) has a probe inside of {name!r}, whose outputs are fixed; "
            "take the variable that goes into it, or comes out, instead."
        )
    steps = tuple(probe.path[0] for probe in probes)
    bodies = tuple(body for _, body in versions.bodies(eqn))
    arguments: tuple[Any, ...] = (bodies, deeper, inside)
    first, specs = [], []
    if name == "cond":
        new, avals = _cond(bodies[0], *arguments, tuple(step.body for step in steps))
    elif name == "while":
        new, avals = _while(bodies[0], *arguments)
        first = [_append(eqns, _nothing, [], eqn, inside, aval=aval) for aval in avals]
    elif name == "shard_map":
        manual = _Manual(eqn.params["mesh"], eqn.params["newly_manual_axes"], eqn.params["check_vma"])
        new, local = _shard_map(bodies[0], *arguments, manual, tuple(step.sharded for step in steps))
        specs = [PartitionSpec(*(axes or None for axes in step.sharded)) for step in steps]
        avals = [
            _traced(
                _unsharded, (("manual", manual), ("spec", spec), ("aval", aval)), (), eqn.ctx, inside
            ).out_avals[0]
            for spec, aval in zip(specs, local, strict=True)
        ]
    else:
        new = [_reporting(bodies[0], deeper, inside)]
        avals = [output.aval for output in _outputs(new[0], len(probes))]
        if name == "scan":
            avals = [unmapped_aval(eqn.params["length"], 0, aval) for aval in avals]
    params = versions.with_bodies(eqn, new, len(avals))
    if specs:
        params["out_specs"] = (*params["out_specs"], *specs)
    maxima: list[Any] = [Var(aval) for aval in avals]
    eqns.append(eqn.replace(invars=[*eqn.invars, *first], outvars=[*eqn.outvars, *maxima], params=params))
    return [
        _append(eqns, jax.lax.reduce_max, [maximum], eqn, inside, axes=(0,))
        if name == "scan" and not step.layer
        else maximum
        for maximum, step in zip(maxima, steps, strict=True)
    ]


@_cached
def _cond(
    _: Body,
    bodies: tuple[Body, ...],
    probes: tuple[Probe, ...],
    inside: tuple[_Manual, ...],
    branches: tuple[int, ...],
) -> tuple[list[Body], list[Any]]:
    """Each branch returns the maxima of its own probes, and -inf for those of the others."""
    own = [
        tuple(p for p, branch in zip(probes, branches, strict=True) if branch == i)
        for i in range(len(bodies))
    ]
    rewritten = [_reporting(body, mine, inside) for body, mine in zip(bodies, own, strict=True)]
    found = [
        dict(zip(mine, _outputs(body, len(mine)), strict=True))
        for body, mine in zip(rewritten, own, strict=True)
    ]
    like = opened(rewritten[branches[0]]).eqns[-1]
    new = []
    for i, body in enumerate(bodies):
        eqns = list(opened(rewritten[i]).eqns)
        outputs = [
            found[i][probe]
            if branch == i
            else _append(eqns, _nothing, [], like, inside, aval=found[branch][probe].aval)
            for probe, branch in zip(probes, branches, strict=True)
        ]
        new.append(versions.extended(body, eqns, outputs))
    return new, [found[branch][probe].aval for probe, branch in zip(probes, branches, strict=True)]


@_cached
def _while(
    _: Body, bodies: tuple[Body, ...], probes: tuple[Probe, ...], inside: tuple[_Manual, ...]
) -> tuple[list[Body], list[Any]]:
    """The largest of all iterations so far is carried."""
    body, condition = bodies
    rewritten = _reporting(body, probes, inside)
    eqns = list(opened(rewritten).eqns)
    maxima = _outputs(rewritten, len(probes))
    carried = [Var(maximum.aval) for maximum in maxima]
    outputs = [
        _append(eqns, jax.lax.max, [old, new], eqns[-1], inside)
        for old, new in zip(carried, maxima, strict=True)
    ]
    avals = [v.aval for v in carried]
    ignored = [Var(aval) for aval in avals]
    new = versions.extended(body, eqns, outputs, carried)
    return [new, versions.extended(condition, opened(condition).eqns, [], ignored)], avals


@_cached
def _shard_map(
    _: Body,
    bodies: tuple[Body, ...],
    probes: tuple[Probe, ...],
    inside: tuple[_Manual, ...],
    manual: _Manual,
    sharded: tuple[tuple[tuple[str, ...], ...], ...],
) -> tuple[list[Body], list[Any]]:
    """Maxima over the devices that hold other parts of a head's logits."""
    inside = (*inside, manual)
    rewritten = _reporting(bodies[0], probes, inside)
    eqns = list(opened(rewritten).eqns)
    outputs = []
    for maximum, kept in zip(_outputs(rewritten, len(probes)), sharded, strict=True):
        differs = versions.varying(maximum.aval) if manual.check_vma else manual.axis_names
        differs = (differs & manual.axis_names).difference(*kept)
        axes = tuple(a for a in manual.mesh.axis_names if a in differs)
        if axes:
            maximum = _append(eqns, jax.lax.pmax, [maximum], eqns[-1], inside, axis_name=axes)
        outputs.append(maximum)
    return [versions.extended(bodies[0], eqns, outputs)], [output.aval for output in outputs]


def _outputs(body: Body, count: int) -> list[Any]:
    """The last `count` outputs of a body."""
    outputs = opened(body).outvars
    return outputs[len(outputs) - count :]


def _last_output(*operands: jax.Array, body: ClosedJaxpr) -> jax.Array:
    return jaxpr_as_fun(body)(*jax.lax.stop_gradient(operands))[-1]


def _largest(
    logits: jax.Array,
    raw: jax.Array | None = None,
    *,
    axis: int,
    heads: tuple[int, ...],
    around: tuple[tuple[int, ...], ...],
) -> jax.Array:
    """The maximum that softmax computes along `axis`, then that over all but the heads."""
    if raw is not None:  # NaN stays: it is no comparison's
        logits = jnp.where(logits - raw <= MASKED, -jnp.inf, raw)
    rows = jax.lax.reduce_max(jax.lax.stop_gradient(logits), (axis,))
    # XLA would make one maximum over all logits of the two: another pass over them, on a TPU with a copy of them. So it
    # merges the first one with softmax's. Softmax's own result is not used: a TPU never writes it, unless asked for it.
    rows = jax.lax.optimization_barrier(rows)
    kept = [head - (head > axis) for head in heads]
    others = tuple(i for i in range(rows.ndim) if i not in kept)
    maxima = jax.lax.reduce_max(rows, others) if others else rows
    maxima = jnp.transpose(maxima, [sorted(kept).index(head) for head in kept]).astype(jnp.float32)
    if any((outer, inner) != (1, 1) for outer, _, inner in around):
        maxima = maxima.reshape([n for sizes in around for n in sizes])
        maxima = jax.lax.reduce_max(maxima, [k for k in range(maxima.ndim) if k % 3 != 1])
    return maxima


def _nothing(aval: Any) -> jax.Array:
    """-inf for a maximum that is not computed, of the same type."""
    nothing = jax.lax.full(aval.shape, -jnp.inf, aval.dtype, sharding=aval.sharding)
    varying = tuple(versions.varying(aval))
    return jax.lax.pcast(nothing, varying, to="varying") if varying else nothing


def _unsharded(manual: _Manual, spec: PartitionSpec, aval: Any) -> jax.Array:
    """What a `shard_map` returns of `aval` under `spec`."""
    return jax.shard_map(lambda: _nothing(aval), in_specs=(), out_specs=spec, **manual._asdict())()


def _append(
    eqns: list[JaxprEqn],
    f: Callable[..., jax.Array],
    atoms: Sequence[Any],
    like: JaxprEqn,
    inside: tuple[_Manual, ...],
    **settings: Any,
) -> Any:
    """Appends the equations of `f(*atoms, **settings)`, in the scope and context of `like`; returns the result."""
    avals = tuple(atom.aval for atom in atoms)
    jaxpr = opened(_traced(f, tuple(settings.items()), avals, like.ctx, inside))
    variables: dict[Any, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    needed, used = {x for x in jaxpr.outvars if isinstance(x, Var)}, []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            used.append(eqn)
            needed.update(x for x in eqn.invars if isinstance(x, Var))
    for eqn in reversed(used):
        variables |= {v: Var(v.aval) for v in eqn.outvars}
        invars = [v if isinstance(v, Literal) else variables[v] for v in eqn.invars]
        outvars = [variables[v] for v in eqn.outvars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=like.source_info, ctx=like.ctx))
    (result,) = jaxpr.outvars
    return result if isinstance(result, Literal) else variables[result]


@functools.lru_cache(1024)
def _traced(
    f: Callable[..., jax.Array],
    settings: tuple[Any, ...],
    avals: tuple[Any, ...],
    ctx: Any,
    inside: tuple[_Manual, ...],
) -> ClosedJaxpr:
    """The jaxpr of `f(*arrays, **settings)`, as it is under `ctx` in the bodies of these `shard_map`s."""
    found: list[ClosedJaxpr] = []

    def trace(around: tuple[_Manual, ...]) -> float:
        if around:
            inner = functools.partial(trace, around[1:])
            f_mapped = jax.shard_map(inner, in_specs=(), out_specs=PartitionSpec(), **around[0]._asdict())
            jax.make_jaxpr(f_mapped)()
        else:
            with ctx.manager:
                found.append(jax.make_jaxpr(functools.partial(f, **dict(settings)))(*avals))
        return 0.0

    trace(inside)
    return found[0]
