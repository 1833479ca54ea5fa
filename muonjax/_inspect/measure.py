"""Run a jaxpr so that it also returns each head's largest attention logit, and is otherwise the one that it was.

The softmax computes the maximum of its logits anyway. `run` adds this maximum, reduced to one number a head, to what is
returned by the body that holds it and by every body around it. All else is bound as JAX itself binds it when it runs a
jaxpr: scopes, contexts, custom derivatives, random numbers and the order of operations stay.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from muonjax._inspect import versions
from muonjax._inspect.graph import Step
from muonjax._inspect.values import grouped
from muonjax._inspect.versions import Body, opened


class Probe(NamedTuple):
    """Where logits are, and which of their axes are kept."""

    path: tuple[Step, ...]
    variable: Var  # the logits after scale, bias and mask, in the innermost body
    heads: tuple[int, ...] = ()  # the axes kept; all others are maximized over
    raw: Var | None = (
        None  # the logits before mask and bias: measured where `variable` does not mask
    )
    hidden: float = (
        0.0  # where `variable` is less than `raw` by this number below zero, it is masked
    )
    # The head of each entry of these axes, if they are more or in another order.
    entries: tuple[int, ...] = ()
    unit: float = 1.0  # of the logits, in those of exp
    shared: bool = (
        False  # under `vmap`, softmax gets the logits of the first example in all of them
    )


def run(body: Body, probes: Sequence[Probe | Any], *arrays: Any) -> list[Any]:
    """What `body` returns, and for each probe the largest logits, float32 [*layers, *heads].

    NaN stays NaN; a head whose logits are all masked has -inf. No derivative passes. The type of an array in place of a
    probe is that of largest logits in another branch: all are -inf.
    """
    jaxpr = opened(body)
    given = [*versions.constants(body), *arrays]
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))
    each = dict.fromkeys(probe for probe in probes if isinstance(probe, Probe))
    here = grouped((p.variable, p) for p in each if not p.path)
    deeper = grouped((p.path[0].equation, p) for p in each if p.path)
    maxima: dict[Probe, Any] = {}

    def measure(variables: Sequence[Any]) -> None:
        for probe in [probe for v in variables for probe in here.get(v, ())]:
            raw = None if probe.raw is None else values[probe.raw]
            maxima[probe] = _largest(values[probe.variable], raw, probe)
            if probe.shared:
                values[probe.variable] = _of_the_first(values[probe.variable])

    measure(list(values))
    returned = {
        v for v in jaxpr.outvars if isinstance(v, Var)
    }  # a constant is a Literal, which has no hash
    kept = {*returned, *here, *(p.raw for found in here.values() for p in found)}
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
    for index, eqn in enumerate(jaxpr.eqns):
        operands = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=scope),
            eqn.ctx.manager,
        ):
            if index in deeper:
                outs, found = _enclosing(eqn, tuple(deeper[index]), operands)
                maxima |= zip(deeper[index], found, strict=True)
            else:
                outs = bound(eqn, operands)
            values |= zip(eqn.outvars, outs, strict=True)
            measure(eqn.outvars)
        for v in {v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var)} - kept:
            if last.get(v, 0) <= index:  # outside of jit it would stay in memory
                values.pop(v, None)
    results = [jnp.asarray(v.val) if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]
    return [*results, *(maxima[p] if p in maxima else _nothing(p) for p in probes)]


def bound(eqn: JaxprEqn, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """What an operation gives: by a call of a function, but for one with a body, an effect or a setting without a hash.

    JAX linearizes and transposes one function for all equal operations. `jax.make_jaxpr` inlines the functions of
    `jax.numpy` for which it would do so: without this, 80 unrolled layers take almost twice as long to differentiate.
    Where a call is traced it is inlined: nothing is left of it in the program.
    """
    params = eqn.params | changed
    call = _bind(eqn.primitive, params)
    if not eqn.effects and not versions.bodies(eqn):
        with contextlib.suppress(TypeError):
            call = _inlined(eqn.primitive, tuple(params.items()))
    out = call(*operands)
    return out if eqn.primitive.multiple_results else [out]


def _bind(primitive: Any, params: dict[str, Any]) -> Callable[..., Any]:
    return functools.partial(primitive.bind, **primitive.get_bind_params(params))


@functools.lru_cache(4096)
def _inlined(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(_bind(primitive, dict(params)), inline=versions.inlined())


def _enclosing(
    eqn: JaxprEqn, probes: tuple[Probe, ...], operands: list[Any]
) -> tuple[list[Any], list[Any]]:
    """What `eqn` returns, and the maxima of the probes in its bodies."""
    name, count = eqn.primitive.name, len(probes)
    steps = [probe.path[0] for probe in probes]
    deeper = tuple(probe._replace(path=probe.path[1:]) for probe in probes)
    bodies = tuple(body for _, body in versions.bodies(eqn))
    if name.startswith("custom_"):
        # Its outputs are fixed: the logits are computed from its operands once more.
        again = run(bodies[0], deeper, *jax.lax.stop_gradient(operands))
        return again[:-count] if probes[0].shared else bound(eqn, operands), again[-count:]
    if name == "shard_map":
        return _shard_map(eqn, bodies[0], deeper, operands)
    new = _branches(bodies, steps, deeper) if name == "cond" else [_traced(bodies[0], deeper)]
    outs = bound(eqn, operands, **versions.with_bodies(eqn, new, count))
    results, maxima = outs[:-count], outs[-count:]
    if name == "scan":
        each = zip(maxima, steps, strict=True)
        maxima = [x if step.layer else jax.lax.reduce_max(x, (0,)) for x, step in each]
    return results, maxima


def _shard_map(
    eqn: JaxprEqn, body: Body, probes: tuple[Probe, ...], operands: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Maxima over all devices."""
    mesh, axis_names, check_vma = (
        eqn.params[key] for key in ("mesh", "newly_manual_axes", "check_vma")
    )

    def local(*operands: Any) -> Any:
        outs = run(body, probes, *operands)
        results, maxima = outs[: -len(probes)], []
        for maximum in outs[-len(probes) :]:
            differs = versions.varying(jax.typeof(maximum)) if check_vma else axis_names
            axes = tuple(a for a in mesh.axis_names if a in differs & axis_names)
            maxima.append(jax.lax.pmax(maximum, axes) if axes else maximum)
        return results, maxima

    specs = [PartitionSpec()] * len(probes)
    return jax.shard_map(
        local, mesh=mesh, in_specs=eqn.params["in_specs"], out_specs=(list(eqn.params["out_specs"]), specs),
        axis_names=axis_names, check_vma=check_vma,
    )(*operands)  # fmt: skip


