"""What is said of a leaf and not inferred: by the caller's rules, by the names of axes.

And what is said to the caller: that a tree holds no parameters, and which rule decides a leaf that nothing tells of.
Haliax's and penzai's arrays have such names; neither library is imported.
"""

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from muonjax._common.arguments import warn_user
from muonjax._common.trees import Key, flatten_paths, is_masked, listed, names
from muonjax._matrices.matrix_view import DimensionNumbers, MuonDimensionNumbers, one_or_several
from muonjax._names.roles import INTERLEAVED, RECURRENT, Parameter, Role, layer_of

_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")

Rules = Sequence[tuple[str, DimensionNumbers | None]]

_BATCH = r"\w*(layers?|blocks?|stack\w*|scan\w*|experts?|qkv|kv|gate_up)"
_HEAD = r"\w*(head|q_per|group|projection)\w*"
_HEAD_SIZE = r"(\w*_)?(head_?(size|dim)|projection)"
_DOWN = r"(\w+_)?(down|wo|o|out|output|c_proj|fc2|w2|linear2)(_\w+)?"
_TABLE = r"\w*(vocab|position|pos)\w*"


def check_parameters(params: Any, call: str = "dimension_numbers", *, warn: bool = True) -> None:
    """Raises TypeError for a module or an optimizer in place of parameters, and for what is no array among them.

    Warns of other collections next to them.
    """
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
    for path, leaf in flatten_paths(params).items():
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        if callable(leaf) or not (is_number or is_masked(leaf) or isinstance(leaf, Key)):
            raise TypeError(
                f"{call}: {path!r} is no array but {reprlib.repr(leaf)}. Give the arrays alone; for Equinox that is "
                "eqx.filter(model, eqx.is_inexact_array)."
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


def tables(params: Any) -> set[str]:
    """Paths of the parameters of modules whose type is called Embedding or Embed, as Equinox calls them."""
    found = _inside(params, lambda node: type(node).__name__ in ("Embedding", "Embed"))
    return {"/".join(path) for path, _ in found}


def unlike_their_names(params: Any) -> set[str]:
    """Paths of the parameters of layers whose settings say what names can't: groups, the letters of an einsum."""

    def has_settings(node: Any) -> bool:
        groups = getattr(node, "feature_group_count", getattr(node, "groups", 1))  # Flax's and Equinox's
        return (isinstance(groups, int) and groups > 1) or isinstance(getattr(node, "einsum_str", None), str)

    return {"/".join(path) for path, _ in _inside(params, has_settings)}


def named_axes(params: Any) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Path of each leaf inside a named array to the names of its axes, in order, in lower case.

    An array counts as named if it has `axes` with names and sizes, or `named_axes`.
    """
    found = _inside(params, lambda node: _names_of(node) is not None)
    return {path: _names_of(node) or () for path, node in found}


def _inside(params: Any, is_node: Callable[[Any], bool]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path of each leaf inside of such nodes, and the node."""
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_node):
        if is_node(node):
            for below, _ in jax.tree_util.tree_leaves_with_path(node):
                yield names((*path, *below)), node


def _names_of(node: Any) -> tuple[str, ...] | None:
    axes = getattr(node, "axes", None)
    if hasattr(node, "array") and isinstance(axes, tuple) and all(hasattr(a, "name") for a in axes):
        return tuple(a.name.lower() for a in axes)
    named = getattr(node, "named_axes", None)
    if isinstance(named, Mapping) and not getattr(node, "positional_shape", ()):
        return tuple(str(name).lower() for name in named)
    return None


def by_axis_names(
    path: tuple[str, ...], role: Role, axes: tuple[str, ...], attention: str
) -> tuple[DimensionNumbers | None, str]:
    """The matrices of a leaf whose axes have names."""
    batch = [i for i, name in enumerate(axes) if re.fullmatch(_BATCH, name)]
    inner = [i for i in range(len(axes)) if i not in batch]
    if not role.muon:
        return None, role.name
    if any(re.fullmatch(_TABLE, name) for name in axes):
        return None, "embedding or output head: an axis of the vocabulary or of positions"
    if len(inner) < 2:
        return None, "vector" if inner else "scalar"
    # A layer goes from the model's axis to those of heads or of the hidden layer, or, as an output, back.
    heads = [i for i in inner if re.fullmatch(_HEAD, axes[i])]
    model = [i for i in inner if (i not in heads if heads else re.search(r"embed|hidden|model", axes[i]))]
    wide = [i for i in inner if i not in model]
    if not model or not wide:
        model, wide = inner[:-1], inner[-1:]
    is_down = role.projection == "out" or bool(re.fullmatch(_DOWN, layer_of(path)[1]))
    if heads and attention == "heads" and not is_down:
        wide = [i for i in wide if re.fullmatch(_HEAD_SIZE, axes[i])] or wide
    rows, outputs = (wide, model) if is_down else (model, wide)
    numbers = MuonDimensionNumbers(one_or_several(rows), one_or_several(outputs))
    return numbers, f"{role.name}, by the names of its axes"


