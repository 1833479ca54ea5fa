"""Check the tree and apply the rules that a caller gives, and suggest a rule where a leaf can't be decided."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from muonjax._arguments import warn_user
from muonjax._matrix_view import DimensionNumbers
from muonjax._routing.roles import INTERLEAVED
from muonjax._routing.siblings import Parameter

_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")

Rules = Sequence[tuple[str, DimensionNumbers | None]]


def check_parameters(params: Any, call: str = "dimension_numbers", *, warn: bool = True) -> None:
    """Raises TypeError for a module or an optimizer in place of parameters; warns of other collections beside them."""
    kind = type(params).__name__
    if callable(getattr(params, "dimension_numbers", None)):
        raise TypeError(f"{call}(params) got what inspect returned; it is second: {call}(params, program).")
    if hasattr(params, "update") and hasattr(params, "init") and isinstance(params, tuple):
        raise TypeError(f"{call}(params) got an optimizer, {kind}; give the parameters that it is to train.")
    is_one = jax.tree_util.all_leaves([params]) or isinstance(params, tuple)  # as hk.Transformed is
    if is_one and hasattr(params, "init") and hasattr(params, "apply"):
        raise TypeError(
            f"{call}(params) got the module {kind}; give its parameters, model.init(key, x)['params']."
        )
    if jax.tree_util.all_leaves([params]) and hasattr(params, "__dict__") and not hasattr(params, "dtype"):
        raise TypeError(
            f"{call}(params) got {kind}, which holds no arrays that JAX sees; of an NNX module give "
            "nnx.state(model, nnx.Param)."
        )
    if warn and isinstance(params, Mapping) and "params" in params:
        beside = [str(name) for name in params if name in _COLLECTIONS]
        if beside:
            warn_user(
                f"{call}(params) got {', '.join(beside)} beside 'params': an optimizer would train these too. "
                "Give variables['params'] alone."
            )


def apply_rules(paths: Sequence[str], rules: Rules) -> dict[str, DimensionNumbers | None]:
    ruled: dict[str, DimensionNumbers | None] = {}
    for pattern, numbers in rules:
        if numbers is not None and not isinstance(numbers, DimensionNumbers):
            raise TypeError(
                f"dimension_numbers(rules=...) has {numbers!r} for {pattern!r}; "
                "give MuonDimensionNumbers, FusedDimensionNumbers or None."
            )
        matched = [path for path in paths if re.search(pattern, path)]
        if not matched:
            shown = ", ".join(paths[:3])
            raise ValueError(
                f"dimension_numbers(rules=...): {pattern!r} matches no leaf; paths look like {shown}, … "
                "Correct the expression or drop the rule."
            )
        for path in matched:
            ruled.setdefault(path, numbers)
    return ruled


def undecided_message(undecided: Sequence[Parameter], parameters: Sequence[Parameter], attention: str) -> str:
    """The message for leaves that can't be decided, with rules that decide all of them, numbered ones together."""
    p = undecided[0]
    what = "takes query, key and value as one matrix" if _is_whole(p) else "gives it to Adam"
    folded = attention == "heads" and len(p.shape) < 4
    state = "interleaved" if p.role is INTERLEAVED else "folded into one axis" if folded else ""
    why = f", because its heads are {state}" if state else ""
    return (
        f"dimension_numbers(params) can't tell which matrices the leaf {'/'.join(p.path)!r} ({p.role.name}) of shape "
        f"{p.leaf_shape} holds{why}{_others(undecided, 'nor')}. The rule rules=[{_suggested(undecided, parameters)}] "
        f"{what}; MuonDimensionNumbers(reduction_axis, output_axis) instead names the axes that the layer sums over "
        "and those that it gives; FusedDimensionNumbers(0, 1, parts=..., axis=1) cuts one of them, "
        "parts=number_of_heads or parts=(queries, keys, values) long. In muon: "
        f"muon_weight_dimension_numbers=lambda params: muonjax.linen.dimension_numbers(params, rules=...). {INSPECT}"
    )


def chances_message(why: Mapping[tuple[str, ...], str], parameters: Sequence[Parameter]) -> str:
    """The message for leaves that only names, or only sizes, call output heads."""
    found = [p for p in parameters if p.path in why]
    p = found[0]
    return (
        f"muonjax can't tell whether the leaf {'/'.join(p.path)!r} of shape {p.leaf_shape}{_others(found, 'or')} is an "
        f"output head: {why[p.path]}. Muon takes it; rules=[{_suggested(found, parameters)}] gives it to Adam. "
        f"{INSPECT}"
    )


INSPECT = (
    "Or your function says it: program = muonjax.inspect(loss_fn, params, batch), then "
    "muonjax.muon(learning_rate, muon_weight_dimension_numbers=program)."
)


def _others(found: Sequence[Parameter], conjunction: str) -> str:
    others = len(found) - 1
    return f", {conjunction} {others} other{'s' * (others > 1)}" if others else ""


def _suggested(found: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    """Rules for these leaves and no others, those that are numbered alike together, as a person pastes them."""
    paths = {p.path: re.escape("/".join(p.path)) for p in parameters}
    alike = {path: re.sub(r"\d+", r"\\d+", pattern) for path, pattern in paths.items()}
    every, own = Counter(alike.values()), Counter(alike[p.path] for p in found)
    rules = (
        f"(r'^{alike[p.path] if own[alike[p.path]] == every[alike[p.path]] else paths[p.path]}$', "
        f"{'MuonDimensionNumbers(0, 1)' if _is_whole(p) else None})"
        for p in found
    )
    return ", ".join(dict.fromkeys(rules))


def _is_whole(p: Parameter) -> bool:
    return p.role is INTERLEAVED and len(p.shape) == 2
