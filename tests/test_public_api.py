"""The public names and signatures are those of the committed list, `tests/public_api.txt`.

python -m tests.test_public_api    # writes the list again, after a change that is wanted
"""

import ast
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator

import pytest

LIST = pathlib.Path(__file__).with_name("public_api.txt")
PACKAGES = [
    "muonjax",
    "muonjax.linen",
    "muonjax.nnx",
    "muonjax.optax_contrib",
    "pallas_kernels",
]


def public_names(module) -> set[str]:
    """What a package's `__init__.py` defines, and what it imports under `as`, the mark of a re-export."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    names = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {
                target.id for target in node.targets if isinstance(target, ast.Name)
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {
                alias.asname for alias in node.names if alias.asname == alias.name
            }
    return {name for name in names if not name.startswith("_")}


def signature(value) -> str:
    """Arguments, their kinds and their defaults; no annotations, for they may become more precise."""
    found = inspect.signature(value)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    text = re.sub(
        r"<(?:function|class|PjitFunction of <function) '?([\w.]+).*?>+", r"<\1>", text
    )
    return re.sub(r"\d+\.\d{7,}", lambda number: f"{float(number[0]):.7g}", text)


def constructor(cls: type) -> str:
    """Flax's metaclass hides the arguments of `__init__`; and where that is Flax's own, it is not ours to list."""
    made_by = cls.__init__
    if made_by is object.__init__:
        return signature(cls)
    return (
        ""
        if made_by.__module__.startswith("flax")
        else re.sub(r"\(self(, )?", "(", signature(made_by))
    )


def members(cls: type) -> Iterator[str]:
    """The public fields, properties and methods that a class has from these packages, not from Flax."""
    ours = [
        base
        for base in cls.__mro__
        if base.__module__.partition(".")[0] in ("muonjax", "pallas_kernels")
    ]
    names = {
        name for base in ours for name in [*vars(base), *inspect.get_annotations(base)]
    }
    for name in names | set(getattr(cls, "_fields", ())):
        if not name.startswith("_"):
            value = getattr(cls, name, None)
            yield name + (signature(value) if inspect.isroutine(value) else "")


def public_api(package: str) -> list[str]:
    module = importlib.import_module(package)
    lines = []
    for name in public_names(module):
        value = getattr(module, name)
        full = f"{package}.{name}"
        if inspect.isclass(value):
            lines += [
                full + constructor(value),
                *(f"{full}.{member}" for member in members(value)),
            ]
        else:
            lines.append(full + (signature(value) if callable(value) else ""))
    return sorted(lines)


def listed() -> dict[str, list[str]]:
    return dict(
        zip(PACKAGES, map(str.splitlines, LIST.read_text().split("\n\n")), strict=True)
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_and_signatures_are_those_of_the_list(package):
    assert public_api(package) == listed()[package], (
        "if this is wanted: python -m tests.test_public_api"
    )


def test_dir_lists_the_package_and_no_module_that_it_uses():
    assert "importlib" not in dir(importlib.import_module("muonjax"))


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_modules_that_import_flax_are_loaded_when_they_are_asked_for(name):
    package = importlib.import_module("muonjax")
    assert package.__getattr__(name) is importlib.import_module(f"muonjax.{name}")


if __name__ == "__main__":
    lines = {package: public_api(package) for package in PACKAGES}
    LIST.write_text("\n\n".join(map("\n".join, lines.values())) + "\n")
