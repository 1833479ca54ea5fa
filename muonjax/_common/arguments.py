"""Check what a public call is given, numbers and trees, and name the call in errors and warnings.

`explains_keywords` shows the whole signature of a call,
and says of an unknown keyword what it is called here.
"""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# A tree or an array in a message would take pages.
shown = reprlib.repr

_RANGES: dict[str, Callable[[float], bool]] = {
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in (0, 1)": lambda value: 0 < value < 1,
    "finite": math.isfinite,
    "finite and not negative": lambda value: 0 <= value < math.inf,
    "positive and finite": lambda value: 0 < value < math.inf,
}


def check_range(
    name: str, value: Any, wanted: str, why: str, *, schedule: bool = False
) -> None:
    """Raise unless it is one real number, known or traced, or an allowed schedule; and,
    if known, in its range.

    Args:
      name: The name of the argument.
      value: What was given.
      wanted: The range, a name in `_RANGES`.
      why: Ends the message of a number out of it: "; 0.95 is usual.", or only ".".
      schedule: Whether a schedule may be given.
    """
    # What a schedule returns is known only in training.
    if schedule and callable(value):
        return
    if not _is_real(value):
        kind = "a number or a schedule" if schedule else "a number"
        advice = ""
        if hasattr(value, "dimension_numbers"):
            # muon(program) is a likely first mistake.
            advice = "; the program is the second argument"
        raise TypeError(f"({name}={shown(value)}) must be {kind}{advice}.")
    # `optax.inject_hyperparams` traces the numbers that it injects.
    if isinstance(value, Tracer):
        return
    # Inside of `jit` a comparison of an array, even of a known one, would be traced. That of
    # Python's number is not.
    if not _RANGES[wanted](float(value)):
        raise ValueError(f"({name}={shown(value)}) must be {wanted}{why}")


def check_rates(**rates: Any) -> None:
    """`check_range` of learning rates and weight decays, numbers or schedules, by their names."""
    for name, rate in rates.items():
        check_range(name, rate, "finite and not negative", ".", schedule=True)


def _is_real(value: Any) -> bool:
    """Whether `value` is one real number, Python's, NumPy's or JAX's, which may be traced.
    A boolean is not."""
    is_number = isinstance(value, (int, float, np.generic, np.ndarray, jax.Array))
    if not is_number or np.ndim(value) > 0:
        return False
    # Python's True is an int for `isinstance`, and a boolean for JAX.
    dtype = getattr(value, "dtype", type(value))
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def check_flag(**flags: Any) -> None:
    """Raise unless each is True or False."""
    for name, value in flags.items():
        # A comparison of arrays gives NumPy's boolean.
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"({name}={shown(value)}) must be True or False.")


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Raise unless it is one of these words, or None where that is one of them."""
    is_word = isinstance(value, str | None)
    if not is_word or value not in choices:
        raise ValueError(
            f"({name}={shown(value)}) is unknown; choose one of {tuple(choices)}."
        )


# Dtypes of products and of Adam's moments: float8 keeps half of a constant gradient's,
# and none of a small one's.
WIDE_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def given_dtype(name: str, value: Any, kinds: Sequence[Any], wanted: str) -> np.dtype:
    """`value` as a dtype; raises TypeError unless it is of one of these `kinds`, such as
    jnp.inexact, which `wanted` says in words."""
    # Neither an array nor None is a dtype, but `jnp.dtype` would return the array's dtype, and
    # float64 for None.
    is_array = isinstance(value, (np.generic, np.ndarray, jax.Array))
    if not is_array and value is not None:
        # For what is no dtype `jnp.dtype` raises TypeError, and so does the last line, with `name`.
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(value)
            if any(jnp.issubdtype(dtype, kind) for kind in kinds):
                return dtype
    advice = ""
    if is_array:
        # `optax.inject_hyperparams` takes jnp.bfloat16, which can be called, for a schedule. It
        # calls it with the step's number, and what arrives here is the result, an array.
        advice = (
            " optax.inject_hyperparams takes a dtype for a schedule: give it "
            f"static_args={name!r}."
        )
    raise TypeError(f"({name}={shown(value)}) must be {wanted}.{advice}")


def check_text(**texts: Any) -> None:
    """Raise unless each is a string."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"({name}={shown(value)}) must be a string.")


