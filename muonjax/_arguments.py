"""Check what a public call is given: its keywords, numbers and trees; and name the call in errors and warnings."""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import operator
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeGuard, TypeVar

import jax
import numpy as np
from jax.core import Tracer

_RANGES: dict[str, Callable[[float], bool]] = {
    "in [0, 1)": lambda value: 0 <= value < 1,
    "positive": lambda value: value > 0,
    "finite and not negative": lambda value: 0 <= value < math.inf,
    "positive and finite": lambda value: 0 < value < math.inf,
}


def check_range(call: str, name: str, value: Any, wanted: str, why: str, *, schedule: bool = False) -> None:
    """Raise unless it is one number, known or traced, or a schedule where those are allowed; and a known one in range.

    Args:
      call: The public function.
      name: Of the argument.
      value: What was given.
      wanted: The range, a name in `_RANGES`.
      why: Ends the message of a number out of it.
      schedule: Whether a schedule may be given.
    """
    is_jax_scalar = isinstance(value, jax.Array) and value.ndim == 0
    if not (_is_known(value) or is_jax_scalar or (schedule and callable(value))):
        also = " or a schedule" if schedule else ""
        raise TypeError(f"{call}({name}={value!r}) must be a number{also}.")
    # Python's number: inside of `jit`, a comparison of a known array is traced.
    if _is_known(value) and not _RANGES[wanted](float(value)):
        raise ValueError(f"{call}({name}={value!r}) must be {wanted}{why}")