def undecided_message(undecided: Sequence[Parameter], parameters: Sequence[Parameter], attention: str) -> str:
    """The message for leaves that can't be decided, with rules that decide all of them, numbered ones together."""
    p = undecided[0]
    what = "takes its parts as one matrix" if _is_whole(p) else "gives it to Adam"
    folded = attention == "heads" and len(p.shape) < 4 and p.role.name.startswith("attention")
    state = "interleaved" if p.role is INTERLEAVED else "folded into one axis" if folded else ""
    why = f", because its heads are {state}" if state else ""
    return (
        f"dimension_numbers(params) can't tell which matrices the leaf {'/'.join(p.path)!r} ({p.role.name}) of shape "
        f"{p.leaf_shape} holds{why}{_others(undecided, 'nor')}. The rule rules=[{_suggested(undecided, parameters)}] "
        f"{what}; MuonDimensionNumbers(reduction_axis, output_axis) instead names the axes that the layer sums over "
        "and those that it gives; FusedDimensionNumbers(0, 1, parts=..., axis=1) cuts one of them, "
        "parts=number_of_heads or parts=(queries, keys, values) long. In muon: "
        f"program=lambda params: muonjax.dimension_numbers(params, rules=...). {INSPECT}"
    )


def chances_message(why: Mapping[tuple[str, ...], tuple[str, str]], parameters: Sequence[Parameter]) -> str:
    """The warning for leaves that only a name or a position gives to an optimizer: which one, and the reason."""
    found = [p for p in parameters if p.path in why]
    alike: dict[tuple[str, ...], list[str]] = {}
    for p in found:
        path = "/".join(p.path)
        alike.setdefault((re.sub(r"\d+", "*", path), str(p.leaf_shape), *why[p.path]), []).append(path)
    said = (
        f"{optimizer} takes {(paths[0] if len(paths) == 1 else name)!r} {shape}: {reason}"
        for (name, shape, optimizer, reason), paths in alike.items()
    )
    adams = [p for p in found if why[p.path][0] == "Adam"]
    return (
        f"muonjax can't tell whether these leaves are at an end of the model: {'; '.join(said)}. To say otherwise: "
        f"muonjax.dimension_numbers(params, rules=[{_suggested(found, parameters, adams)}]). {INSPECT}"
    )


def settings_message(paths: Sequence[str]) -> str:
    """The message for matrices of layers whose settings names can't show."""
    return (
        f"muonjax goes by names and takes {listed(paths, ', ')} for plain kernels, but the layers have groups or an "
        f"einsum of their own. {INSPECT}"
    )


INSPECT = (
    "Or your function says it: program = muonjax.inspect(loss_fn, params, batch), then "
    "muonjax.muon(learning_rate, program)."
)


def _others(found: Sequence[Parameter], conjunction: str) -> str:
    others = len(found) - 1
    return f", {conjunction} {others} other{'s' * (others > 1)}" if others else ""


def _suggested(
    found: Sequence[Parameter], parameters: Sequence[Parameter], matrices: Sequence[Parameter] = ()
) -> str:
    """Rules for these leaves and no others, those that are numbered alike together, as a person pastes them."""
    paths = {p.path: re.escape("/".join(p.path)) for p in parameters}
    alike = {path: re.sub(r"\d+", r"\\d+", pattern) for path, pattern in paths.items()}
    every, own = Counter(alike.values()), Counter(alike[p.path] for p in found)
    rules = (
        f"(r'^{alike[p.path] if own[alike[p.path]] == every[alike[p.path]] else paths[p.path]}$', "
        f"{_whole(p) if _is_whole(p) or p in matrices else None})"
        for p in found
    )
    return ", ".join(dict.fromkeys(rules))


def _whole(p: Parameter) -> str:
    *rows, columns = range(len(p.leaf_shape))
    return f"MuonDimensionNumbers({one_or_several(rows)}, {columns})"


def _is_whole(p: Parameter) -> bool:
    return p.role in (INTERLEAVED, RECURRENT) and len(p.shape) == 2
