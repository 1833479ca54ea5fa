"""What is said of a leaf and not inferred, by the caller's rules or the type of its module; and what a caller is told.

That is that a tree holds no parameters, and which rule decides a leaf that nothing tells of.
"""

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from muonjax._common.arguments import warn_user
from muonjax._common.trees import flatten_paths, is_masked, listed, names
from muonjax._matrices.matrix_view import DimensionNumbers, matrix_pieces, one_or_several
from muonjax._names.roles import INTERLEAVED, RECURRENT, Parameter

_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")

Rules = Sequence[tuple[str, DimensionNumbers | None]]


def check_parameters(params: Any, call: str = "dimension_numbers", *, warn: bool = True) -> None:
    """Raises TypeError for a module or an optimizer in place of parameters, and for what is no array among them.

    Warns of other collections next to them.
    """
    kind = type(params).__name__
    if callable(getattr(params, "dimension_numbers", None)):
        raise TypeError(f"{call}(params) got what inspect returned; it is second: {call}(params, program).")
    is_leaf = jax.tree_util.all_leaves([params])
    makes_others = hasattr(params, "init") and (hasattr(params, "apply") or hasattr(params, "update"))
    has_no_arrays = is_leaf and hasattr(params, "__dict__") and not hasattr(params, "dtype")
    # An optimizer and Haiku's `Transformed` are tuples.
    if has_no_arrays or (makes_others and (is_leaf or isinstance(params, tuple))):
        raise TypeError(
            f"{call}(params) got {kind}, which holds no parameters; give arrays: model.init(key, x)['params']."
        )
    for path, leaf in flatten_paths(params).items():
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        if callable(leaf) or not (is_number or is_masked(leaf)):
            raise TypeError(
                f"{call}: {path!r} is no array but {reprlib.repr(leaf)}: eqx.filter(model, eqx.is_inexact_array)."
            )
    if warn and isinstance(params, Mapping) and "params" in params:
        beside = [str(name) for name in params if name in _COLLECTIONS]
        if beside:
            warn_user(
                f"{call}(params) got {', '.join(beside)} next to 'params': give variables['params'] alone."
            )


def apply_rules(
    paths: Sequence[tuple[str, ...]], leaves: Sequence[Any], rules: Rules
) -> dict[tuple[str, ...], DimensionNumbers | None]:
    """What the first rule that matches says of each leaf."""

    def is_rule(rule: Any) -> bool:
        is_pair = isinstance(rule, Sequence) and len(rule) == 2 and isinstance(rule[0], str)
        return is_pair and (rule[1] is None or isinstance(rule[1], DimensionNumbers))

    others = [rule for rule in rules if not is_rule(rule)] if isinstance(rules, Sequence) else [rules]
    if others:
        raise TypeError(
            f"dimension_numbers(rules=...) has {others[0]!r}; give pairs of an expression and numbers or None."
        )
    named = {"/".join(path): (path, leaf) for path, leaf in zip(paths, leaves, strict=True)}
    ruled: dict[tuple[str, ...], DimensionNumbers | None] = {}
    for pattern, numbers in rules:
        matched = [name for name in named if re.search(pattern, name)]
        if not matched:
            shown = ", ".join(list(named)[:3])
            raise ValueError(
                f"dimension_numbers(rules=...): {pattern!r} matches no leaf; paths look like {shown}, …"
            )
        for name in matched:
            path, leaf = named[name]
            if path not in ruled and not is_masked(leaf):
                matrix_pieces({name: numbers}, {name: leaf}, call="dimension_numbers(rules=...)")
                ruled[path] = numbers
    return ruled


def refuse_named_axes(params: Any) -> None:
    """Raise for arrays whose axes have names, as Haliax's and penzai's have: a program reads these better."""

    def is_named(node: Any) -> bool:
        return hasattr(node, "named_axes") or (hasattr(node, "array") and hasattr(node, "axes"))

    if found := next(_inside(params, is_named), None):
        raise TypeError(f"{'/'.join(found[0])!r} has axes with names, which nothing reads here. {INSPECT}")