def check_precision(precision: Any) -> None:
    """Raise unless JAX's matrix products take it as their precision."""
    # Only JAX knows its own list, so a product is tried on shapes.
    matrix = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(
            functools.partial(jnp.matmul, precision=precision), matrix, matrix
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"(precision={shown(precision)}) is unknown; choose 'highest', 'high', 'default', None "
            "or another one of jax.lax.dot_general."
        ) from error


def check_pattern(name: str, value: Any) -> None:
    """Raise unless it is a regular expression."""
    check_text(**{name: value})
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"({name}={value!r}) is no regular expression: {error}."
        ) from None


def mesh_axes(name: str, value: Any) -> tuple[str, ...]:
    """The name of a mesh axis, or several, as a tuple; None is no axis."""
    if value is None:
        return ()
    axes = value if isinstance(value, tuple) else (value,)
    for axis in axes:
        if not isinstance(axis, str) or not axis:
            raise TypeError(
                f"({name}={shown(value)}) must be the name of a mesh axis or a tuple of names."
            )
    return axes


def fitted_mask(name: str, mask: Any) -> Any:
    """The mask for Optax: a tree becomes a function of the parameters, which returns the tree and
    raises where it does not fit them. None and a function stay.

    The errors begin with the argument `name`, before which `errors_of` puts the call. Optax's own
    error for a tree that does not fit would name neither.
    """
    # Optax calls a function with the parameters, and takes what it returns.
    if mask is None or callable(mask):
        return mask
    # Optax would take any number for a boolean.
    for leaf in jax.tree.leaves(mask):
        if np.asarray(leaf).dtype.kind != "b":
            raise TypeError(
                f"({name}={shown(mask)}) must be a tree or prefix of booleans, or a function."
            )

    def fitted(params: Any) -> Any:
        """The mask, after its check against the parameters, which are known only now."""
        try:
            # This raises unless the mask is a prefix of the parameters' tree.
            jax.tree.map(lambda *_: None, mask, params)
        except ValueError as error:
            raise ValueError(
                f"({name}={shown(mask)}) does not fit the parameters: give True for all, False for "
                "none, a tree of booleans like the parameters or a prefix of it, or a function of "
                "them."
            ) from error
        return mask

    return fitted


def whole_number(name: str, value: Any, least: int, why: str) -> int:
    """`value` as Python's; raises ValueError unless it is a whole number, at least `least`.
    `why` ends the message."""
    # NumPy's integers are whole numbers too, and True is no number of steps.
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise ValueError(f"({name}={shown(value)}) needs a whole number{why}")
    return int(value)


def axis_numbers(name: str, value: Any) -> tuple[int, ...]:
    """An axis, or several, as a tuple of Python's numbers: 2 gives (2,)."""
    is_several = isinstance(value, Sequence) and not isinstance(value, str)
    axes = value if is_several else (value,)
    why = " or several, of axes."
    return tuple(whole_number(name, axis, -sys.maxsize, why) for axis in axes)


def check_transformation(name: str, given: Any) -> None:
    """Raise unless it is an Optax transformation."""
    # A transformation need not be of Optax's own class.
    if not (hasattr(given, "init") and hasattr(given, "update")):
        raise TypeError(
            f"({name}={shown(given)}) must be an Optax transformation: optax.adamw(1e-3)."
        )


def require_params(params: Any) -> None:
    """Raise where `update` was called without parameters."""
    if params is None:
        raise ValueError(" needs params: call tx.update(grads, state, params).")


def check_update(params: Any, unnamed: tuple[Any, ...]) -> None:
    """Raise where `update` got no parameters, or extra positional arguments."""
    refuse_positional(unnamed)
    require_params(params)


