"""Apply the caller's rules, pairs of a pattern and dimension numbers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from muonjax._common import trees
from muonjax._common.arguments import check_pattern, errors_of
from muonjax._matrices.matrix_view import DimensionNumbers, matrix_pieces

PathRules = Sequence[tuple[str, DimensionNumbers | None]]


def apply_rules(
    leaves: Mapping[str, Any], rules: PathRules
) -> dict[str, DimensionNumbers | None]:
    """The dimension numbers that a caller's rules give to leaves, by path;
    the first rule that matches counts.

    ("attn/.*/kernel", None) gives None to every leaf in which the pattern is found.

    Raises:
      ValueError: A rule that matches no leaf, or numbers that do not fit a leaf.
      TypeError: A rule that is no pair, or that gives integers to Muon.
    """
    ruled: dict[str, DimensionNumbers | None] = {}
    # What is no sequence, such as a dict, is refused as a rule that is no pair.
    for rule in rules if isinstance(rules, Sequence) else [rules]:
        if not isinstance(rule, (tuple, list)) or len(rule) != 2:
            raise TypeError(f"(rules=...) has {rule!r}; give pairs: pattern, numbers.")
        pattern, numbers = rule
        check_pattern("rules", pattern)
        paths = [path for path in leaves if re.search(pattern, path)]
        for path in paths:
            leaf = leaves[path]
            # A masked leaf is another optimizer's: it is matched, and gets no numbers.
            if path not in ruled and not trees.is_masked(leaf):
                # Called for its errors: numbers that don't fit the leaf, or a leaf of integers.
                with errors_of("(rules=...)"):
                    matrix_pieces({path: numbers}, {path: leaf})
                ruled[path] = numbers
        # A rule with a typo would silently do nothing.
        if not paths:
            raise ValueError(
                f"(rules=...): {pattern!r} matches no leaf; paths look like "
                f"{trees.listed([*leaves], ', ')}."
            )
    return ruled
