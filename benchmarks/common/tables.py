"""Fill a Jinja template with results: tables and sentences in Markdown.

In a template, `rows|table("time | size", "{seconds:.1f} | {shape}")` is a table with these headings and cells, where
`{optax[ratio]:.2f}` is an entry of an entry, `{row:quartiles}` what `measure.summary` returned, and `{name}` the key of
a row in a mapping. `x|f(".2f")` formats one value, `rows|where(task="digits")` selects rows, `rows|column("seconds")`
takes one entry of each. None is empty, a bool yes or no, a list joined by "×"; what the results lack is an error. The
rules of tables and line breaks in sentences come by themselves, and so does `machine`, the device and the versions,
below a table that no sentence follows.
"""

import re
import string
import textwrap
from typing import Any

import jinja2


class _Missing(jinja2.StrictUndefined):
    __format__ = jinja2.StrictUndefined.__str__  # raises, and names the key


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "quartiles":
            return _quartiles(value)
        return _format(value, format_spec)


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return " × ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else value


def _format(value: Any, form: str) -> str:
    return "" if value is None else format(_shown(value), form)


def _quartiles(x: dict[str, Any]) -> str:
    return "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})".format(**x)


def _table(rows: Any, heading: str, cells: str) -> str:
    if isinstance(rows, dict):
        rows = [{"name": name, **row} for name, row in rows.items()]
    lines = [heading]
    for row in rows:
        lines.append(_Cells().vformat(cells, (), {**row, "row": row}))
    return "\n".join(f"| {line} |" for line in lines)


def _where(rows: list[dict[str, Any]], **key: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == key[name] for name in key)]


def _interval(ends: list[float], form: str) -> str:
    """The optimistic and the pessimistic end, or their common value."""
    return " to ".join(dict.fromkeys(format(end, form) for end in ends))


_JINJA = jinja2.Environment(
    undefined=_Missing,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.do"],
)
_JINJA.filters |= {
    "table": _table,
    "f": _format,
    "quartiles": _quartiles,
    "column": lambda rows, key: [row[key] for row in rows],
    "where": _where,
    "interval": _interval,
}


def fill(template: str, results: dict[str, Any]) -> str:
    """The template's Markdown, with a rule below the heading of every table and blank lines around it."""

    def ruled(lines: re.Match[str]) -> str:
        heading, rows = lines[0].split("\n", 1)
        return f"\n{heading}\n|{' --- |' * (heading.count(' | ') + 1)}\n{rows}\n"

    made = results["provenance"]
    versions = []
    for name in ("jax", "optax"):
        if name in made["versions"]:
            versions.append(f"{name} {made['versions'][name]}")
    machine = f"{made['device']}; {', '.join(versions)}."
    text = _JINJA.from_string(template).render(results, machine=machine).strip()
    text = re.sub(r"(^\|.*\n)+", ruled, f"{text}\n", flags=re.MULTILINE).strip()
    parts = [*re.split(r"\n{2,}", text), *([machine] if text.endswith("|") else [])]
    return "\n\n".join(
        part if part[0] == "|" else textwrap.fill(part, 120, break_on_hyphens=False)
        for part in parts
    )
