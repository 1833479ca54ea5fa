"""Apply the caller's rules, pairs of a pattern and dimension numbers, and suggest some."""

import re
from collections.abc import Sequence
from typing import Any

from muonjax._common import trees
from muonjax._common.arguments import check_pattern
from muonjax._matrices.matrix_view import DimensionNumbers, matrix_pieces
from muonjax._names.path_words import Path

PathRules = Sequence[tuple[str, DimensionNumbers | None]]


def apply_rules(
    paths: Sequence[Path], leaves: Sequence[Any], rules: PathRules
) -> dict[Path, DimensionNumbers | None]:
    """The dimension numbers that a caller's rules give to leaves, by path; the first rule that matches counts.

    ("attn/.*/kernel", None) gives None to every leaf in which the pattern is found.

    Raises:
      ValueError: A rule that matches no leaf, or numbers that do not fit a leaf.
      TypeError: A rule that is no pair, or that gives integers to Muon.
    """
    _check(rules)
    names = ["/".join(path) for path in paths]
    ruled: dict[Path, DimensionNumbers | None] = {}
    for pattern, numbers in rules:
        # A rule with a typo would silently do nothing, so that one without a leaf is refused.
        is_used = False
        for path, name, leaf in zip(paths, names, leaves, strict=True):
            if not re.search(pattern, name):
                continue
            is_used = True
            if path not in ruled and not trees.is_masked(leaf):
                # Raises where the numbers don't fit the leaf.
                matrix_pieces({name: numbers}, {name: leaf}, call="(rules=...)")
                ruled[path] = numbers
        if not is_used:
            shown = ", ".join(names[:3])
            raise ValueError(
                f"(rules=...): {pattern!r} matches no leaf; paths look like {shown}."
            )
    return ruled


def _check(rules: Any) -> None:
    """Raise unless the rules are pairs of a regular expression and dimension numbers or None."""
    for rule in rules if isinstance(rules, Sequence) else [rules]:
        is_pair = isinstance(rule, Sequence) and len(rule) == 2
        pattern, numbers = rule if is_pair else (None, None)
        is_known = numbers is None or isinstance(numbers, DimensionNumbers)
        if not isinstance(pattern, str) or not is_known:
            raise TypeError(f"(rules=...) has {rule!r}; give pairs: pattern, numbers.")
        check_pattern("rules", pattern)


def rules_for(chosen: Sequence[Path], paths: Sequence[Path]) -> str:
    r"""Rules that give the chosen leaves to Adam, and no others, as code to paste.

    Leaves that differ by numbers share a rule, unless it would match a leaf that is not chosen.

    >>> layers = [("layers", "0", "w"), ("layers", "1", "w")]
    >>> print(rules_for(layers, layers))
    (r'^layers/\d+/w$', None)
    """
    others = {_pattern(path) for path in paths if path not in chosen}
    patterns = []
    for path in chosen:
        pattern = _pattern(path)
        # A leaf that is not chosen has this pattern too, so that only the path itself will do.
        if pattern in others:
            pattern = re.escape("/".join(path))
        patterns.append(pattern)
    return ", ".join(f"(r'^{pattern}$', None)" for pattern in dict.fromkeys(patterns))


def _pattern(path: Path) -> str:
    r"""A path as a regular expression in which numbers are free: layers/0/w gives layers/\d+/w."""
    return re.sub(r"\d+", r"\\d+", re.escape("/".join(path)))
