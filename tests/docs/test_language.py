"""Pages, docstrings and comments are in whole sentences and usual American words, as far as a pattern can find."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [
    path
    for top in ("muonjax", "pallas_kernels", "examples", "tests")
    for path in (ROOT / top).rglob("*.py")
]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
TELEGRAPHIC = re.compile(
    r"(?:^|[.:] |- )(?:Of|Who) .*|.*(?<!there )\b(?:is|are) none\b.*",
    flags=re.MULTILINE,
)
# Usual words for these: "next to", "in the same way", and American spelling.
UNUSUAL = re.compile(
    r"\b(?:beside|alike|modell\w+|neighbour\w*|behaviour|colour\w*|grey)\b",
    flags=re.IGNORECASE,
)


def prose(path: pathlib.Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join(
        [
            *(ast.get_docstring(node) or "" for node in nodes),
            *re.findall(r"# (.*)", text),
        ]
    )


@pytest.mark.parametrize(
    "path", [*SOURCES, *PAGES], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_sentences_are_whole(path):
    found = [*TELEGRAPHIC.findall(prose(path)), *UNUSUAL.findall(prose(path))]
    assert not found, found


@pytest.mark.parametrize("top", ["muonjax", "pallas_kernels"])
def test_no_line_is_longer_than_100_columns(top):
    for path in (ROOT / top).rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert len(line) <= 100, f"{path}:{number}"
