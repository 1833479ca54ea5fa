"""A jaxpr that also returns each head's largest attention logit,
and is otherwise the one that it was.

The softmax computes the maximum of its logits anyway. `with_maxima` adds this maximum, reduced to
one number a head, to what is returned by the body that holds it and by every body around it. All
else is bound as JAX itself binds it when it runs a jaxpr: scopes, contexts, custom derivatives,
random numbers and the order of operations stay.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from muonjax._common.explicit_axes import varying
from muonjax._inspect import jax_versions
from muonjax._inspect.graph import Step
from muonjax._inspect.jax_versions import Body, opened
from muonjax._inspect.layouts import other_axes
from muonjax._inspect.possible_numbers import MASKED
from muonjax._inspect.values import grouped


class Probe(NamedTuple):
    """Where the logits of one attention are, and which of their axes are kept."""

    path: tuple[Step, ...]  # the bodies that lead to them, from the outside
    variable: Var  # the logits after scale, bias and mask, in the innermost body
    # The logits before the first bias, measured where `variable` does not mask them.
    raw: Var
    heads: tuple[int, ...] = ()  # the axes kept, in this order; the others go
    # For `check_clip`: under its `vmap`, softmax gets the logits of the first example in all of
    # them.
    shared: bool = False


def with_maxima(body: Body, probes: tuple[Probe | Any, ...]) -> ClosedJaxpr:
    """The jaxpr that returns what `body` does, and then for each probe the largest logits,
    float32 [*layers, *heads].

    NaN stays NaN. A head whose logits are all masked has what the mask leaves of them, such as
    -inf. No derivative passes.

    A branch of a `cond` returns an array for the probes of other branches too, as all branches
    return the same types. In place of such a probe `probes` has the type of its largest logits,
    and the array is -inf.
    """
    # JAX lowers a jaxpr once, however often it is called. So a body gets one new jaxpr: 80 layers
    # that call one jaxpr still call one, which is found again when the function is traced again.
    # The keys of `_WITH_MAXIMA` are weak, so nothing is kept longer than the body lives.
    known = _WITH_MAXIMA.setdefault(body, {})
    if probes not in known:
        run = functools.partial(_run, body, probes)
        known[probes] = jax.make_jaxpr(run)(*body.in_avals)
    return known[probes]


_WITH_MAXIMA = weakref.WeakKeyDictionary[Body, dict[Any, Any]]()


def _run(body: Body, probes: Sequence[Probe | Any], *arrays: Any) -> list[Any]:
    """The results of `with_maxima` for these inputs, which are traced: what the body returns, and
    then one array for each of `probes`, which is -inf for a type in place of a probe."""
    jaxpr = opened(body)
    # The probes by the variable that holds their logits, or by the number of the equation in whose
    # body these are.
    probes_at = grouped(
        (probe.path[0].equation if probe.path else probe.variable, probe)
        for probe in probes
        if isinstance(probe, Probe)
    )
    values: dict[Any, Any] = {}
    maxima: dict[Any, Any] = {}

    def read(atoms: Iterable[Any]) -> list[Any]:
        return [x.val if isinstance(x, Literal) else values[x] for x in atoms]

    def write(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
        """Keeps the arrays of these variables, and measures those that are logits; for
        `check_clip` it keeps other logits in their place."""
        values.update(zip(variables, arrays, strict=True))
        for variable in variables:
            for probe in probes_at.get(variable, ()):
                # Measured are the logits before the first bias, `raw`, at the entries that no mask
                # hides in `variable`. The body computes `raw` first, so it is here already.
                maxima[probe] = _largest(values[variable], values[probe.raw], probe)
                # `check_clip` runs the function by `vmap` with the parameters as they are and
                # clipped. From here on both have the logits of the first. If their results differ
                # still, the clip changes something else than logits.
                if probe.shared:
                    values[variable] = _of_the_first(values[variable])

    # Logits may be an input of the body, as where a softmax has a function of its own.
    write([*jaxpr.constvars, *jaxpr.invars], [*jax_versions.constants(body), *arrays])
    for index, eqn in enumerate(jaxpr.eqns):
        # As JAX runs a jaxpr, so that errors and profiles name the user's lines and scopes.
        scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=scope),
            eqn.ctx.manager,
        ):
            operands = read(eqn.invars)
            inside = tuple(probes_at.get(index, ()))
            results = _bound_with_maxima(eqn, inside, operands)
            count = len(eqn.outvars)
            write(eqn.outvars, results[:count])
            maxima |= zip(inside, results[count:], strict=True)
    # A type is that of the largest logits of another branch of a `cond`: here they are -inf.
    largest = [maxima[x] if isinstance(x, Probe) else _nothing(x) for x in probes]
    return [*read(jaxpr.outvars), *largest]


def bound(eqn: JaxprEqn, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of an equation as JAX binds it, with some parameters `changed`,
    such as its body."""
    params = eqn.primitive.get_bind_params(eqn.params | changed)
    out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bound_with_maxima(
    eqn: JaxprEqn, probes: tuple[Probe, ...], operands: list[Any]
) -> list[Any]:
    """What an equation returns, and then the largest logits of each probe in its bodies,
    if there are any."""
    if not probes:
        return bound(eqn, operands)
    name = eqn.primitive.name
    count = len(probes)
    # From each probe the first step of its path, which says in which body its logits are, and the
    # probe as that body sees it.
    steps = [probe.path[0] for probe in probes]
    inside = tuple(probe._replace(path=probe.path[1:]) for probe in probes)
    bodies = jax_versions.bodies(eqn)
    # A softmax with a `custom_jvp`: its rule gives derivatives of the outputs that it has,
    # so it can't get more outputs.
    if name.startswith("custom_"):
        # The body runs once more, and gives its results and then the maxima, which pass no
        # derivative. The results are taken from the call itself, with its derivatives.
        again = _run(bodies[0], inside, *jax.lax.stop_gradient(operands))
        # All probes of `check_clip` are shared, and no others. It takes no derivatives, and
        # replaces the logits in the body, so the results are taken from there as well.
        if probes[0].shared:
            return again
        return [*bound(eqn, operands), *again[-count:]]
    # `jax.shard_map` makes the new equation, with all of its parameters.
    if name == "shard_map":
        return _shard_map(eqn, bodies[0], inside, operands)
    # Others, such as a `jit`, a scan or a `cond`, are bound with bodies that return the maxima
    # after their other results. (In a `while` no logits are measured.) `with_bodies` also adds what
    # a `jit` says of each output, such as its sharding, for `count` more.
    new = _with_all_maxima(bodies, steps, inside)
    outputs = bound(eqn, operands, **jax_versions.with_bodies(eqn, new, count))
    # A scan stacks the maxima of its iterations. Where the iterations are layers, they are kept;
    # where they are others, such as blocks of queries, the largest one counts.
    if name == "scan":
        for k, step in enumerate(steps, start=len(eqn.outvars)):
            if not step.layer:
                outputs[k] = jax.lax.reduce_max(outputs[k], (0,))
    return outputs


