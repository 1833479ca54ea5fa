"""Fill a Jinja template with results: tables and sentences in Markdown.

In a template, `rows|table("time | size", "{seconds:.1f} | {shape}")` is a table with these headings and cells, where
`{optax[ratio]:.2f}` is an entry of an entry, `{row:quartiles}` what `measure.summary` returned, and `{name}` the key of
a row in a mapping. `x|f(".2f")` formats one value, `rows|where(task="digits")` selects rows, `rows|column("seconds")`
takes one entry of each. None is empty, a bool yes or no, a list joined by "×"; what the results lack is an error. The
rules of tables and line breaks in sentences come by themselves, and so does `machine`, the device and the versions,
below a table that no sentence follows.
"""

import json
import pathlib
import re
import string
import textwrap
from typing import Any

import jinja2

BENCHMARKS = pathlib.Path(__file__).parents[1]


class _Missing(jinja2.StrictUndefined):
    __format__ = jinja2.StrictUndefined.__str__  # raises, and names the key


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        """Keys as they are written, be there dots, commas or digits in them."""
        value, keys = kwargs, re.findall(r"[^\[\]]+", field_name)
        for key in keys:
            value = value[key]
        return value, keys[0]

    def format_field(self, value: Any, format_spec: str) -> str:
        return (
            _quartiles(value)
            if format_spec == "quartiles"
            else _format(value, format_spec)
        )


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return " × ".join(map(str, value))
    return (
        {None: "", True: "yes", False: "no"}[value]
        if value is None or isinstance(value, bool)
        else value
    )


def _format(value: Any, form: str) -> str:
    return "" if value is None else format(_shown(value), form)


def _quartiles(x: dict[str, Any]) -> str:
    return "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})".format(**x)


def _table(rows: Any, heading: str, cells: str) -> str:
    rows = (
        [{"name": name, **row} for name, row in rows.items()]
        if isinstance(rows, dict)
        else rows
    )
    lines = [
        heading,
        *(_Cells().vformat(cells, (), {**row, "row": row}) for row in rows),
    ]
    return "\n".join(f"| {line} |" for line in lines)


def _read(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def _added_lines(page: str, client: str) -> int:
    """The lines that a recipe's diffs add, in the head of its page and in the client's own section."""
    first, *sections = (
        (BENCHMARKS.parent / "docs" / "recipes" / f"{page}.md")
        .read_text()
        .split("\n## ")
    )
    own = [
        section for section in sections if section.startswith(f"{client}\n")
    ] or sections
    diffs = re.findall(
        r"```diff\n(.*?)```", "\n## ".join([first, *own]), flags=re.DOTALL
    )
    return sum(
        bool(re.match(r"\+\s*[^+\s]", line))
        for diff in diffs
        for line in diff.splitlines()
    )


_JINJA = jinja2.Environment(
    undefined=_Missing,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.do"],
)
_JINJA.globals |= {"read": _read, "added_lines": _added_lines}
_JINJA.filters |= {
    "table": _table,
    "f": _format,
    "quartiles": _quartiles,
    "column": lambda rows, key: [row[key] for row in rows],
    "where": lambda rows, **keys: [
        row for row in rows if all(row[key] == keys[key] for key in keys)
    ],
    # The optimistic and the pessimistic end, or their common value.
    "interval": lambda ends, form: " to ".join(
        dict.fromkeys(format(end, form) for end in ends)
    ),
}


def fill(template: str, results: dict[str, Any]) -> str:
    """The template's Markdown, with a rule below the heading of every table and blank lines around it."""

    def ruled(lines: re.Match[str]) -> str:
        heading, rows = lines[0].split("\n", 1)
        return f"\n{heading}\n|{' --- |' * (heading.count(' | ') + 1)}\n{rows}\n"

    made = results["provenance"]
    versions = [
        f"{name} {made['versions'][name]}"
        for name in ("jax", "optax")
        if name in made["versions"]
    ]
    machine = f"{made['device']}; {', '.join(versions)}."
    text = _JINJA.from_string(template).render(results, machine=machine).strip()
    text = re.sub(r"(^\|.*\n)+", ruled, f"{text}\n", flags=re.MULTILINE).strip()
    parts = [*re.split(r"\n{2,}", text), *([machine] if text.endswith("|") else [])]
    return "\n\n".join(
        part if part[0] == "|" else textwrap.fill(part, 120, break_on_hyphens=False)
        for part in parts
    )
