"""Check that every public name documents its arguments, results, errors, an example and its source."""

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import itertools
import pathlib
import re
import types

import optax
import pytest

from tests.test_public_api import PACKAGES, public_names

DOCS = pathlib.Path(__file__).parents[2] / "docs"
DOCUMENTED = re.findall(
    r"^::: (\S+)$",
    "\n".join(page.read_text() for page in sorted(DOCS.rglob("*.md"))),
    flags=re.MULTILINE,
)

# New in muonjax: without an external source.
OURS = {
    "muonjax.inspect", "muonjax.value_and_grad", "muonjax.Program", "muonjax.Distribution",
    "muonjax.state_shardings", "muonjax.NewtonSchulz", "muonjax.Scale", "muonjax.Site",
    "muonjax.adapter_mask", "muonjax.cast_momentum", "muonjax.fused_qkv_site", "muonjax.linen.TrainState",
    "muonjax.linen.merge", "muonjax.metrics", "muonjax.mha_site", "muonjax.nnx.LoHaParam",
    "muonjax.nnx.merge", "muonjax.tabulate", "pallas_kernels.symmetric_product",
}  # fmt: skip

# Sections that a docstring does not need, or still lacks. The test fails for an entry that is no longer true.
WITHOUT = {"muonjax.adapter_mask": {"Raises"}, "muonjax.metrics": {"Raises"}}


MODULES = map(importlib.import_module, PACKAGES)
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in sorted(public_names(module))
    if not isinstance(getattr(module, name), types.ModuleType)
}


def is_value(name: str) -> bool:
    """Whether it is a constant, or an alias of another library's class: Python keeps no docstring for those."""
    return not callable(PUBLIC[name]) or not PUBLIC[name].__module__.startswith(
        name.split(".")[0]
    )


def docstring(name: str) -> str:
    if not is_value(name):
        return inspect.getdoc(PUBLIC[name]) or ""
    for node in ast.parse(
        inspect.getsource(importlib.import_module(name.split(".")[0]))
    ).body:
        if isinstance(node, ast.ImportFrom) and name.split(".")[-1] in [
            a.name for a in node.names
        ]:
            body = ast.parse(
                inspect.getsource(importlib.import_module(str(node.module)))
            ).body
            for assignment, text in itertools.pairwise(body):
                targets = getattr(
                    assignment, "targets", [getattr(assignment, "target", None)]
                )
                if name.split(".")[-1] in [
                    getattr(target, "id", None) for target in targets
                ]:
                    return (
                        inspect.cleandoc(ast.literal_eval(text.value))
                        if isinstance(text, ast.Expr)
                        else ""
                    )
    return ""


def sections(name: str) -> dict[str, str]:
    """The docstring's sections by their titles."""
    parts = re.split(
        r"^(Args|Attributes|Returns|Raises|Example):\n",
        docstring(name),
        flags=re.MULTILINE,
    )
    return {
        title: re.split(r"\n(?=\S)", body)[0]
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def arguments(public) -> list[str]:
    """The names in its signature."""
    names = list(inspect.signature(public).parameters)
    if names == ["args", "kwargs"]:  # a metaclass is in the way, as for NNX's modules
        names = list(inspect.signature(public.__init__).parameters)[1:]
    return names


def documented(name: str) -> tuple[list[str], set[str]]:
    """The arguments that a docstring names, and those behind "All other arguments are as in `muon` and `qk_clip`."."""
    found = sections(name)
    text = found.get("Args") or found.get("Attributes") or ""
    pointers = re.search(
        r"^All other arguments are as in (.*)\.$", docstring(name), flags=re.MULTILINE
    )
    behind: set[str] = set()
    for other in re.findall(r"`([\w.]+)`", pointers[1]) if pointers else []:
        library, *path = other.split(".")
        behind |= set(
            arguments(functools.reduce(getattr, path, optax))
            if path
            else documented(f"muonjax.{library}")[0]
        )
    return re.findall(r"^  \*{0,2}(\w+): ", text, flags=re.MULTILINE), behind


def is_record(public) -> bool:
    """Whether the attributes of a class are what its constructor takes."""
    return dataclasses.is_dataclass(public) or hasattr(public, "_fields")


def test_pages_describe_every_public_name_once():
    """Those of docs/api.md, and on the page of its subject what few readers need."""
    assert sorted(DOCUMENTED) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_says_what_a_user_asks(name):
    found = sections(name)
    wanted = (
        {"Args", "Returns", "Raises", "Example"}
        if inspect.isfunction(PUBLIC[name])
        else {"Example"}
    )
    assert docstring(name).partition("\n")[0].strip()
    assert wanted - set(found) == WITHOUT.get(name, set())
    assert ">>>" in found.get("Example", ">>>")
    assert (name in OURS) != bool(
        re.search(r"^Sources?: ", docstring(name), flags=re.MULTILINE)
    )


@pytest.mark.parametrize("name", [name for name in PUBLIC if not is_value(name)])
def test_documents_its_arguments_and_no_others(name):
    if (
        "optax_contrib" in name
        and "consistent_rms" not in inspect.signature(optax.contrib.muon).parameters
    ):
        pytest.skip(
            "it points to Optax for arguments that this Optax does not have yet"
        )
    found = sections(name)
    public = PUBLIC[name]
    if inspect.isclass(public) and "Args" not in found and not is_record(public):
        return  # not for users to construct
    own, others = documented(name)
    # In the order of the signature; what is left out stands where the docstring points.
    assert own == [argument for argument in arguments(public) if argument in own]
    assert set(arguments(public)) <= {*own, *others}


@pytest.mark.parametrize("name", [name for name in PUBLIC if is_value(name)])
def test_examples_of_values(name):
    """Pytest runs the docstrings that Python keeps, and not these."""
    example = doctest.DocTestParser().get_doctest(docstring(name), {}, name, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