def _with_all_maxima(
    bodies: Sequence[Body], steps: Sequence[Step], probes: Sequence[Probe]
) -> list[ClosedJaxpr]:
    """The bodies of an equation, each of which returns a maximum for every probe after its other
    results.

    Only a `cond` has several, its branches, and these have to return the same types. With a probe
    in each of two branches, the first returns (maximum 0, -inf) and the second (-inf, maximum 1).

    Args:
      bodies: The bodies as they are.
      steps: For each probe, the step to its body.
      probes: The probes, as a body sees them.
    """
    new = []
    for k, body in enumerate(bodies):
        # For each probe the probe itself; or, if its logits are in another body, the type of its
        # maxima, for which `with_maxima` returns -inf. The other body, run with this probe alone,
        # returns them last.
        wanted: list[Any] = []
        for step, probe in zip(steps, probes, strict=True):
            if step.body == k:
                wanted.append(probe)
            else:
                of_other = with_maxima(bodies[step.body], (probe,))
                wanted.append(of_other.out_avals[-1])
        new.append(with_maxima(body, tuple(wanted)))
    return new


def _shard_map(
    eqn: JaxprEqn, body: Body, probes: tuple[Probe, ...], operands: list[Any]
) -> list[Any]:
    """What a `shard_map` returns, and then for each probe the largest logits [*layers, *heads]
    of all devices.

    Args:
      eqn: The equation of the `shard_map`.
      body: Its body, as the program has it.
      probes: Those in this body, at least one; the path of each leads on from this body.
      operands: The values of the equation's inputs.
    """
    params = eqn.params
    check_vma = params["check_vma"]
    # The axes of the mesh over which this `shard_map` divides; an enclosing one may divide others.
    axis_names = params["newly_manual_axes"]
    count = len(probes)

    def on_one_device(*operands: Any) -> list[Any]:
        """What this device returns, and then for each probe the largest logits of all devices."""
        outputs = _run(body, probes, *operands)
        results = outputs[:-count]
        for maximum in outputs[-count:]:
            # All devices have all heads, as a clip of divided heads is refused, but perhaps other
            # examples: so the maximum is taken entry by entry, along those of `axis_names` along
            # which devices may differ. With `check_vma` JAX's type names these, and also those of
            # an enclosing `shard_map`, which takes its own maximum. Without it, all of them count.
            differing = axis_names
            if check_vma:
                differing = axis_names & varying(jax.typeof(maximum))
            axes = tuple(sorted(differing))
            results.append(jax.lax.pmax(maximum, axes) if axes else maximum)
        return results

    # The maxima are now equal along all of `axis_names`: `PartitionSpec()` says that none of these
    # divides them.
    on_all_devices = jax.shard_map(
        on_one_device,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=[*params["out_specs"], *[PartitionSpec()] * count],
        axis_names=axis_names,
        check_vma=check_vma,
    )
    return on_all_devices(*operands)


