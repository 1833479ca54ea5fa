"""Every block of code on these pages is a program of its own, and runs."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = ["loha.md", "qk_clip.md"]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=f"{page}-{count}")
        for page in PAGES
        for count, code in enumerate(
            re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
        )
    ],
)
def test_code_runs(code):
    exec(compile(code, "docs", "exec"), {"__name__": "page"})
