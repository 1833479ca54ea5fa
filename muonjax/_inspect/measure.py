"""Run a jaxpr so that it also returns each head's largest attention logit, and is otherwise the one that it was.

The softmax computes the maximum of its logits anyway. `run` adds this maximum, reduced to one number a head, to what is
returned by the body that holds it and by every body around it. All else is bound as JAX itself binds it when it runs a
jaxpr: scopes, contexts, custom derivatives, random numbers and the order of operations stay.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from muonjax._inspect import versions
from muonjax._inspect.graph import Step
from muonjax._inspect.positions import other_axes
from muonjax._inspect.versions import Body, opened


class Probe(NamedTuple):
    """Where the logits of one attention are, and which of their axes are kept."""

    path: tuple[Step, ...]  # the bodies that lead to them, from the outside
    variable: Var  # the logits after scale, bias and mask, in the innermost body
    heads: tuple[int, ...] = ()  # the axes kept; all others are maximized over
    # The logits before mask and bias: measured where `variable` does not mask.
    raw: Var | None = None
    # Where `variable` is less than `raw` by this number below zero, it is masked.
    hidden: float = 0.0
    # The head of each entry of these axes, if they are more or in another order.
    entries: tuple[int, ...] = ()
    unit: float = 1.0  # of the logits, in those of exp
    # Under `vmap`, softmax gets the logits of the first example in all of them.
    shared: bool = False


def run(body: Body, probes: Sequence[Probe | Any], *arrays: Any) -> list[Any]:
    """What `body` returns, and for each probe the largest logits, float32 [*layers, *heads].

    NaN stays NaN; a head whose logits are all masked has -inf. No derivative passes. The type of an array in place of a
    probe is that of largest logits in another branch: all are -inf.
    """
    jaxpr = opened(body)
    given = [*versions.constants(body), *arrays]
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    values: dict[Any, Any] = dict(zip(inputs, given, strict=True))
    # Several calls of an attention may have one probe. Those with a path are measured in a body of an equation.
    here: dict[Var, list[Probe]] = {}
    inside: dict[int, list[Probe]] = {}
    for probe in dict.fromkeys(probes):
        if not isinstance(probe, Probe):
            continue
        if probe.path:
            inside.setdefault(probe.path[0].equation, []).append(probe)
        else:
            here.setdefault(probe.variable, []).append(probe)
    maxima: dict[Probe, Any] = {}

    def measure(variables: Sequence[Any]) -> None:
        for variable in variables:
            for probe in here.get(variable, ()):
                raw = None if probe.raw is None else values[probe.raw]
                maxima[probe] = _largest(values[variable], raw, probe)
                # For `check_clip` alone: under its `vmap` all examples go on with the logits of the first.
                if probe.shared:
                    values[variable] = _of_the_first(values[variable])

    # Logits may be an input of the body, as where a softmax has a function of its own.
    measure(inputs)
    # Logits before a mask is added are measured after it: they are kept until then.
    kept: set[Var | None] = set(here)
    for probe in itertools.chain(*here.values()):
        kept.add(probe.raw)
    last_uses = _last_uses(jaxpr, kept)
    for index, eqn in enumerate(jaxpr.eqns):
        operands = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        # As JAX runs a jaxpr, so that errors and profiles name the user's lines and scopes.
        scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=scope),
            eqn.ctx.manager,
        ):
            if index in inside:
                results, measured = _enclosing(eqn, tuple(inside[index]), operands)
                maxima |= zip(inside[index], measured, strict=True)
            else:
                results = bound(eqn, operands)
            values |= zip(eqn.outvars, results, strict=True)
            measure(eqn.outvars)
        # Outside of jit they would stay in memory.
        for variable in last_uses[index]:
            del values[variable]
    results = []
    for v in jaxpr.outvars:
        results.append(jnp.asarray(v.val) if isinstance(v, Literal) else values[v])
    for probe in probes:
        results.append(maxima[probe] if probe in maxima else _nothing(probe))
    return results


def _last_uses(jaxpr: Any, kept: Iterable[Any]) -> list[set[Any]]:
    """For each equation the variables that no later one takes, without results of the jaxpr and those to be kept."""
    # From the end to the beginning: a variable that is seen for the first time is used for the last time.
    later = {*kept, *_variables(jaxpr.outvars)}
    last_uses = []
    for eqn in reversed(jaxpr.eqns):
        variables = _variables([*eqn.invars, *eqn.outvars]) - later
        last_uses.append(variables)
        later |= variables
    return last_uses[::-1]


def _variables(atoms: Iterable[Any]) -> set[Any]:
    """Without the numbers among them, which have no hash."""
    return {atom for atom in atoms if isinstance(atom, Var)}


def bound(eqn: JaxprEqn, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of an equation: by a cached `jit`, unless it has a body, an effect or a parameter without a hash.

    JAX differentiates a `jit` once, however often it is called. Functions of `jax.numpy` are such, but `jax.make_jaxpr`
    has inlined them: without a `jit` for all equal operations, 80 unrolled layers take almost twice as long to
    differentiate. Where it is traced it is inlined again, so that nothing is left of it in the program.

    Args:
      eqn: The equation.
      operands: Its inputs.
      **changed: Parameters of the equation that are others here, such as its body.
    """
    # Without the cache the primitive is bound as JAX itself binds it.
    params = eqn.params | changed
    call = _bind(eqn.primitive, params)
    if not eqn.effects and not versions.bodies(eqn):
        with contextlib.suppress(TypeError):  # a parameter without a hash
            call = _inlined(eqn.primitive, tuple(params.items()))
    out = call(*operands)
    return out if eqn.primitive.multiple_results else [out]


