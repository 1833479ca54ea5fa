"""Write the figures of README.md and docs from the JSON files under benchmarks/results.

    python -m benchmarks.report            # rewrite
    python -m benchmarks.report --check    # fail if a page is out of date

Between `<!-- results: NAME -->` and `<!-- end -->` a page has what follows `{# NAME #}` in the `tables.jinja` of one of
the folders, filled with the keys of NAME.json (`msign.time` is one of several from msign.json) by `common/tables.py`.
"""

import json
import pathlib
import re
import sys

from benchmarks.common import tables

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def find_templates() -> dict[str, str]:
    """All templates by name, each with the macros at the head of its file."""
    templates: dict[str, str] = {}
    for path in sorted((ROOT / "benchmarks").glob("*/tables.jinja")):
        macros, *found = re.split(
            r"^{# ([\w.]+) #}\n", path.read_text(), flags=re.MULTILINE
        )
        for name, template in zip(found[::2], found[1::2], strict=True):
            if name in templates:
                raise ValueError(
                    f"{path.relative_to(ROOT)}: {name} is there twice, or in another folder too."
                )
            templates[name] = macros + template
    return templates


def render(text: str, templates: dict[str, str]) -> str:
    """`text` with every template filled again."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        source = RESULTS / f"{name.partition('.')[0]}.json"
        if name not in templates:
            raise ValueError(
                f"<!-- results: {name} --> has no {{# {name} #}} in a benchmarks/*/tables.jinja."
            )
        if not source.exists():
            raise ValueError(
                f"<!-- results: {name} --> needs {source.name}, which its benchmark writes."
            )
        filled = tables.fill(templates[name], json.loads(source.read_text()))
        return f"<!-- results: {name} -->\n{filled}\n<!-- end -->"

    return re.sub(
        r"<!-- results: ([\w.]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL
    )


def pages() -> list[pathlib.Path]:
    """The documents that have results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    check = "--check" in sys.argv
    templates = find_templates()
    stale = []
    for path in pages():
        text = path.read_text()
        if (new := render(text, templates)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new)
    if check and stale:
        raise SystemExit(
            f"out of date: {', '.join(stale)}; run python -m benchmarks.report"
        )


if __name__ == "__main__":
    main()
