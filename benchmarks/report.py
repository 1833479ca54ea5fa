"""Rewrite the result blocks of README.md and docs from the JSON files under benchmarks/results.

    python -m benchmarks.report            # rewrite
    python -m benchmarks.report --check    # fail if a block is out of date

`<!-- results: NAME -->` … `<!-- end -->` is written by `BLOCKS[NAME]` of a folder's `blocks.py`, from NAME.json;
several blocks from one JSON are told apart by a suffix: `msign.memory` is from msign.json.
"""

import importlib
import json
import pathlib
import re
import sys

from benchmarks.common.blocks import Block

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def find_blocks() -> dict[str, Block]:
    """All blocks by name, from the `blocks.py` of each folder of benchmarks."""
    blocks: dict[str, Block] = {}
    for path in sorted((ROOT / "benchmarks").glob("*/blocks.py")):
        found = getattr(importlib.import_module(f"benchmarks.{path.parent.name}.blocks"), "BLOCKS", {})
        if twice := blocks.keys() & found:
            raise ValueError(
                f"{path.relative_to(ROOT)}: {', '.join(sorted(twice))} is in another folder too."
            )
        blocks |= found
    return blocks


def render(text: str, blocks: dict[str, Block]) -> str:
    """`text` with every block rewritten."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            raise ValueError(f"<!-- results: {name} --> has no entry in BLOCKS of a benchmarks/*/blocks.py.")
        source = RESULTS / f"{name.partition('.')[0]}.json"
        if not source.exists():
            raise ValueError(f"<!-- results: {name} --> needs {source.name}, which its benchmark writes.")
        content = json.loads(source.read_text())
        return f"<!-- results: {name} -->\n{blocks[name].render(content)}\n<!-- end -->"

    return re.sub(r"<!-- results: ([\w.]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def pages() -> list[pathlib.Path]:
    """The documents that have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    check, blocks, stale = "--check" in sys.argv, find_blocks(), []
    for path in pages():
        text = path.read_text()
        if (new := render(text, blocks)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new)
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks.report")


if __name__ == "__main__":
    main()