def _branches(bodies: Sequence[Body], steps: Sequence[Step], probes: Sequence[Probe]) -> list[Any]:
    """Each returns the maxima of all, those of the others without logits."""
    types = [
        opened(_traced(bodies[s.body], (p,))).outvars[-1].aval
        for s, p in zip(steps, probes, strict=True)
    ]
    each = list(zip(steps, probes, types, strict=True))
    return [
        _traced(body, tuple(p if s.body == b else t for s, p, t in each))
        for b, body in enumerate(bodies)
    ]


def _nothing(kind: Any) -> jax.Array:
    """Largest logits of this type where there are none."""
    x = jax.lax.full(kind.shape, -jnp.inf, jnp.float32, sharding=kind.sharding)
    axes = tuple(versions.varying(kind))
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _traced(body: Body, probes: tuple[Probe | Any, ...]) -> Any:
    """One for one body: 80 calls of a layer's jaxpr are 80 calls of one new jaxpr, in every step."""
    known = _TRACED.setdefault(body, {})
    if probes not in known:
        avals = (v.aval for v in opened(body).invars)
        known[probes] = jax.make_jaxpr(functools.partial(run, body, probes))(*avals)
    return known[probes]


_TRACED: weakref.WeakKeyDictionary[Body, dict[Any, Any]] = weakref.WeakKeyDictionary()


@jax.custom_batching.custom_vmap
def _of_the_first(x: jax.Array) -> jax.Array:
    return x


@_of_the_first.def_vmap
def _(size: int, is_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return (x[0] if is_batched[0] else x), False


def _largest(logits: jax.Array, raw: jax.Array | None, probe: Probe) -> jax.Array:
    """The maximum over all axes but the heads."""
    if raw is not None:  # NaN stays: it is no comparison's
        raw = raw.reshape(logits.shape)
        logits = jnp.where(logits - raw <= probe.hidden, -jnp.inf, raw)
    # Softmax's own maximum is not used: one more reader of it changes how XLA rounds.
    others = tuple(axis for axis in range(logits.ndim) if axis not in probe.heads)
    maxima = jax.lax.reduce_max(jax.lax.stop_gradient(logits), others).astype(jnp.float32)
    if probe.entries:  # by no constant arrays: the body of a `jax.checkpoint` can't have any
        flat, heads = maxima.reshape(-1), range(max(probe.entries) + 1)
        own = ([flat[i] for i, head in enumerate(probe.entries) if head == h] for h in heads)
        maxima = jnp.stack([functools.reduce(jnp.maximum, one) for one in own])
    return maxima if probe.unit == 1 else maxima * probe.unit