def _bind(primitive: Any, params: dict[str, Any]) -> Callable[..., Any]:
    """A function of the operands of a primitive."""
    return functools.partial(primitive.bind, **primitive.get_bind_params(params))


@functools.lru_cache(4096)
def _inlined(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """The same, one for all equations with equal parameters."""
    return jax.jit(_bind(primitive, dict(params)), inline=versions.inlined())


def _enclosing(
    eqn: JaxprEqn, probes: tuple[Probe, ...], operands: list[Any]
) -> tuple[list[Any], list[Any]]:
    """What an equation with bodies returns, and the maxima of the probes in its bodies: there is at least one.

    Bodies return one maximum for each probe after their own results, and so does the equation.
    """
    name, count = eqn.primitive.name, len(probes)
    # From each probe the first step of its path, and the probe as the body sees it.
    steps = [probe.path[0] for probe in probes]
    inside = tuple(probe._replace(path=probe.path[1:]) for probe in probes)
    bodies = [body for _, body in versions.bodies(eqn)]
    if name.startswith("custom_"):
        # Its derivatives are written for its outputs: the logits are computed from its operands once more.
        again = run(bodies[0], inside, *jax.lax.stop_gradient(operands))
        # Derivatives need the call itself. `check_clip` takes none, and all of its probes are shared.
        results = again[:-count] if probes[0].shared else bound(eqn, operands)
        return results, again[-count:]
    # JAX has a public call for it, which sets its other parameters.
    if name == "shard_map":
        return _shard_map(eqn, bodies[0], inside, operands)
    new = (
        _branches(bodies, steps, inside)
        if name == "cond"
        else [_traced(bodies[0], inside)]
    )
    outputs = bound(eqn, operands, **versions.with_bodies(eqn, new, count))
    maxima = list(outputs[-count:])
    # A scan stacks the maxima of its iterations: those of layers are kept, of all others the largest is.
    if name == "scan":
        for k, step in enumerate(steps):
            if not step.layer:
                maxima[k] = jax.lax.reduce_max(maxima[k], (0,))
    return outputs[:-count], maxima


def _shard_map(
    eqn: JaxprEqn, body: Body, probes: tuple[Probe, ...], operands: list[Any]
) -> tuple[list[Any], list[Any]]:
    """What a `shard_map` returns, and the maxima over all devices."""
    params = eqn.params
    mesh, axis_names = params["mesh"], params["newly_manual_axes"]
    settings = {
        "mesh": mesh,
        "axis_names": axis_names,
        "check_vma": params["check_vma"],
    }

    def local(*operands: Any) -> Any:
        """What one device returns, and the maxima over all devices, which `run` returns after it."""
        outputs = run(body, probes, *operands)
        maxima = outputs[-len(probes) :]
        for k, maximum in enumerate(maxima):
            differs = axis_names
            # JAX knows along which axes of the mesh an array differs.
            if params["check_vma"]:
                differs = axis_names & versions.varying(jax.typeof(maximum))
            axes = tuple(axis for axis in mesh.axis_names if axis in differs)
            if axes:
                maxima[k] = jax.lax.pmax(maximum, axes)
        return outputs[: -len(probes)], maxima

    out_specs = (list(params["out_specs"]), [PartitionSpec()] * len(probes))
    mapped = jax.shard_map(
        local, in_specs=params["in_specs"], out_specs=out_specs, **settings
    )
    return mapped(*operands)


def _branches(
    bodies: Sequence[Body], steps: Sequence[Step], probes: Sequence[Probe]
) -> list[Any]:
    """The branches of a `cond`, each of which returns the maxima of all probes.

    Probe k is in the branch that `steps[k]` says. In all others its maximum is -inf, of the same type.
    """
    # All branches of a `cond` return arrays of the same types, which those of the maxima are.
    kinds = []
    for step, probe in zip(steps, probes, strict=True):
        measured = _traced(bodies[step.body], (probe,))
        kinds.append(opened(measured).outvars[-1].aval)
    branches = []
    for branch, body in enumerate(bodies):
        wanted: list[Any] = list(kinds)
        for k, step in enumerate(steps):
            if step.body == branch:
                wanted[k] = probes[k]
        branches.append(_traced(body, tuple(wanted)))
    return branches


def _nothing(kind: Any) -> jax.Array:
    """Largest logits of this type where there are none: -inf, as of a branch of a `cond` that skips its layer."""
    # Under explicit axes, or inside of a `shard_map`, the type says how the maxima are divided.
    x = jax.lax.full(kind.shape, -jnp.inf, jnp.float32, sharding=kind.sharding)
    axes = tuple(versions.varying(kind))
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def _traced(body: Body, probes: tuple[Probe | Any, ...]) -> Any:
    """The jaxpr of `run` for this body and these probes.

    In place of a probe that is in another branch of a `cond` there is the type of its maximum: `run` then returns -inf.

    One jaxpr for one body: 80 calls of a layer's jaxpr are 80 calls of one new jaxpr, in every step.
    """
    # By the body itself, and not for longer than it lives.
    known = _TRACED.setdefault(body, {})
    if probes not in known:
        shapes = [variable.aval for variable in opened(body).invars]
        measured = functools.partial(run, body, probes)
        known[probes] = jax.make_jaxpr(measured)(*shapes)
    return known[probes]


_TRACED: weakref.WeakKeyDictionary[Body, dict[Any, Any]] = weakref.WeakKeyDictionary()


@jax.custom_batching.custom_vmap
def _of_the_first(x: jax.Array) -> jax.Array:
    """The array; under `vmap` that of the first example, for all of them."""
    return x


@_of_the_first.def_vmap
def _(size: int, is_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return (x[0] if is_batched[0] else x), False


def _largest(logits: jax.Array, raw: jax.Array | None, probe: Probe) -> jax.Array:
    """The maximum of the logits over all axes but the heads, float32 [*heads].

    `raw`: the logits before masks and biases, if any were added. An entry to which `probe.hidden` or less was added is
    masked, and all others are measured without what was added.
    """
    # NaN stays NaN: compared with anything it is false, and so not masked.
    if raw is not None:
        raw = raw.reshape(logits.shape)
        logits = jnp.where(logits - raw <= probe.hidden, -jnp.inf, raw)
    # Softmax's own maximum is not used: one more reader of it changes how XLA rounds.
    others = other_axes(logits.ndim, probe.heads)
    maxima = jax.lax.reduce_max(jax.lax.stop_gradient(logits), tuple(others))
    maxima = maxima.astype(jnp.float32)
    if probe.entries:
        # Entry by entry, without an array of indices: the body of a `jax.checkpoint` can't have constants.
        of_heads: list[list[jax.Array]] = [[] for _ in range(max(probe.entries) + 1)]
        flat = maxima.reshape(-1)
        for entry, head in enumerate(probe.entries):
            of_heads[head].append(flat[entry])
        largest = [functools.reduce(jnp.maximum, entries) for entries in of_heads]
        maxima = jnp.stack(largest)
    return maxima if probe.unit == 1 else maxima * probe.unit