def refuse_positional(unnamed: tuple[Any, ...]) -> None:
    """Raise on extra positional arguments, which would reach a member of the chain as something
    else."""
    if unnamed:
        raise TypeError(
            "update(grads, state, params) takes all further arguments by name, as max_logits=."
        )


def message_for_other_state(state: Any) -> str:
    """The message for a state that does not fit: another optimizer's,
    or one whose tuples a checkpoint lost."""
    # Gradients and parameters may be dictionaries, and serialization makes one of a named tuple
    # without its class.
    if isinstance(state, Mapping):
        return (
            f"this state is a {type(state).__name__}, not a tuple: call tx.update(grads, state, "
            "params), and restore a checkpoint into the structure of jax.eval_shape(tx.init, "
            "params)."
        )
    return "this is the state of another optimizer. Start anew with tx.init(params)."


@contextlib.contextmanager
def errors_of(call: str) -> Iterator[None]:
    """Begin the message of a TypeError or ValueError that is raised inside with the name of a
    public call.

    A message that begins with "(", ":" or a space continues the name: "trace(decay=2) must be in
    [0, 1)"; others follow ": ". Calls may be nested; the error names only the outermost, which is
    the one that the user wrote.

    A `call` that begins with "(" is an argument of it: "(rules=...)" inside of "dimension_numbers"
    gives "dimension_numbers(rules=...): ...". Also a decorator: `@errors_of("muon")`.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        # A subclass, such as UnicodeError, may have other arguments than a message.
        if type(error) in (TypeError, ValueError):
            # An inner call has left the message without its own name in `error.message`. `trace`
            # inside of `muon` shows "trace(decay=2) must be in [0, 1)" and leaves "(decay=2) must
            # be in [0, 1)", to which `muon` adds its name.
            message = getattr(error, "message", str(error))
            separator = "" if message.startswith(("(", ":", " ")) else ": "
            named = f"{call}{separator}{message}"
            # This is what the user sees, unless an outer call replaces it.
            error.args = (named,)
            # The name of an argument stays in what is left for outer calls. (A type checker
            # refuses `error.message = ...`, since exceptions declare no such attribute.)
            vars(error)["message"] = named if call.startswith("(") else message
        raise


_LIBRARIES = {
    "muonjax", "optax", "jax", "jaxlib", "flax", "equinox", "keras", "contextlib", "functools"
}  # fmt: skip


def warn_user(message: str) -> None:
    """Warn, with the file and line of the innermost frame that is in none of `_LIBRARIES`,
    so it is the user's."""
    # `warnings` counts frames from here on: 1 is this function, 2 its caller.
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None:
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        if library not in _LIBRARIES:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


# For a warning on a tree of parameters, which `init`, `update` and `tabulate` would all repeat.
warn_once = functools.cache(warn_user)


P = ParamSpec("P")
T = TypeVar("T")

# A name here, or advice, and what it is called in optax.contrib.muon, torch.optim.Muon, Keller
# Jordan's Muon and MaxText: their `beta` or `momentum` is `decay` here.
_NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "decay": "beta momentum",
    "decay, or adam=optax.adamw(...) for the other parameters": "b1",
    "adam=optax.adamw(...) with this setting": "b2",
    "not needed: a zero matrix has a zero update": "eps",
    "newton_schulz=NewtonSchulz(coefficients=...), a row for each "
    "step": "ns_steps num_steps ns_coeffs ns_coefficients",
    "newton_schulz=NewtonSchulz(normalization=...)": "preconditioning",
    "an argument of muonjax.optax_contrib.muon alone": "adaptive",
    "rms": "consistent_rms adjust_lr_fn",
    "weight_decay_mask": "mask",
    "weight_decay": "wd",
    "threshold": "tau",
    "program, the second argument": "dimension_numbers",
    "program, the second argument; with sites by hand, "
    "dimension_numbers": "muon_weight_dimension_numbers",
    "program, or dimension_numbers of muonclip: lambda params: muonjax.dimension_numbers(params, "
    "rules=...)": "rules",
    "the second argument of muonclip and adamclip": "sites",
}