def _nothing(kind: Any) -> jax.Array:
    """Largest logits of this type where there are none: -inf,
    as of a branch of a `cond` that skips its layer."""
    # Under explicit axes, or inside of a `shard_map`, the type says how the maxima are divided.
    x = jax.lax.full(kind.shape, -jnp.inf, jnp.float32, sharding=kind.sharding)
    axes = tuple(varying(kind))
    return jax.lax.pcast(x, axes, to="varying") if axes else x


# No gather over a named axis of the `vmap`: under the checks of a `shard_map`,
# JAX has no rule for it.
@jax.custom_batching.custom_vmap
def _of_the_first(x: jax.Array) -> jax.Array:
    """The array; under `vmap` that of the first example, for all of them."""
    return x


@_of_the_first.def_vmap
def _(size: int, is_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return (x[0] if is_batched[0] else x), False


def _largest(logits: jax.Array, raw: jax.Array, probe: Probe) -> jax.Array:
    """The largest logit of each head, float32, over all axes but `probe.heads`,
    which come in this order.

    Logits [batch, head, query, key] with heads (1,) give [head], and logits
    [head of a group, batch, group, query, key] with heads (2, 0) give [group, head of a group].

    `raw`: the logits before the first bias was added, measured without it. Where `MASKED` (-9000)
    or less was added they are masked. It is the same array as `logits` if none was added: a mask
    leaves the largest logits that it does not hide as they are.
    """
    # A logit that is NaN is not masked, because a comparison with NaN is false: the maximum is NaN.
    if raw is not logits:
        logits = jnp.where(logits - raw <= MASKED, -jnp.inf, raw)
    # Softmax computes a maximum too. It is not used, as with one more reader of it XLA would round
    # the softmax in another way.
    others = other_axes(logits.ndim, probe.heads)
    maxima = jax.lax.reduce_max(jax.lax.stop_gradient(logits), tuple(others))
    # The reduction leaves the kept axes in ascending order.
    kept = sorted(probe.heads)
    maxima = maxima.transpose([kept.index(axis) for axis in probe.heads])
    return maxima.astype(jnp.float32)
