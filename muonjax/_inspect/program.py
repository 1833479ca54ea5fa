"""Read from the user's own function which parameters are matrices, where attention is,
and where its logits are."""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from muonjax._clip.qk_clip import apply_qk_clip
from muonjax._clip.site import Site
from muonjax._common.arguments import errors_of, warn_user
from muonjax._common.nnx_models import as_function_of_parameters, is_model
from muonjax._common.trees import flatten_paths, is_masked, listed
from muonjax._inspect.clippable_attention import Call
from muonjax._inspect.decisions import Decision, decide
from muonjax._inspect.follow import follow
from muonjax._inspect.measure import Probe, with_maxima
from muonjax._inspect.name_attentions import Attention, named_attentions
from muonjax._inspect.possible_numbers import MASKED
from muonjax._inspect.records import Records
from muonjax._matrices.matrix_view import DimensionNumbersTree
from muonjax._names.callers_rules import PathRules, apply_rules
from muonjax._names.routes import routes


class Program:
    """What a function does with its parameters; made by `muonjax.inspect`.

    Optimizers take it as their second argument, `muon(lr, program)` or `muonclip(lr, program)`, and
    so does `tabulate(params, program)`.

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
        self,
        decisions: dict[str, Decision],
        attentions: Sequence[Attention],
        params: Any,
        fun: Any,
    ):
        self.attentions = tuple(attentions)
        self._decisions, self._params, self._fun = decisions, params, fun
        self._call = named_call("inspect", fun)

    def with_rules(self, rules: PathRules) -> Program:
        """The same program with other decisions on some parameters:
        `muon(lr, program.with_rules([("router", None)]))`.

        Args:
          rules: As in `muonjax.dimension_numbers`: pairs of a regular expression, searched for in
            "/"-joined paths, and `MuonDimensionNumbers`, or None for AdamW.
            The first that matches counts.

        Raises:
          ValueError: A rule matches no parameter, or its numbers do not fit one.
          TypeError: A rule is no such pair.
        """
        with errors_of("with_rules"):
            ruled = apply_rules(flatten_paths(self._params), rules)
        decisions = dict(self._decisions)
        for name, numbers in ruled.items():
            # The rule counts for `per_head` too. Whether the parameter trains, and whether it is a
            # vector, is still what the program says.
            decisions[name] = decisions[name]._replace(
                numbers=numbers, per_head=numbers, why="a rule of yours", by_names=False
            )
        return Program(decisions, self.attentions, self._params, self._fun)

    def per_head(self) -> Program:
        """The same program with a matrix for each head of an attention's queries,
        keys and values."""
        decisions = {
            path: decision._replace(numbers=decision.per_head)
            for path, decision in self._decisions.items()
        }
        return Program(decisions, self.attentions, self._params, self._fun)

    def dimension_numbers(self, params: Any = None) -> DimensionNumbersTree:
        """For each parameter its axes as a matrix, or None:
        what `muonjax.orthogonalize` and Optax's Muon take.

        Args:
          params: Some or all of the parameters that were inspected, by their paths; sizes may
            differ. What is masked (`optax.MaskedNode`) stays so. None: all of them.

        Returns:
          A tree like the parameters.

        Raises:
          ValueError: `params` has a parameter that was not inspected, or not with so many axes.

        Warns:
          UserWarning: the program does not decide a parameter, and its name does;
            with the reason and its line.
        """
        params = self._params if params is None else params
        leaf_of = flatten_paths(params)
        inspected = flatten_paths(self._params)
        decisions: dict[str, Decision] = {}
        missing = []
        for path, leaf in leaf_of.items():
            if is_masked(leaf):
                continue
            # Sizes may be others, but not the number of axes:
            # a stack of several models has one more.
            if path in inspected and jnp.ndim(leaf) == jnp.ndim(inspected[path]):
                decisions[path] = self._decisions[path]
            else:
                missing.append(f"{path} {np.shape(leaf)}")
        if missing:
            raise ValueError(
                f"{self._call} was inspected without the parameters {listed(missing, ', ')}; "
                "inspect it with the tree that the optimizer gets."
            )
        decided = {path: decision.numbers for path, decision in decisions.items()}
        # Unions of dictionaries keep the order of the first, that of the leaves. What is masked, as
        # by `optax.masked`, stays as it is.
        numbers = leaf_of | decided | _numbers_by_names(params, decisions)
        structure = jax.tree.structure(params, is_leaf=is_masked)
        return structure.unflatten(numbers.values())

    @property
    def vectors(self) -> set[str]:
        """Paths of biases, gains and the like, in stacks of layers too,
        and of parameters without a gradient.

        Weight decay is not for them by default.
        """
        return {
            path for path, d in self._decisions.items() if d.is_vector or not d.trains
        }

    def skipped(self, params: Any) -> str:
        """A sentence about parameters that are masked in `params` or left out; "" for none."""
        there = set(_paths(params))
        missing = [path for path in self._decisions if path not in there]
        if not missing:
            return ""
        return (
            "Not among these parameters, so that no attention of theirs is clipped: "
            f"{listed(missing, ', ')}."
        )

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
        """What `qk_clip`, `muonclip` and `adamclip` take as sites:
        every attention that can be clipped exactly.

        Raises:
          ValueError: No attention can be clipped; the message has the reasons and their lines.

        Warns:
          UserWarning: Some attentions can't be clipped.
        """
        sites = tuple(a.site for a in self.attentions if a.site is not None)
        # A `muonclip` that clips nothing would be a plain `muon` without a word.
        if not sites:
            raise _no_site(self._call, self.attentions, "muon instead of muonclip")
        if len(sites) < len(self.attentions):
            warn_user(f"{self._call}: not clipped are {_refused(self.attentions)}.")
        return sites

    def check_clip(self, params: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Clips all attentions, each head by another factor from 1/2 to 1,
        and measures what changes.

        Use it to verify a clip: it runs the function twice, vectorized, with the parameters as they
        are and clipped. In both runs softmax gets the logits of the first,
        so that all results must stay equal.

        Args:
          params: Parameters, with arrays as leaves, or an NNX model.
          *args: The function's further arguments, arrays.
          **kwargs: Its keyword arguments.

        Returns:
          For each attention the largest relative deviation: of a head's largest logit from its
          factor times what it was, or, for all attentions together, of what the function returns
          from what it returned. Some 1e-6 in float32.
        """
        fun, params, args = as_function_of_parameters(self._fun, params, args)
        sites = self.sites
        closed = jax.make_jaxpr(lambda params: fun(params, *args, **kwargs))(params)

        # With `shared`, the softmax of both examples of the `vmap` below gets the logits of the
        # first. The largest logits are those of each example, measured before that.
        def results_and_maxima(params: Any) -> Any:
            given = jax.tree.leaves((args, kwargs))
            # `self._call` is the words of errors, such as "inspect(loss_fn)".
            return find_maxima(closed, [params], self._call, given, shared=True)

        _, shapes = jax.eval_shape(results_and_maxima, params)
        # A clip at 1.0 divides the logits of a head by what is given as the largest of them. Each
        # head is given another number, so that a clip that takes one head for another shows.
        largest = jax.tree.map(
            lambda x: jnp.linspace(2.0, 1.0, x.size).reshape(x.shape), shapes
        )
        clipped = apply_qk_clip(params, largest, sites, 1.0)
        # Example 0 of the `vmap` has the parameters as they are, example 1 the clipped ones.
        pair = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, clipped)
        results, maxima = jax.vmap(results_and_maxima)(pair)
        # Each result has both examples along axis 0. How far they are apart is relative to the
        # largest entry, and for logits, below, to each head's own.
        changes = [
            _deviation(*x) for x in results if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        deviations = {}
        for name, (before, after) in maxima.items():
            of_logits = _deviation(before / largest[name], after, each=True)
            deviations[name] = float(np.max([of_logits, *changes]))  # NaN if one is
        return deviations

    def __repr__(self) -> str:
        matrices = sum(d.numbers is not None for d in self._decisions.values())
        return f"<Program of {self._call}: matrices {matrices}, attentions {len(self.attentions)}>"


def inspect(fun: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Program:
    """Reads what a function does with its parameters: which are matrices, where attention is,
    how to clip it.

    Nothing is computed, and no name matters: the jaxpr of `fun` says which axes of a parameter are
    summed over, which are looked up, and what comes after.

    Args:
      fun: Your loss `fun(params, *args, **kwargs)`, or `fun(model, *args, **kwargs)` of an NNX
        model; for several losses, as of a GAN, give a function that adds them. A forward function
        works too, but then nothing shows that its last product is an output head.
      params: A tree of arrays or `jax.ShapeDtypeStruct`s, the one that the optimizer gets. Or an
        NNX model, which stays as it is; its `nnx.Param`s are the parameters.
      *args: Further arguments, arrays or `jax.ShapeDtypeStruct`s;
        anything else is passed on as it is.
      **kwargs: Keyword arguments of `fun`, like `args`.

    Returns:
      A `Program`.

    Raises:
      TypeError: `fun` does not take these arguments.
      ValueError: no product, look-up or sum uses `params`,
        or `fun` is a training step or a gradient.

    Warns:
      UserWarning: a parameter is never used, or not seen to meet the batch, as in a penalty.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> def loss(params, tokens):
      ...   x = params["embed"][tokens]
      ...   return -jnp.mean(jax.nn.log_softmax(jax.nn.relu(x @ params["up"]) @ params["head"]))
      >>> params = {"embed": jnp.ones((256, 64)), "head": jnp.ones((256, 256))}
      >>> params["up"] = jnp.ones((64, 256))
      >>> program = muonjax.inspect(loss, params, jax.ShapeDtypeStruct((2, 8), "int32"))
      >>> [name for name, numbers in program.dimension_numbers().items() if numbers]
      ['up']
    """
    if not callable(fun) or is_model(fun):
        raise TypeError(
            f"inspect(fun, params, ...): the first argument is a {type(fun).__name__}; it must be "
            "your loss function."
        )
    # What the user gave, before a model becomes parameters and state.
    call, given = named_call("inspect", fun), fun
    types = ", ".join(type(x).__name__ for x in (params, *args))
    fun, params, args = as_function_of_parameters(fun, params, args)
    check_arrays(call, params)
    try:
        # Only shapes are traced: arrays of any size cost nothing.
        shapes = jax.eval_shape(lambda params: params, params)
        closed, result = _traced(fun, shapes, args, kwargs)
    except Exception as error:
        # Flax's, for a model that `fun` closes over.
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                f"{call}: fun changes a module that is not one of its arguments. Give the model "
                "itself, muonjax.inspect(loss_fn, model, ...), or merge it in fun from a state "
                "that is an argument."
            )
        error.add_note(
            f"{call} called your function with ({types}): first the parameters, then the batch."
        )
        raise
    is_loss = _is_loss(call, result, shapes)
    # Leaves and decisions come in the order of the tree.
    paths = _paths(params)
    records = follow(closed, len(paths))
    decisions = dict(zip(paths, decide(records, is_loss), strict=True))
    _check_uses(call, decisions)
    named = named_attentions(records, paths)
    # What an argument of the function adds may be either, and decides which logits count as masked.
    masks = [f"{attention.name!r} ({x.doubt})" for attention, x in named if x.doubt]
    if masks:
        warn_user(
            f"{call} can't tell whether logits get a mask or a bias: {listed(masks, ', ')}. "
            f"Numbers below {MASKED:.0f} count as a mask; give masks as booleans, jnp.where(mask, "
            "logits, -jnp.inf)."
        )
    return Program(decisions, [attention for attention, _ in named], shapes, given)


def _traced(
    fun: Callable[..., Any], params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `fun`, and the shapes of what it returns.

    The inputs of the jaxpr are the leaves of `params`, and then the arrays in the arguments.
    """
    # What is no array, such as a flag, a string or a function, is given to `fun` as it is.
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {
        i: leaf
        for i, leaf in enumerate(leaves)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    }

    def call(params: Any, arrays: dict[int, Any]) -> Any:
        filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fun(params, *args, **kwargs)

    return jax.make_jaxpr(call, return_shape=True)(params, arrays)


def _paths(params: Any) -> list[str]:
    """The paths of the parameters, in the order of the jaxpr's inputs.
    What Optax has masked is no input."""
    leaves = flatten_paths(params).items()
    return [path for path, leaf in leaves if not is_masked(leaf)]


def _is_loss(call: str, result: Any, params: Any) -> bool:
    """Whether a function whose results have these shapes is a loss: a number comes first, perhaps
    of several results (`has_aux`). Else it may be a model, whose last product is no sure output
    head.

    Raises:
      ValueError: What comes first is like the parameters.
    """
    first = result[0] if isinstance(result, tuple | list) and result else result
    # Gradients may have another dtype than the parameters.
    is_like_params = jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, params)
    # A loss or a model's output may have the shape of a single parameter by chance.
    if is_like_params and len(jax.tree.leaves(params)) > 1:
        raise ValueError(
            f"{call} returns a tree like the parameters, as a training step or a gradient does; "
            "give the loss function."
        )
    leaves = jax.tree.leaves(result)
    if not leaves or leaves[0].shape:
        return False
    # A whole number is a count, such as that of right answers.
    return jnp.issubdtype(leaves[0].dtype, jnp.inexact)


def _check_uses(call: str, decisions: dict[str, Decision]) -> None:
    """Raise if the function uses no parameter; warn of those that it doesn't use,
    and of those that are in doubt."""
    unused = [f"{name} ({d.why})" for name, d in decisions.items() if not d.trains]
    # Most likely the tree of another model, or a function that closes over its parameters.
    if decisions and len(unused) == len(decisions):
        raise ValueError(
            f"{call}: nothing that it returns comes from these parameters by a product, a look-up "
            "or a sum; give your loss and the tree that it takes."
        )
    if unused:
        warn_user(
            f"{call}: parameters that were not seen to meet data, or have no gradient, go to Adam: "
            f"{listed(unused, ', ')}."
        )
    # Decided, but on what may be a coincidence of the program.
    doubts = [f"{name} ({d.doubt})" for name, d in decisions.items() if d.doubt]
    if doubts:
        warn_user(
            f"{call} can't tell what these are: {listed(doubts, ', ')}. "
            "See program.why(name); program.with_rules([(name, None)]) decides otherwise."
        )


def _numbers_by_names(params: Any, decisions: dict[str, Decision]) -> dict[str, Any]:
    """The dimension numbers of those parameters that the program leaves to names,
    with the warnings that names give.

    `decisions` has what the program says, by path, of all parameters that Optax has not masked.
    """
    # What the program decides becomes a rule, so that names decide, and warn of,
    # the other parameters alone.
    rules, reasons = [], {}
    for path, decision in decisions.items():
        if decision.by_names:
            reasons[path] = decision.why
        else:
            rules.append((f"^{re.escape(path)}$", decision.numbers))
    if not reasons:
        return {}
    answers = routes(params, rules=rules, reasons=reasons)
    return {path: answers[path].numbers for path in reasons}


def check_arrays(call: str, params: Any) -> None:
    """Raise for a parameter that is a function, by its path; JAX names its type alone."""
    # An Equinox model has functions among its leaves, such as its activation.
    for path, leaf in flatten_paths(params).items():
        if callable(leaf):
            raise TypeError(
                f"{call}: {path!r} is no array but {reprlib.repr(leaf)}. Give arrays alone; in "
                "Equinox the first of eqx.partition(model, eqx.is_inexact_array), and eqx.combine "
                "in the loss puts both together."
            )


def named_call(name: str, fun: Callable[..., Any]) -> str:
    """A public function and the user's function that it gets, for errors: "inspect(loss_fn)"."""
    return f"{name}({getattr(fun, '__name__', type(fun).__name__)})"


def _deviation(x: jax.Array, y: jax.Array, each: bool = False) -> float:
    """How far `y` is from `x`, in units of the largest entry or of `each`;
    two that are -inf are equal."""
    # Each head's logit has a size of its own; entries of a result are as exact as the largest of
    # them.
    unit = jnp.abs(x) if each else jnp.max(jnp.abs(x), initial=0)
    # 0 / 0, and -inf - -inf of a head whose logits are all masked, are no deviation.
    relative = jnp.where(x == y, 0.0, jnp.abs(y - x) / unit)
    return float(jnp.max(relative, initial=0))


def find_maxima(
    closed: ClosedJaxpr,
    arguments: Sequence[Any],
    call: str,
    given: Sequence[Any] = (),
    shared: bool = False,
) -> tuple[list[Any], dict[str, jax.Array]]:
    """What a function returns, as a flat list of arrays, and the largest logits [*layers, heads] of
    each attention that can be clipped, by name.

    Args:
      closed: The jaxpr of the function.
      arguments: Trees whose leaves are the inputs of `closed`. The first holds the parameters.
      call: What an error names.
      given: The arrays of its other arguments, which `closed` has as constants: they are data, and
        no numbers of the program.
      shared: Whether, under `vmap`, all examples get the logits of the first (`Probe.shared`),
        for `check_clip`.

    Raises:
      ValueError: No attention can be clipped.
    """
    # The function is read anew in each trace: probes name logits by variables, and each jaxpr has
    # its own. The inputs begin with the parameters, as many as there are paths. Those that follow
    # may be data, such as the images of an adversarial attack.
    paths = _paths(arguments[0])
    records = follow(closed, len(paths), given)
    clippable = _clippable(call, records, paths)
    probes: list[Probe] = []
    for attention in clippable.values():
        probes += (probe._replace(shared=shared) for probe in attention.probes)
    # It returns what the function returns, and then one array for each probe.
    measured_function = jaxpr_as_fun(with_maxima(closed, tuple(probes)))
    # A result that is a constant of the program would be an array of NumPy's. The last `count`, at
    # least one, are the probes': without any, `_clippable` raises.
    results = [jnp.asarray(x) for x in measured_function(*jax.tree.leaves(arguments))]
    count = len(probes)
    measured = iter(results[-count:])
    maxima = {}
    for name, attention in clippable.items():
        # The first span is that of the queries: the sizes of the axes that count layers, and the
        # number of heads.
        queries = attention.spans[0]
        # A probe gives [*layers, *heads], or [*layers, batch * heads] where these are one axis of
        # the logits. Axes of heads, as of groups, become one, and the maximum of each head is taken
        # over the examples.
        shape = (*queries.layers, -1, queries.entries)
        # Each call, as of a layer used twice, has a probe. The largest logit of all calls counts,
        # but for calls in which the head overflows, inf or NaN (`_larger`).
        of_calls = [next(measured).reshape(shape).max(-2) for _ in attention.probes]
        maxima[name] = functools.reduce(_larger, of_calls)
    return results[:-count], maxima


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """The larger of the largest logits of two calls of an attention.

    A head that overflows in one call, inf or NaN, gets the logit of the other. If it overflows in
    both, it gets -inf, or NaN where both are NaN.
    """
    finite = [jnp.where(x == jnp.inf, -jnp.inf, x) for x in (a, b)]
    # `fmax` leaves out NaN.
    return jnp.fmax(*finite)


def _clippable(call: str, records: Records, paths: Sequence[str]) -> dict[str, Call]:
    """The attentions that can be clipped, by name, in the order of the program.

    Raises:
      ValueError: No attention can be clipped; with the reasons. `call` is what the error names.
    """
    named = named_attentions(records, paths)
    # One that is refused has no spans, which say what a clip scales.
    clippable = {attention.name: x for attention, x in named if x.spans}
    if clippable:
        return clippable
    if not records.uses.by_operation:
        raise ValueError(
            f"{call}: nothing that it returns depends on the arguments to differentiate by; give "
            "the parameters that fun uses as an argument, do not close over them."
        )
    # The parameters are those of the first argument to differentiate by. If they are in another
    # one, other `argnums` find attention.
    instead = "argnums that begin with the parameters, or jax.value_and_grad and muon"
    raise _no_site(call, [attention for attention, _ in named], instead)


def _refused(attentions: Iterable[Attention]) -> str:
    """The attentions that can't be clipped, with the reasons."""
    return listed(
        [f"{a.name!r} ({a.line}): {a.problem}" for a in attentions if a.site is None]
    )


def _no_site(call: str, attentions: Sequence[Attention], instead: str) -> ValueError:
    """The error where no attention can be clipped."""
    why = f": no attention can be clipped. {_refused(attentions)}"
    # Without any, what counts as attention helps more than a list of nothing.
    if not attentions:
        why = (
            " has no attention that trains: no softmax of a product of two activations, "
            "multiplied by a third"
        )
    return ValueError(f"{call}{why}. Use {instead}.")
