"""Read from the user's own function which parameters are matrices, where attention is, and where its logits are."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from muonjax._clip.find_sites import module_of
from muonjax._clip.qk_clip import apply_qk_clip
from muonjax._clip.site import Site
from muonjax._clip.statistics import larger
from muonjax._common.arguments import warn_user
from muonjax._common.models import as_function_of_parameters, is_model
from muonjax._common.trees import flatten_paths, flatten_with_names, is_masked, listed
from muonjax._inspect.attention import Call, attentions
from muonjax._inspect.constants import MASKED
from muonjax._inspect.decisions import Decision, decide
from muonjax._inspect.findings import Walk
from muonjax._inspect.follow import follow, no_collection
from muonjax._inspect.measure import run
from muonjax._matrices.matrix_view import DimensionNumbersTree
from muonjax._names.dimension_numbers import numbers_tree, routes


class Attention(NamedTuple):
    """One attention of a program.

    Attributes:
      name: The path of its module, of its query projection where several share a module, "max_logits" for the only one
        at the root: the key of its entry in `max_logits`.
      line: File and line of its product of queries and keys.
      site: What a clip scales; None if that would not scale its logits.
      problem: Why not, "" if it can be clipped.
    """

    name: str
    line: str
    site: Site | None
    problem: str


class Program:
    """What a function does with its parameters; made by `muonjax.inspect`.

    Optimizers take it as their second argument, `muon(lr, program)` or `muonclip(lr, program)`, and so does
    `tabulate(params, program)`.

    Attributes:
      attentions: The attentions in the order in which they are computed.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> def loss(params, x):
      ...   return jnp.mean((jnp.tanh(x @ params["in"]) @ params["mid"] @ params["out"]) ** 2)
      >>> params = {"in": jnp.ones((4, 8)), "mid": jnp.ones((8, 8)), "out": jnp.ones((8, 1))}
      >>> program = muonjax.inspect(loss, params, jnp.ones((2, 4)))
      >>> program.dimension_numbers()["in"]
      MuonDimensionNumbers(reduction_axis=0, output_axis=1)
      >>> program.dimension_numbers()["out"] is None  # an output head
      True
    """

    def __init__(
        self, decisions: dict[str, Decision], attentions: Sequence[Attention], params: Any, fun: Any
    ):
        self.attentions = tuple(attentions)
        self._decisions, self._params, self._fun = decisions, params, fun
        self._call = _name(fun)

    def dimension_numbers(
        self, params: Any = None, *, attention: Literal["whole", "heads"] = "whole"
    ) -> DimensionNumbersTree:
        """The tree that optimizers take in place of the program: for each parameter its axes as a matrix, or None.

        Args:
          params: Some or all of the parameters that were inspected, by their paths; sizes may differ. What is masked
            (`optax.MaskedNode`) stays so. None: all of them.
          attention: "whole" makes one matrix of an attention projection, "heads" one for each head of queries, keys
            and values.

        Returns:
          A tree like the parameters.

        Raises:
          ValueError: two uses of a parameter contradict each other; names both, with their lines. Or `params` has a
            parameter that was not inspected.
        """
        paths, leaves, structure = flatten_with_names(self._params if params is None else params)
        named = {"/".join(path): leaf for path, leaf in zip(paths, leaves, strict=True)}
        trained = [name for name, leaf in named.items() if not is_masked(leaf)]
        if missing := [name for name in trained if name not in self._decisions]:
            raise ValueError(
                f"{self._call} was inspected without the parameters {listed(missing, ', ')}; inspect it with the tree "
                "that the optimizer gets."
            )
        found = {name: self._decisions[name] for name in trained}
        if wrong := [f"{name!r}: {d.problem}" for name, d in found.items() if d.problem]:
            raise ValueError(
                f"{self._call} uses a parameter in two ways: {listed(wrong)}. Say which one counts, with a tree in "
                "place of the program: program.dimension_numbers(others) | {name: MuonDimensionNumbers(...)}."
            )
        by_name = dict.fromkeys(named)
        if any(d.by_names for d in found.values()):
            # Names are asked about these alone, and warn of what they decide or leave open.
            rules = [
                (f"^{re.escape(name)}$", d.numbers) for name, d in found.items() if not d.by_names
            ]
            reasons = {name: d.why for name, d in found.items() if d.by_names}
            tree = numbers_tree(*routes(structure.unflatten(leaves), rules=rules, reasons=reasons))
            by_name = dict(zip(named, structure.flatten_up_to(tree), strict=True))

        def numbers(name: str) -> Any:
            if name not in found:
                return named[name]
            d = found[name]
            return (
                by_name[name] if d.by_names else d.per_head if attention == "heads" else d.numbers
            )

        return structure.unflatten(map(numbers, named))

    @property
    def vectors(self) -> set[str]:
        """Paths of biases, gains and the like, in stacks of layers too, and of parameters without a gradient.

        Weight decay is not for them by default.
        """
        return {path for path, d in self._decisions.items() if d.is_vector or not d.trains}

    def skipped(self, params: Any) -> str:
        """A sentence about parameters that are masked in `params` or left out, and their attentions; "" for none."""
        trained = {name for name, leaf in flatten_paths(params).items() if not is_masked(leaf)}
        if not (left := [name for name in self._decisions if name not in trained]):
            return ""
        sites = [
            (a.name, a.site, f"{a.name}/" if a.site.path else "") for a in self.attentions if a.site
        ]
        calm = [
            name
            for name, site, root in sites
            if any(root + scale.path in left for scale in site.scales)
        ]
        clips = f"; not clipped: {listed(calm, ', ')}" if calm else ""
        return f"Not among these parameters: {listed(left, ', ')}{clips}."

    def why(self, path: str) -> str:
        """The reason for the decision on one parameter, with the file and line of its use.

        Args:
          path: Its "/"-joined path.

        Returns:
          The reason, such as "multiplied along axis 0: model.py:41".

        Raises:
          KeyError: there is no such parameter.
        """
        return self.decision(path).why

    def decision(self, path: str) -> Decision:
        """The decision on one parameter, by its "/"-joined path."""
        if path not in self._decisions:
            there = listed([repr(name) for name in self._decisions], ", ")
            raise KeyError(f"{self._call} has no parameter {path!r}; there are {there}")
        return self._decisions[path]

    @property
    def sites(self) -> tuple[Site, ...]:
        """What `qk_clip`, `muonclip` and `adamclip` take as sites: every attention that can be clipped exactly.

        Raises:
          ValueError: No attention can be clipped; the message has the reasons and their lines.

        Warns:
          UserWarning: Some attentions can't be clipped.
        """
        found = tuple(a.site for a in self.attentions if a.site is not None)
        if not found:
            raise _no_site(self._call, self.attentions, "muon instead of muonclip")
        if len(found) < len(self.attentions):
            warn_user(f"{self._call}: not clipped are {_refused(self.attentions)}.")
        return found

    def check_clip(self, params: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Clips each attention by another factor for each head, between 1 and 1/2, and measures what changes.

        Use it to verify a clip: it runs the function twice for each attention, vectorized, with the parameters as they
        are and clipped. Softmax gets the logits of the first in both, so that everything else must stay equal.

        Args:
          params: Parameters, with arrays as leaves, or an NNX model.
          *args: The function's further arguments, arrays.
          **kwargs: Its keyword arguments.

        Returns:
          For each attention the largest relative deviation: of a head's largest logit from its factor times what it
          was, and of what the function returns from what it returned. Some 1e-6 in float32.
        """
        fun, params, args = as_function_of_parameters(self._fun, params, args)
        deviations, sites = {}, self.sites
        closed = jax.make_jaxpr(lambda params: fun(params, *args, **kwargs))(params)
        given = jax.tree.leaves((args, kwargs))

        def run_both(both: Any) -> Any:
            return find_maxima(closed, [both], self._call, given, shared=True)

        shapes = jax.eval_shape(run_both, params)[1]
        nothing = {name: jnp.full(x.shape, -jnp.inf) for name, x in shapes.items()}
        for name, shape in shapes.items():
            factors = jnp.linspace(0.5, 1.0, shape.size).reshape(shape.shape)
            clipped = apply_qk_clip(params, nothing | {name: 1 / factors}, sites, 1.0)
            results, maxima = jax.vmap(run_both)(
                jax.tree.map(lambda *x: jnp.stack(x), params, clipped)
            )
            logits, after = maxima[name]
            found = [_deviation(factors * logits, after, each=True)]
            found += [_deviation(*x) for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]
            deviations[name] = float(np.max(found))
        return deviations

    def __repr__(self) -> str:
        matrices = sum(d.numbers is not None for d in self._decisions.values())
        return f"<Program of {self._call}: matrices {matrices}, attentions {len(self.attentions)}>"


