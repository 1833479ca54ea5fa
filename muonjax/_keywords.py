"""Say which argument is meant where a call has a keyword of another library, or a misspelled one."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

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


def explains_keywords(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator whose function names the argument that an unknown keyword stands for; `name` is the call's."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for keyword in kwargs:
                if keyword not in parameters:
                    raise TypeError(f"{name} has no argument {keyword!r}{_meant(keyword, parameters)}.")
            return function(*args, **kwargs)

        return checked

    return decorate


def _meant(keyword: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    known = [parameter for parameter in parameters if parameter != "self"]
    other = _ADAM if keyword.startswith("adam_") else OTHERS.get(keyword)
    if other and "learning_rate" in parameters:
        return f": in muonjax it is {other}"
    if near := difflib.get_close_matches(keyword, known, 1):
        return f". Did you mean {near[0]}"
    return f". Its arguments are {', '.join(known)}"
