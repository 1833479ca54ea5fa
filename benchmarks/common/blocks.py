"""Render a result block of the README and docs: one JSON file to a Markdown table, a sentence, or both.

The blocks of each folder's benchmarks are in its `blocks.py`. This file and those import nothing but the standard
library, so that the documentation is checked without JAX.
"""

import dataclasses
import json
import pathlib
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

BENCHMARKS = pathlib.Path(__file__).parents[1]
Row = Mapping[str, Any]
Cell = str | Callable[[Row], Any]


@dataclasses.dataclass(frozen=True)
class Block:
    """The text between `<!-- results: NAME -->` and `<!-- end -->`.

    A format string sees the keys of a row, or of the JSON, whatever characters are in them: `"{seconds:.1f}"`,
    `"{optimizers[fast][seconds]:.1f}"`. A list is joined by "×", None is empty, a bool is yes or no, and
    `"{row:quartiles}"` is the ratio and its quartiles that `measure.summary` returned.

    Attributes:
      columns: Heading to cell: a format string, or a function of the row. Where the headings come from the data, a
        function of the JSON that returns such a mapping.
      rows: The JSON's key of the rows, or a function of the JSON that returns them. A mapping's keys become `name`.
      text: A format string over the JSON's keys, `table`, `machine` (device and versions) and `values`.
      values: More for `text`: a function of the JSON that returns a mapping.
    """

    columns: Mapping[str, Cell] | Callable[[Row], Mapping[str, Cell]] = dataclasses.field(
        default_factory=dict
    )
    rows: str | Callable[[Row], Any] = "rows"
    text: str = "{table}\n\n{machine}"
    values: Callable[[Row], Row] = lambda content: {}

    def render(self, content: Row) -> str:
        """The block's Markdown."""
        more = {"machine": _machine(content["provenance"]), **self.values(content)}
        return fill(self.text, {**content, "table": self._table(content), **more})

    def _table(self, content: Row) -> str:
        columns = self.columns(content) if callable(self.columns) else self.columns
        if not columns:
            return ""
        rows = self.rows(content) if callable(self.rows) else content[self.rows]
        if isinstance(rows, Mapping):
            rows = [{"name": name, **row} for name, row in rows.items()]
        lines = [list(columns), ["---"] * len(columns)]
        lines += [[_cell(cell, row) for cell in columns.values()] for row in rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read(name: str, folder: str = "results") -> Row:
    """Another JSON file, for a block that compares several."""
    return json.loads((BENCHMARKS / folder / f"{name}.json").read_text())


def _cell(cell: Cell, row: Row) -> str:
    return fill("{value}", {"value": cell(row)}) if callable(cell) else fill(cell, row)


def fill(template: str, row: Row) -> str:
    """`template` with the values of `row`."""
    return _Formatter().vformat(template, (), {**row, "row": row})


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        """Keys as they are written, be there dots, commas or digits in them."""
        value, (first, *rest) = kwargs, re.findall(r"[^\[\]]+", field_name)
        for key in (first, *rest):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return value, first

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "quartiles":
            return "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})".format(**value)
        if isinstance(value, list):
            return " × ".join(map(str, value))
        if value is None or isinstance(value, bool):
            return {None: "", True: "yes", False: "no"}[value]
        return format(value, format_spec)


def _machine(provenance: Row) -> str:
    """Device and versions."""
    versions = provenance["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("jax", "optax") if name in versions)
    return f"{provenance['device']}; {packages}."
