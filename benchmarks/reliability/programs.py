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

Answers = Mapping[str, Any]  # dimension numbers, None, `OPEN` or "refused" by path


def of_program(program: muonjax.Program) -> Answers:
    """What `muonjax.inspect` says."""
    return {
        path: "refused" if d.problem or d.by_names else d.numbers
        for path, d in program._decisions.items()
    }


def count(model: Model, answers: Answers, right: Mapping[str, str]) -> Counter[str]:
    """Parameters that are right, wrong and refused or open, and what the model is."""
    totals: Counter[str] = Counter()
    shapes = {
        path: leaf.shape
        for path, leaf in zip(*flattened(model.params)[:2], strict=True)
    }
    for path, answer in right.items():
        found = answers[path]
        is_open = isinstance(found, str)
        shown = None if is_open else found
        if found != "refused" and is_right(shown, None, answer, shapes[path]):
            totals["leaves_right"] += 1
        else:
            totals[f"leaves_{'refused' if is_open else 'wrong'}"] += 1
    worst = next(
        (how for how in ("wrong", "refused") if totals[f"leaves_{how}"]), "right"
    )
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


def read(model: Model) -> muonjax.Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parameters that are never used
        return muonjax.inspect(model.loss, model.params, *model.inputs)


def rows_of(models: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """A row for each way to read."""
    kinds = (
        "the function",
        "the function, random names",
        "names alone",
        "random names alone",
    )
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for entry in models.values():
        model = entry.make()
        right = expected_leaves(model, model.leaves)
        other, path_of = scrambled(model)
        program, there = read(model), read(other)
        back = {path: word for word, path in path_of.items()}
        attentions = [_renamed(line, back) for line in model.attentions]
        renamed = other._replace(attentions=attentions)
        other_right = {back[path]: answer for path, answer in right.items()}
        totals[kinds[0]] += count(model, of_program(program), right) + count_attentions(
            model, program
        )
        totals[kinds[1]] += count(
            other, of_program(there), other_right
        ) + count_attentions(renamed, there)
        totals[kinds[2]] += count(model, by_names(model.params), right)
        totals[kinds[3]] += count(other, by_names(other.params), other_right)
    columns = [
        f"{what}_{how}"
        for what in ("models", "leaves")
        for how in ("right", "wrong", "refused")
    ]
    attention_columns = [f"attentions_{how}" for how in ("found", "refused", "wrong")]
    return [
        {"rule": kind}
        | {
            c: totals[kind][c]
            for c in [*columns, *(attention_columns if i < 2 else [])]
        }
        for i, kind in enumerate(kinds)
    ]


def _renamed(line: str, names: Mapping[str, str]) -> str:
    """An attention's line with other paths."""
    if line.startswith("refused: "):
        return line
    parts = (text.split() for text in line.split("; "))
    return "; ".join(
        " ".join(
            [factor, f"{names[at.rsplit('@', 1)[0]]}@{at.rsplit('@', 1)[1]}", *rest]
        )
        for factor, at, *rest in parts
    )


def of_libraries(libraries: Collection[str]) -> dict[str, Entry]:
    found = {name: entry for name, entry in MODELS.items() if entry.needs in libraries}
    return {
        name: entry
        for name, entry in found.items()
        if importlib.util.find_spec(entry.needs)
    }


def client(library: str) -> dict[str, Any]:
    """The rows of one library of which the tests' own environment has not the versions."""
    models = of_libraries([library])
    rows = rows_of(models)[:2]
    version = importlib.metadata.version(PACKAGES.get(library, library))
    provenance = measure.provenance()
    return {
        "library": library,
        "version": version,
        "models": sorted(models),
        "rows": rows,
        "provenance": provenance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(CLIENTS)}")
    libraries = parser.parse_args().libraries
    if unknown := set(libraries).difference(CLIENTS):
        parser.error(f"no library of {', '.join(CLIENTS)}: {', '.join(unknown)}")
    known = measure.read("programs")
    clients = {row["library"]: row for row in known.pop("clients", [])}
    if libraries:
        clients |= {library: client(library) for library in libraries}
        ordered = [clients[name] for name in CLIENTS if name in clients]
        measure.write(
            "programs",
            known | {"clients": ordered},
            *(clients[name]["rows"] for name in libraries),
        )
    else:
        models = of_libraries(
            {entry.needs for entry in MODELS.values()}.difference(CLIENTS)
        )
        rows = rows_of(models)
        measure.write(
            "programs",
            {"models": sorted(models), "rows": rows, "clients": [*clients.values()]},
            rows,
        )


if __name__ == "__main__":
    main()