def explains_keywords(
    name: str, *sources: Callable[..., Any]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: errors begin with the call's name, `help` shows the whole signature, and an
    unknown keyword is explained: "muon has no argument 'beta': in muonjax it is decay."

    Args:
      name: The call's name in errors.
      sources: Functions that the keywords in `**settings: Unpack[TypedDict]` come from, with their
        defaults; the first that has one counts.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        """`function`, whose errors begin with `name`; its signature shows the keywords of
        `sources`."""
        signature = _full_signature(function, sources)

        # The names of the arguments, but for the `self` of a method such as
        # `NewtonSchulz.__init__`, which a user does not give
        known = [key for key in signature.parameters if key != "self"]

        @functools.wraps(function)
        @errors_of(name)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            """`function`, after its arguments are checked by its `signature`, which has the names
            `known`. Python's own error for a wrong name among `**settings` would name a function
            that the user never called."""
            # `bind` below refuses unknown names too, but would not say that what Optax or PyTorch
            # call "beta" is "decay" in muonjax, as `_meant` does.
            for keyword in kwargs:
                if keyword not in known:
                    # `errors_of` puts `name`, that of the call, before it, and `_meant` goes on
                    # with ": in muonjax it is decay".
                    raise TypeError(
                        f" has no argument {keyword!r}{_meant(keyword, known)}."
                    )
            # A missing argument, one that is given twice, or too many
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f": {error}; it takes {', '.join(known)}.") from None
            return function(*args, **kwargs)

        # `help` and editors read the whole signature here.
        public: Any = checked
        public.__signature__ = signature
        return checked

    return decorate


def _full_signature(
    function: Callable[..., Any], sources: Sequence[Callable[..., Any]]
) -> inspect.Signature:
    """The signature with keywords of `sources` in place of `**settings`;
    without `**settings` the signature as it is.

    `muon(learning_rate, *, rms=0.2, **settings: Unpack[MatrixSettings])` gets `decay=0.95` and all
    other keys of `MatrixSettings`, with the defaults that they have in `sources`.
    """
    signature = inspect.signature(function)
    # Python has `**settings` come last.
    *parameters, settings = signature.parameters.values()
    if settings.kind is not inspect.Parameter.VAR_KEYWORD:
        return signature
    keywords: dict[str, inspect.Parameter] = {}
    # Where two sources have one keyword, the first counts, so it is written last.
    for source in reversed(sources):
        keywords.update(inspect.signature(source).parameters)
    # MatrixSettings of the annotation Unpack[MatrixSettings]
    (group,) = settings.annotation.__args__
    # A source may also take the argument by position, as `optax.adamw` does.
    for key in group.__annotations__:
        parameters.append(keywords[key].replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=parameters)


def _meant(keyword: str, known: Sequence[str]) -> str:
    """The end of the message on an unknown keyword: what it is called here,
    or which arguments there are.

    "beta" gives ": in muonjax it is decay", and "weight_decy" gives ". Did you mean weight_decay".
    """
    # optax.contrib.muon has settings of AdamW, such as adam_b1. Each has the answer of `b2`:
    # a setting of `adam`.
    synonym = "b2" if keyword.startswith("adam_") else keyword
    for here, elsewhere in _NAMES_ELSEWHERE.items():
        # A name counts where this call has it, as `weight_decay` in muon and not in muonh. What is
        # no name, such as "adam=optax.adamw(...) with this setting", counts always.
        counts = here in known or not here.isidentifier()
        if counts and synonym in elsewhere.split():
            return f": in muonjax it is {here}"
    # Otherwise it is perhaps a mistyped name of these.
    similar = difflib.get_close_matches(keyword, known, 1)
    if similar:
        return f". Did you mean {similar[0]}"
    return f". Its arguments are {', '.join(known)}"