def types_of_modules(params: Any) -> dict[str, str]:
    """What modules say that names can't, by the path of a parameter: "table" by their type, as Equinox calls it, and
    "special" by their settings, groups or the letters of an einsum."""

    def kind(node: Any) -> str:
        groups = getattr(node, "feature_group_count", getattr(node, "groups", 1))  # Flax's and Equinox's
        special = (isinstance(groups, int) and groups > 1) or isinstance(
            getattr(node, "einsum_str", None), str
        )
        return "table" if type(node).__name__ in ("Embedding", "Embed") else "special" * special

    return {"/".join(path): kind(node) for path, node in _inside(params, lambda node: bool(kind(node)))}


def _inside(params: Any, is_node: Callable[[Any], bool]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path of each leaf inside of such nodes, and the node."""
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_node):
        if is_node(node):
            for below, _ in jax.tree_util.tree_leaves_with_path(node):
                yield names((*path, *below)), node


INSPECT = (
    "Your function says it: program = muonjax.inspect(loss_fn, params, batch), then "
    "muonjax.muon(learning_rate, program)."
)


def undecided_message(undecided: Sequence[Parameter], parameters: Sequence[Parameter]) -> str:
    """The message for leaves that can't be decided, with rules that decide all of them."""
    p = undecided[0]
    why = ", because its heads are interleaved" if p.role is INTERLEAVED else ""
    others = f", nor {len(undecided) - 1} other{'s' * (len(undecided) > 2)}" if len(undecided) > 1 else ""
    wholes = [p for p in undecided if p.role in (INTERLEAVED, RECURRENT) and len(p.shape) == 2]
    return (
        f"dimension_numbers(params) can't tell which matrices the leaf {'/'.join(p.path)!r} ({p.role.name}) of shape "
        f"{p.leaf_shape} holds{why}{others}. {INSPECT}\nBy hand: rules=[{_suggested(undecided, parameters, wholes)}] "
        "or FusedDimensionNumbers; in muon, program=lambda params: muonjax.dimension_numbers(params, rules=...)."
    )


def chances_message(why: Mapping[tuple[str, ...], tuple[str, str]], parameters: Sequence[Parameter]) -> str:
    """The warning for leaves that only a name or a position gives to an optimizer: which one, and the reason."""
    found = [p for p in parameters if p.path in why]
    said = [f"{why[p.path][0]} takes {'/'.join(p.path)!r} {p.leaf_shape}: {why[p.path][1]}" for p in found]
    adams = [p for p in found if why[p.path][0] == "Adam"]
    return (
        f"muonjax can't tell by names alone what these leaves are: {listed(said)}. To say otherwise: "
        f"muonjax.dimension_numbers(params, rules=[{_suggested(found, parameters, adams)}]). {INSPECT}"
    )


def _suggested(
    found: Sequence[Parameter], parameters: Sequence[Parameter], matrices: Sequence[Parameter]
) -> str:
    """Rules for these leaves and no others, numbered ones together, as a person pastes them; None is Adam."""
    paths = {p.path: re.escape("/".join(p.path)) for p in parameters}
    alike = {path: re.sub(r"\d+", r"\\d+", pattern) for path, pattern in paths.items()}
    every, own = Counter(alike.values()), Counter(alike[p.path] for p in found)
    rules: dict[str, None] = {}
    for p in found:
        pattern = alike[p.path] if own[alike[p.path]] == every[alike[p.path]] else paths[p.path]
        *rows, columns = range(len(p.leaf_shape))
        numbers = f"MuonDimensionNumbers({one_or_several(rows)}, {columns})" if p in matrices else None
        rules[f"(r'^{pattern}$', {numbers})"] = None
    return ", ".join(rules)
