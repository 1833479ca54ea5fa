"""Apply the rules that a caller gives for leaves, and suggest one where a leaf can't be decided."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from muonjax._matrix_view import DimensionNumbers
from muonjax._routing.roles import INTERLEAVED
from muonjax._routing.siblings import Parameter

Rules = Sequence[tuple[str, DimensionNumbers | None]]


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
    p, others = undecided[0], len(undecided) - 1
    what = "takes query, key and value as one matrix" if _is_whole(p) else "gives it to Adam"
    folded = attention == "heads" and len(p.shape) < 4
    state = "interleaved" if p.role is INTERLEAVED else "folded into one axis" if folded else ""
    why = f", because its heads are {state}" if state else ""
    also = f", nor {others} other{'s' if others > 1 else ''}" if others else ""
    return (
        f"dimension_numbers(params) can't tell which matrices the leaf {'/'.join(p.path)!r} ({p.role.name}) of shape "
        f"{p.leaf_shape} holds{why}{also}. The rule rules=[{_suggested_rules(undecided, parameters)}] {what}; "
        "MuonDimensionNumbers(reduction_axis, output_axis) instead names the axes that the layer sums over and those "
        "that it gives; FusedDimensionNumbers(0, 1, parts=..., axis=1) cuts one of them, parts=number_of_heads or "
        "parts=(queries, keys, values) long. In muon: "
        f"muon_weight_dimension_numbers=lambda params: dimension_numbers(params, rules=...). {INSPECT}"
    )


INSPECT = (
    "Or your function says it: program = muonjax.inspect(loss_fn, params, batch), then "
    "muonjax.muon(learning_rate, muon_weight_dimension_numbers=program)."
)


def chances_message(why: Mapping[tuple[str, ...], str], parameters: Sequence[Parameter]) -> str:
    """The message for leaves that only names, or only sizes, call output heads."""
    found = [p for p in parameters if p.path in why]
    p, others = found[0], len(found) - 1
    also = f", or {others} other{'s' if others > 1 else ''}," if others else ""
    rules = _suggested_rules(found, parameters)
    return (
        f"muonjax can't tell whether the leaf {'/'.join(p.path)!r} of shape {p.leaf_shape}{also} is an output head: "
        f"{why[p.path]}. Muon takes it; rules=[{rules}] gives it to Adam. {INSPECT}"
    )


def _suggested_rules(found: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    """Rules for these leaves and no others, those that are numbered alike together, as a person pastes them."""
    every: dict[str, int] = Counter(map(_numbered, parameters))
    alike = Counter(map(_numbered, found))
    exact = (
        re.escape("/".join(p.path)) if alike[_numbered(p)] < every[_numbered(p)] else _numbered(p)
        for p in found
    )
    rules = (
        f"(r'^{pattern}$', {'MuonDimensionNumbers(0, 1)' if _is_whole(p) else None})"
        for p, pattern in zip(found, exact, strict=True)
    )
    return ", ".join(dict.fromkeys(rules))


def _numbered(p: Parameter) -> str:
    """An expression for a leaf and all that are numbered like it."""
    return re.sub(r"\d+", r"\\d+", re.escape("/".join(p.path)))


def _is_whole(p: Parameter) -> bool:
    return p.role is INTERLEAVED and len(p.shape) == 2