def inspect(fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Program:
    """Reads what a function does with its parameters: which are matrices, where attention is, how to clip it.

    Nothing is computed, and no name matters: the jaxpr of `fun` says which axes of a parameter are summed over, which
    are looked up, and what comes after.

    Args:
      fun: Your loss `fun(params, *args, **kwargs)`, or `fun(model, *args, **kwargs)` of an NNX model; for several
        losses, as of a GAN, give a function that adds them. A forward function works too, but then nothing shows
        that its last product is an output head.
      params: A tree of arrays or `jax.ShapeDtypeStruct`s, the one that the optimizer gets. Or an NNX model, which stays
        as it is; its `nnx.Param`s are the parameters.
      *args: Further arguments, arrays or `jax.ShapeDtypeStruct`s; anything else is passed on as it is.
      **kwargs: Keyword arguments of `fun`, likewise.

    Returns:
      A `Program`.

    Raises:
      TypeError: `fun` does not take these arguments.
      ValueError: no product, look-up or sum uses `params`.

    Warns:
      UserWarning: a parameter is never used, or only without the batch, as in a penalty.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> def loss(params, tokens):
      ...   x = params["embed"][tokens]
      ...   return -jnp.mean(jax.nn.log_softmax(jax.nn.relu(x @ params["up"]) @ params["head"]))
      >>> params = {"embed": jnp.ones((256, 64)), "head": jnp.ones((256, 256)), "up": jnp.ones((64, 256))}
      >>> program = muonjax.inspect(loss, params, jax.ShapeDtypeStruct((2, 8), "int32"))
      >>> [name for name, numbers in program.dimension_numbers().items() if numbers]
      ['up']
    """
    if not callable(fun) or is_model(fun):
        raise TypeError(
            f"inspect(fun, params, ...): the first argument is a {type(fun).__name__}; it must be your loss function."
        )
    call, whole, given = _name(fun), fun, ", ".join(type(x).__name__ for x in (params, *args))
    fun, params, args = as_function_of_parameters(fun, params, args)
    leaves, structure = jax.tree.flatten(params)
    check_arrays(call, params)

    def traced(leaves: list[Any], arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = [next(given) if _is_array(x) else x for x in rest]
        more, keywords = jax.tree.unflatten(rest_structure, filled)
        return fun(jax.tree.unflatten(structure, leaves), *more, **keywords)

    rest, rest_structure = jax.tree.flatten((args, kwargs))
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    try:
        closed, outputs = jax.make_jaxpr(traced, return_shape=True)(
            shapes, [x for x in rest if _is_array(x)]
        )
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # Flax's
            error.add_note(
                f"{call}: fun changes a module that is not one of its arguments. Give the model itself, "
                "muonjax.inspect(loss_fn, model, ...), or merge it in fun from a state that is an argument."
            )
        error.add_note(
            f"{call} called your function with ({given}): first the parameters, then the batch."
        )
        raise
    first = next(iter(jax.tree.leaves(outputs)), None)
    is_loss = first is not None and first.shape == () and jnp.issubdtype(first.dtype, jnp.inexact)
    paths = list(flatten_paths(params))
    with no_collection():
        walk = follow(closed, range(len(leaves)))
        decisions = dict(zip(paths, decide(walk, is_loss), strict=True))
        attentions = _attentions(walk, paths)
    unused = [name for name, decision in decisions.items() if not decision.trains]
    if leaves and len(unused) == len(paths):
        raise ValueError(
            f"{call}: nothing that it returns comes from these parameters by a product, a look-up or a sum; give your "
            "loss and the tree that it takes."
        )
    if unused:
        names = listed([f"{name} ({decisions[name].why})" for name in unused], ", ")
        warn_user(
            f"{call}: parameters that meet no data, or have no gradient, go to Adam: {names}."
        )
    doubts = [f"{name} ({d.doubt})" for name, d in decisions.items() if d.doubt]
    if doubts:
        warn_user(
            f"{call} can't tell what these are: {listed(doubts, ', ')}. "
            "See program.why(name); to decide otherwise, change the tree program.dimension_numbers()."
        )
    clipped = [(a.name, calls[0]) for a, calls in attentions if a.site is not None]
    masks = [f"{name!r} ({call.doubt})" for name, call in clipped if call.doubt]
    if masks:
        warn_user(
            f"{call} can't tell whether logits get a mask or a bias: {listed(masks, ', ')}. Numbers below "
            f"{MASKED:.0f} count as a mask; give masks as booleans, jnp.where(mask, logits, -jnp.inf)."
        )
    return Program(decisions, [a for a, _ in attentions], structure.unflatten(shapes), whole)


def check_arrays(call: str, params: Any) -> None:
    """Raise for a parameter that is a function, by its path; JAX names its type alone."""
    for path, leaf in flatten_paths(params).items():
        if callable(leaf):
            raise TypeError(
                f"{call}: {path!r} is no array but {reprlib.repr(leaf)}. Give arrays alone; in Equinox the first of "
                "eqx.partition(model, eqx.is_inexact_array), and eqx.combine in the loss puts both together."
            )


def _name(fun: Callable[..., Any]) -> str:
    return f"inspect({getattr(fun, '__name__', type(fun).__name__)})"


def _deviation(x: jax.Array, y: jax.Array, each: bool = False) -> float:
    """How far `y` is from `x`, in units of the largest entry or of `each`; two that are -inf are equal."""
    unit = jnp.abs(x) if each else jnp.max(jnp.abs(x), initial=0)
    return float(jnp.max(jnp.where(x == y, 0.0, jnp.abs(y - x) / unit), initial=0))


def find_maxima(
    closed: ClosedJaxpr,
    arguments: Sequence[Any],
    call: str,
    given: Sequence[Any] = (),
    shared: bool = False,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """What a function returns, and the largest logits [*layers, heads] of each attention that can be clipped, by name.

    Args:
      closed: The jaxpr of the function.
      arguments: Those whose leaves are the inputs of `closed`. All of these leaves are parameters, or, as where a loss
        is differentiated by its input too, those of one argument are.
      call: What an error names.
      given: The leaves of its other arguments, which are constants of `closed`.
      shared: As in `Probe`.
    """
    with no_collection():
        sites = _clippable(closed, arguments, given, call)
    probes = [one.probe._replace(shared=shared) for _, calls in sites for one in calls if one.probe]
    results = run(closed, probes, *jax.tree.leaves(arguments))
    count = len(results) - len(probes)
    maxima = iter(results[count:])
    found = {
        name: functools.reduce(
            larger, [next(maxima).reshape(*one.layers, one.heads) for one in calls]
        )
        for name, calls in sites
    }
    return results[:count], found


def _clippable(
    closed: ClosedJaxpr, arguments: Sequence[Any], given: Sequence[Any], call: str
) -> list[tuple[str, list[Call]]]:
    """Name and calls of each attention that can be clipped."""
    trees = [arguments, *arguments] if len(arguments) > 1 else arguments
    ends = itertools.accumulate((len(jax.tree.leaves(x)) for x in arguments), initial=0)
    found, used = [], False
    for tree, start in zip(trees, [0, *ends], strict=False):
        walk = follow(closed, range(start, start + len(jax.tree.leaves(tree))), given)
        found, used = _attentions(walk, list(flatten_paths(tree))), used or bool(walk.uses.records)
        if clippable := [(a.name, calls) for a, calls in found if a.site is not None]:
            return clippable
    if not used:
        raise ValueError(
            f"{call}: nothing that it returns depends on the arguments to differentiate by; give the parameters "
            "that fun uses as an argument, do not close over them."
        )
    raise _no_site(call, [a for a, _ in found], "jax.value_and_grad and muon")


def _refused(attentions: Iterable[Attention]) -> str:
    return listed([f"{a.name!r} ({a.line}): {a.problem}" for a in attentions if a.site is None])


def _no_site(call: str, attentions: Sequence[Attention], instead: str) -> ValueError:
    why = f": no attention can be clipped. {_refused(attentions)}"
    if not attentions:
        why = " has no attention that trains: no softmax of a product of two activations, multiplied by a third"
    return ValueError(f"{call}{why}. Use {instead}.")


def _attentions(walk: Walk, paths: Sequence[str]) -> list[tuple[Attention, list[Call]]]:
    """Named attentions with their calls; one that is called several times is one."""
    groups = attentions(walk)
    roots = [
        module_of([paths[x.leaf] for x in (*group[0].spans, *group[0].views)]) for group in groups
    ]
    found, named = [], Counter()
    for group, root in zip(groups, roots, strict=True):
        first = group[0]
        if not first.spans:
            found.append((Attention(root, first.line, None, first.problem), group))
            continue
        is_alone = roots.count(root) == 1
        name = (root or "max_logits") if is_alone else paths[first.spans[0].leaf]
        named[name] += 1
        if named[name] > 1:  # heads of one projection, written one by one
            name = f"{name}:{named[name]}"
        below = [
            paths[s.leaf].removeprefix(f"{root}/" if root and is_alone else "") for s in first.spans
        ]
        scales = tuple(
            dataclasses.replace(s.scale, path=x) for s, x in zip(first.spans, below, strict=True)
        )
        stack = first.spans[0].stack
        path, signal = (re.escape(root), "max_logits") if is_alone else ("", name)
        public = Site(path=path, scales=scales, signal=signal, scan_axis=stack or None, exact=True)
        found.append((Attention(name, first.line, public, ""), group))
    return found


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) or (hasattr(x, "shape") and hasattr(x, "dtype"))