def _is_known(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number to check: neither traced (`optax.inject_hyperparams`) nor a schedule."""
    if isinstance(value, (int, float, np.number)):
        return True
    return isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer) and value.ndim == 0


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number, Python's or NumPy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole_number(call: str, name: str, value: Any, least: int, why: str) -> int:
    """`value` as Python's; raises ValueError unless it is a whole number, at least `least`. `why` ends the message."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{call}({name}={value!r}) needs a whole number{why}")
    return int(value)


def static_integer(name: str, value: Any) -> int:
    """`value` as an int, Python's or NumPy's, that is known while tracing."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a whole number that is known while tracing.") from None


def check_transformation(argument: str, given: Any) -> None:
    """Raise unless it is an Optax transformation; `argument` begins the message, as "muon(adam"."""
    if not (hasattr(given, "init") and hasattr(given, "update")):
        raise TypeError(f"{argument}={given!r}) must be an Optax transformation, such as optax.adamw(1e-3).")


def check_order(call: str, updates: Any, state: Any, params: Any) -> None:
    """Raise where the state stands in the place of the gradients or of the parameters, and they in its."""
    if params is None:
        return
    first, second, third = (jax.tree.structure(tree) for tree in (updates, state, params))
    order = "are exchanged; call tx.update(grads, state, params)"
    if first == second != third:
        raise ValueError(f"{call}: state and parameters {order}.")
    if first != second == third:
        raise ValueError(f"{call}: gradients and state {order}.")


def refuse_positional(unnamed: tuple[Any, ...]) -> None:
    """Raise for what stands after the parameters, where it would reach a member of the chain as something else."""
    if unnamed:
        raise TypeError(
            "update(grads, state, params) takes no fourth positional argument; give attention logits by their name, "
            "max_logits=."
        )


def other_state(call: str, state: Any) -> str:
    """The message for a state that another optimizer made, or whose tuples a checkpoint has lost."""
    if isinstance(state, Mapping):
        return (
            f"{call}: this state is a {type(state).__name__}, no tuple: a checkpoint that was restored without its "
            "structure. Restore it as jax.eval_shape(tx.init, params)."
        )
    kinds = {type(node).__name__ for node in jax.tree.leaves(state, is_leaf=_is_named) if _is_named(node)}
    kinds -= {"EmptyState", "MaskedState"}
    what = f", with {', '.join(sorted(kinds))}" if kinds else ""
    return f"{call}: this is the state of another optimizer{what}. Start anew with {call}(...).init(params)."


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


@contextlib.contextmanager
def errors_of(call: str) -> Iterator[None]:
    """Put "call: " before the message of a TypeError or ValueError that is raised inside."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # Not of subclasses, whose arguments are their own affair.
        if type(error) in (TypeError, ValueError):
            error.args = (f"{call}: {error}",)
        raise


_BETWEEN = ("muonjax", "optax", "jax", "jaxlib", "flax", "equinox", "contextlib", "functools")


def warn_user(message: str) -> None:
    """Raises a UserWarning whose file and line are those of the innermost frame of none of these libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


P = ParamSpec("P")
T = TypeVar("T")

_STEPS = "newton_schulz=NewtonSchulz(num_steps=...)"
_ADAM = "adam=optax.adamw(...) with this setting"
# Of optax.contrib.muon, torch.optim.Muon, Keller Jordan's Muon and MaxText.
OTHERS = {
    "lr": "learning_rate",
    "beta": "decay",
    "momentum": "decay",
    "b1": "decay, or adam=optax.adamw(...) for the other parameters",
    "b2": _ADAM,
    "eps": "not needed: a zero matrix has a zero update",
    "ns_steps": _STEPS,
    "num_steps": _STEPS,
    "ns_coeffs": "newton_schulz=NewtonSchulz(coefficients=...)",
    "ns_coefficients": "newton_schulz=NewtonSchulz(coefficients=...)",
    "preconditioning": "newton_schulz=NewtonSchulz(normalization=...)",
    "adaptive": "muonjax.orthogonalize(adaptive=True) in a chain",
    "consistent_rms": "rms",
    "adjust_lr_fn": "rms",
    "mask": "weight_decay_mask",
    "wd": "weight_decay",
    "tau": "threshold",
    "dimension_numbers": "muon_weight_dimension_numbers",
}


def explains_keywords(
    name: str, *sources: Callable[..., Any], slip: str = ""
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator whose function shows its whole signature and help, and names what an unknown keyword stands for.

    Args:
      name: The call's, in errors.
      sources: Functions that the keywords in `**settings: Unpack[TypedDict]` come from, with their defaults, and the
        descriptions of arguments that the function's own docstring leaves out. The first that has one gives it.
      slip: What to say where it is called with more arguments than it places, if that has a common cause.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = _whole_signature(function, sources)
        parameters = {key: p for key, p in signature.parameters.items() if key != "self"}
        named = [key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        placed = list(signature.parameters)[: len(signature.parameters) - len(named)]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if len(args) > len(placed):
                raise TypeError(
                    slip
                    or f"{name}({', '.join(placed).removeprefix('self')}) takes settings by name: {'=, '.join(named)}=."
                )
            for keyword in kwargs:
                if keyword not in signature.parameters:
                    raise TypeError(
                        f"{name} has no argument {keyword!r}{_meant(keyword, signature.parameters)}."
                    )
            return function(*args, **kwargs)

        public: Any = checked
        public.__signature__ = signature
        if sources:
            public.__doc__ = _whole_docstring(function, sources, list(signature.parameters))
        return checked

    return decorate


def _whole_signature(
    function: Callable[..., Any], sources: Sequence[Callable[..., Any]]
) -> inspect.Signature:
    """The signature with keywords of `sources` in place of `**settings`."""
    signature = inspect.signature(function)
    *own, settings = signature.parameters.values()
    if settings.kind is not inspect.Parameter.VAR_KEYWORD:
        return signature
    (group,) = settings.annotation.__args__
    found = {
        key: p for source in reversed(sources) for key, p in inspect.signature(source).parameters.items()
    }
    taken = [found[key].replace(kind=inspect.Parameter.KEYWORD_ONLY) for key in group.__annotations__]
    return signature.replace(parameters=[*own, *taken])


def _whole_docstring(
    function: Callable[..., Any], sources: Sequence[Callable[..., Any]], names: list[str]
) -> str:
    """The docstring with a description of each argument under Args, in the order of `names`."""
    described = {key: text for f in (*reversed(sources), function) for key, text in _arguments(f).items()}
    text = "".join(textwrap.indent(described[name], "  ") for name in names if name in described)
    return _ARGS.sub(lambda _: "Args:\n" + text, inspect.cleandoc(function.__doc__ or ""), count=1)


_ARGS = re.compile(r"^Args:\n((?: .*\n|\n(?= ))+)", re.MULTILINE)


def _arguments(function: Callable[..., Any]) -> dict[str, str]:
    """What a docstring says of each argument, "name: description", on lines of its own."""
    section = _ARGS.search(inspect.cleandoc(function.__doc__ or "") + "\n")
    entries = re.split(r"^(?=\w)", textwrap.dedent(section[1]) if section else "", flags=re.MULTILINE)
    return {entry.partition(":")[0]: entry for entry in entries if entry}


def _meant(keyword: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    known = [parameter for parameter in parameters if parameter != "self"]
    other = _ADAM if keyword.startswith("adam_") else OTHERS.get(keyword)
    if other and "learning_rate" in parameters:
        return f": in muonjax it is {other}"
    if near := difflib.get_close_matches(keyword, known, 1):
        return f". Did you mean {near[0]}"
    return f". Its arguments are {', '.join(known)}"
