"""Library models as functions: how many of their parameters and attentions are read rightly, with names and without.

    python -m benchmarks.reliability.programs                    # those that the extra [test] installs
    python -m benchmarks.reliability.programs maxtext penzai     # each of these, in an environment that has it

The models and the answers are those of tests/inspect/library_models, written by hand. Names alone read the same
parameter trees, as they are and with random names.
"""

import argparse
import importlib.metadata
import importlib.util
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import muonjax
from benchmarks.common import measure
from benchmarks.reliability.zoo import by_names
from tests.inspect.library_models import MODELS, Model
from tests.inspect.library_models.answers import (
    expected_attention,
    expected_leaves,
    found_attention,
    is_right,
    same_heads,
)
from tests.inspect.library_models.model import Entry, flattened, scrambled

CLIENTS = ("maxtext", "levanter", "tunix", "penzai", "keras_hub", "gemma")
PACKAGES = {
    "levanter": "marin-levanter",
    "tunix": "google-tunix",
    "keras_hub": "keras-hub",
}

COLUMNS = [
    f"{what}_{how}"
    for what in ("models", "leaves")
    for how in ("right", "wrong", "refused")
]
ATTENTION_COLUMNS = [f"attentions_{how}" for how in ("found", "refused", "wrong")]

Answers = Mapping[str, Any]  # dimension numbers, None, `OPEN` or "refused" by path


def count(model: Model, answers: Answers, right: Mapping[str, str]) -> Counter[str]:
    """Parameters that are right, wrong and refused or open, and what the model is."""
    totals: Counter[str] = Counter()
    paths, leaves = flattened(model.params)[:2]
    shapes = {path: leaf.shape for path, leaf in zip(paths, leaves, strict=True)}
    for path, answer in right.items():
        numbers = answers[path]
        is_open = isinstance(numbers, str)
        shown = None if is_open else numbers
        if numbers != "refused" and is_right(shown, None, answer, shapes[path]):
            totals["leaves_right"] += 1
        else:
            totals[f"leaves_{'refused' if is_open else 'wrong'}"] += 1
    worst = "refused" if totals["leaves_refused"] else "right"
    worst = "wrong" if totals["leaves_wrong"] else worst
    totals[f"models_{worst}"] += 1
    return totals


def count_attentions(model: Model, program: muonjax.Program) -> Counter[str]:
    """Attentions that are found with all heads, refused with the right reason, and others, or missed."""
    found = [
        found_attention(model.params, attention) for attention in program.attentions
    ]
    wanted = [expected_attention(model, line) for line in model.attentions]
    totals: Counter[str] = Counter()
    for a, b in zip(found, wanted, strict=False):
        how = "refused" if isinstance(a, str) else "found"
        totals[f"attentions_{how if same_heads(a, b) else 'wrong'}"] += 1
    totals["attentions_wrong"] += abs(len(found) - len(wanted))
    return totals


def count_read(model: Model, right: Mapping[str, str]) -> Counter[str]:
    """What `muonjax.inspect` makes of parameters and attentions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parameters that are never used
        program = muonjax.inspect(model.loss, model.params, *model.inputs)
    answers = {}
    for path, decision in program._decisions.items():
        is_refused = decision.problem or decision.by_names
        answers[path] = "refused" if is_refused else decision.numbers
    return count(model, answers, right) + count_attentions(model, program)


def rows_of(models: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """A row for each way to read."""
    rows: dict[str, Counter[str]] = {}
    for suffix in ("", ", random names"):
        rows[f"the function{suffix}"] = Counter(
            dict.fromkeys(COLUMNS + ATTENTION_COLUMNS, 0)
        )
    for kind in ("names alone", "random names alone"):
        rows[kind] = Counter(dict.fromkeys(COLUMNS, 0))
    for entry in models.values():
        model = entry.make()
        right = expected_leaves(model, model.leaves)
        other, path_of = scrambled(model)
        name_of = {path: word for word, path in path_of.items()}
        other = other._replace(
            attentions=[_renamed(line, name_of) for line in model.attentions]
        )
        other_right = {name_of[path]: answer for path, answer in right.items()}
        rows["the function"].update(count_read(model, right))
        rows["the function, random names"].update(count_read(other, other_right))
        rows["names alone"].update(count(model, by_names(model.params), right))
        rows["random names alone"].update(
            count(other, by_names(other.params), other_right)
        )
    return [{"rule": kind, **totals} for kind, totals in rows.items()]


def _renamed(line: str, names: Mapping[str, str]) -> str:
    """An attention's line with other paths."""
    if line.startswith("refused: "):
        return line
    parts = []
    for part in line.split("; "):
        factor, place, *rest = part.split()
        path, _, axes = place.rpartition("@")
        parts.append(" ".join([factor, f"{names[path]}@{axes}", *rest]))
    return "; ".join(parts)


def of_libraries(libraries: Collection[str]) -> dict[str, Entry]:
    """The models of those libraries that are installed."""
    models = {}
    for name, entry in MODELS.items():
        if entry.needs in libraries and importlib.util.find_spec(entry.needs):
            models[name] = entry
    return models


def client(library: str) -> dict[str, Any]:
    """The rows of one library of which the tests' own environment has not the versions."""
    models = of_libraries([library])
    return {
        "library": library,
        "version": importlib.metadata.version(PACKAGES.get(library, library)),
        "models": sorted(models),
        "rows": rows_of(models)[:2],
        "provenance": measure.provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("libraries", nargs="*", choices=[*CLIENTS, []], default=[])
    libraries = parser.parse_args().libraries
    content = measure.read("programs")
    clients = {row["library"]: row for row in content.get("clients", [])}
    for library in libraries:
        clients[library] = client(library)
    content["clients"] = [clients[name] for name in CLIENTS if name in clients]
    if not libraries:
        models = of_libraries(
            {entry.needs for entry in MODELS.values()}.difference(CLIENTS)
        )
        content |= {"models": sorted(models), "rows": rows_of(models)}
    content.pop("provenance", None)
    measure.write("programs", content, content["rows"])


if __name__ == "__main__":
    main()
