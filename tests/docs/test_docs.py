"""Run the code of every page and compare what it prints; check links, signatures and the picture of an update."""

import ast
import contextlib
import inspect
import io
import pathlib
import re
import sys
import unicodedata

import jax
import optax
import pytest

import muonjax
from tests.tools.tiers import quick

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *(DOCS / p for p in PAGES),
]

# A block of code, up to the next one.
BLOCK = re.compile(
    r"```python\n(?P<code>.*?)```(?P<after>.*?)(?=```python|\Z)", flags=re.DOTALL
)


# Code


@quick(
    "choosing.md-0",
    "kernels.md-0",
    "qk_clip.md-1",
    "saving.md-1",
    "way_of_a_gradient.md-2",
)
@pytest.mark.parametrize(
    ("code", "after"),
    [
        pytest.param(block["code"], block["after"], id=f"{page}-{count}")
        for page in PAGES
        for count, block in enumerate(BLOCK.finditer((DOCS / page).read_text()))
    ],
)
def test_code_runs_and_prints_what_the_page_shows(code, after):
    """Each block is a separate program. What it prints is in the next block of text."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs", "exec"), {"__name__": "page"})
    if printed.getvalue():
        shown = re.search(r"```text\n(.*?)```", after, flags=re.DOTALL)
        assert shown is not None, "the page does not show what its code prints"
        assert shown[1] == printed.getvalue()


# Links


def prose(path: pathlib.Path) -> str:
    """A document without its code."""
    text = re.sub(
        r"^( *)```.*?^\1```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", "", text)


def links(path: pathlib.Path) -> list[str]:
    """The targets of all links and pictures of a document, references resolved."""
    text = prose(path)
    references = dict(re.findall(r"^\[([^\]]+)\]: *(\S+)", text, flags=re.MULTILINE))
    used = re.findall(r"\]\[([^\]]+)\]", text)
    assert set(used) == set(references), (
        f"{path.name}: references {set(used) ^ set(references)}"
    )
    return [*re.findall(r"\]\(([^)\s]+)[^)]*\)", text), *references.values()]


def anchors(path: pathlib.Path) -> set[str]:
    """The anchors of a document's headings for which a repository site and MkDocs agree."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        kept = re.sub(r"[^\w\s-]", "", plain.lower())
        ascii_only = (
            unicodedata.normalize("NFKD", kept)
            .encode("ascii", "ignore")
            .decode()
            .strip()
        )
        if kept.replace(" ", "-") == re.sub(r"[-\s]+", "-", ascii_only):
            found.add(kept.replace(" ", "-"))
    return found


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere(document):
    for link in links(document):
        if re.match(r"https?://", link):
            continue  # the network is not asked
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert DOCS not in document.parents or DOCS in target.parents, (
            f"{link} leaves the site"
        )
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_paths_exist(document):
    text = document.read_text()
    folders = "muonjax|pallas_kernels|tests|benchmarks|examples|docs"
    for path in re.findall(rf"`((?:{folders})/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]+)", text):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (
            module
        )
    # A table's second row has a line of its own: refilled, the table would be a paragraph.
    for line in text.splitlines():
        assert "| --- |" not in line or set(line) <= set("|: -"), line


def test_errors_of_the_index_are_messages_of_the_library():
    section = (DOCS / "faq.md").read_text().split("## Errors and warnings")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "muonjax").rglob("*.py"))
    assert len(messages) > 10
    assert not [message for message in messages if message not in source]


def test_every_page_is_in_the_navigation():
    navigation = re.findall(
        r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE
    )
    assert sorted(navigation) == PAGES


# Settings of others


def table(name: str) -> list[list[str]]:
    """The rows of the table that coming_from.md has for `name`."""
    text = (
        (DOCS / "coming_from.md")
        .read_text()
        .split(f"<!-- signature: {name} -->\n\n")[1]
    )
    lines = text.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def check_table(name: str, signature: inspect.Signature):
    """Its first column has every argument of theirs, with its default where one is given, and its second ours."""
    theirs = {
        name: p.default for name, p in signature.parameters.items() if name != "self"
    }
    seen = set()
    for first, second, *_ in table(name):
        for argument, default in re.findall(r"`(\w+)(?:=([^`]*))?`", first):
            assert argument in theirs
            if default and argument not in seen:
                assert theirs[argument] == ast.literal_eval(default), argument
            seen.add(argument)
        for argument in re.findall(r"`(\w+)(?:=[^`]*)?`", second):
            assert argument in inspect.signature(muonjax.muon).parameters
    assert seen == set(theirs)


@pytest.mark.parametrize(
    ("name", "call"),
    [("optax.adamw", optax.adamw), ("optax.contrib.muon", optax.contrib.muon)],
)
def test_settings_of_optax(name, call):
    if (
        name == "optax.contrib.muon"
        and "consistent_rms" not in inspect.signature(call).parameters
    ):
        pytest.skip(
            f"the Muon of Optax {optax.__version__} has fewer arguments than that of 0.2.8"
        )
    check_table(name, inspect.signature(call))


@pytest.mark.interop
def test_settings_of_torch():
    torch = pytest.importorskip(
        "torch", reason="torch.optim.Muon: pip install -e '.[interop]'"
    )
    check_table("torch.optim.Muon", inspect.signature(torch.optim.Muon))


def test_gradient_picture_names_what_is_there():
    page = (DOCS / "way_of_a_gradient.md").read_text()
    picture = re.search(r"```text\n( gradient tree.*?)```", page, flags=re.DOTALL)
    assert picture is not None
    parts = re.findall(r"\s(_\w+(?:/\w+)?)", picture[1])
    names = re.findall(r"muonjax\.(\w+)", picture[1])
    assert len(parts) > 5
    assert len(names) > 1
    for part in parts:
        assert (ROOT / "muonjax" / part).is_dir() or (
            ROOT / "muonjax" / f"{part}.py"
        ).exists(), part
    for name in names:
        assert hasattr(muonjax, name)


def test_folders_on_the_way_of_a_kernel_are_those_that_run_in_their_order():
    page = (DOCS / "way_of_a_gradient.md").read_text()
    section = re.search(
        r"### One kernel, folder by folder\n(.*?)\n## ", page, flags=re.DOTALL
    )
    assert section is not None
    name = r"`(_\w+|pallas_kernels)`"
    listed, rows = (
        re.findall(pattern, section[1]) for pattern in (name, rf"\| \d+ \| {name}")
    )
    entered = {}

    def enter(frame, event, _):
        entered.setdefault(pathlib.Path(frame.f_code.co_filename).parent)

    # This size occurs in no other test, because JAX traces nothing twice.
    params = {"query": {"kernel": jax.ShapeDtypeStruct((264, 3, 88), "float32")}}
    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        tx = muonjax.muon(1e-3)
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    finally:
        sys.setprofile(before)
    ours = [
        p.name
        for p in entered
        if p.parent == ROOT / "muonjax" or p == ROOT / "pallas_kernels"
    ]
    assert set(ours) == set(listed)
    assert [name for name in ours if name in rows] == rows
