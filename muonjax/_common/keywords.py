"""Show the whole signature of a public call, and say of an unknown keyword what it is called here."""

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_STEPS = "newton_schulz=NewtonSchulz(coefficients=...), a row for each step"
_ADAM = "adam=optax.adamw(...) with this setting"
# Arguments of optax.contrib.muon, torch.optim.Muon, Keller Jordan's Muon and MaxText.
_OTHERS = {
    "lr": "learning_rate",
    "beta": "decay",
    "momentum": "decay",
    "b1": "decay, or adam=optax.adamw(...) for the other parameters",
    "b2": _ADAM,
    "eps": "not needed: a zero matrix has a zero update",
    "ns_steps": _STEPS,
    "num_steps": _STEPS,
    "ns_coeffs": _STEPS,
    "ns_coefficients": _STEPS,
    "preconditioning": "newton_schulz=NewtonSchulz(normalization=...)",
    "adaptive": "an argument of muonjax.optax_contrib.muon alone",
    "consistent_rms": "rms",
    "adjust_lr_fn": "rms",
    "mask": "weight_decay_mask",
    "wd": "weight_decay",
    "tau": "threshold",
    "dimension_numbers": "program, the second argument",
    "muon_weight_dimension_numbers": "program, the second argument; with sites by hand, dimension_numbers",
    "rules": "the second argument, a function: lambda params: muonjax.dimension_numbers(params, rules=...)",
    "sites": "the second argument of muonclip and adamclip",
}


def explains_keywords(name: str, *sources: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator whose function shows its whole signature and help, and names what an unknown keyword means here.

    Args:
      name: The call's, in errors.
      sources: Functions that the keywords in `**settings: Unpack[TypedDict]` come from, with their defaults, and the
        descriptions of arguments that the function's own docstring leaves out. The first that has one gives it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = _whole_signature(function, sources)
        named = [key for key, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        placed = [key for key in signature.parameters if key not in named]
        known = [key for key in signature.parameters if key != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if len(args) > len(placed):
                first = ", ".join(placed).removeprefix("self")
                raise TypeError(f"{name}({first}) takes settings by name: {'=, '.join(named)}=.")
            for keyword in kwargs:
                if keyword not in known:
                    raise TypeError(f"{name} has no argument {keyword!r}{_meant(keyword, known)}.")
            return function(*args, **kwargs)

        public: Any = checked
        public.__signature__ = signature
        if sources:
            public.__doc__ = _whole_docstring(function, sources, known)
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


def _meant(keyword: str, known: Sequence[str]) -> str:
    other = _ADAM if keyword.startswith("adam_") else _OTHERS.get(keyword)
    if other and "learning_rate" in known:  # they are other names of an optimizer's settings
        return f": in muonjax it is {other}"
    if near := difflib.get_close_matches(keyword, known, 1):
        return f". Did you mean {near[0]}"
    return f". Its arguments are {', '.join(known)}"
