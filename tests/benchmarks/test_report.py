"""Result tables: they show what the JSON says, name what is wrong, and load nothing heavy."""

import json
import re
import subprocess
import sys

import jinja2
import pytest

from benchmarks import report
from benchmarks.common import tables

PROVENANCE = {
    "device": "CPU, 2 cores",
    "versions": {"python": "3.11", "jax": "0.10.2", "optax": "0.2.8"},
}
CONTENT = {
    "provenance": PROVENANCE,
    "seconds": 1.25,
    "rows": {
        "a, b": {
            "ratio": 0.5,
            "ratio_low": 0.25,
            "ratio_high": 0.75,
            "shape": [8, 16],
            "nested": {"key": 2},
        },
        "c": {
            "ratio": 1.0,
            "ratio_low": 1.0,
            "ratio_high": 1.0,
            "shape": [4],
            "nested": {"key": None},
        },
    },
}
TABLE = """{{ rows|table(" | size | time | dots", "{name} | {shape} | {row:quartiles} | {nested[key]:.1f}") }}
In units of {{ seconds|f(".1f") }} s, {{ rows|length }} rows. {{ machine }}
"""
LOOP = """|  | large | dots |
{% for name, row in rows.items() %}| {{ name }} | {{ row.ratio > 0.7 }} | {{ row.nested.key|f(".1f") }} |
{% endfor %}
"""


def test_a_table_and_its_sentence():
    assert tables.fill(TABLE, CONTENT).splitlines() == [
        "|  | size | time | dots |",
        "| --- | --- | --- | --- |",
        "| a, b | 8 × 16 | 0.50 (0.25 to 0.75) | 2.0 |",
        "| c | 4 | 1.00 (1.00 to 1.00) |  |",
        "",
        "In units of 1.2 s, 2 rows. CPU, 2 cores; jax 0.10.2, optax 0.2.8.",
    ]


def test_no_line_ends_within_a_word():
    words = [word for length in range(1, 30) for word in ("x" * length, "held-out")]
    lines = tables.fill(" ".join(words), CONTENT).splitlines()
    assert len(lines) > 2
    assert " ".join(lines).split() == words


def test_a_table_without_a_sentence_names_the_machine():
    assert tables.fill(LOOP, CONTENT).splitlines() == [
        "|  | large | dots |",
        "| --- | --- | --- |",
        "| a, b | no | 2.0 |",
        "| c | yes |  |",
        "",
        "CPU, 2 cores; jax 0.10.2, optax 0.2.8.",
    ]


@pytest.mark.parametrize(
    "template", ["{{ rato }}", '{{ rato|f(".1f") }}', '{{ rows.c.rato|f("") }}']
)
def test_a_value_that_the_json_lacks_is_an_error(template):
    with pytest.raises(jinja2.UndefinedError, match="rato"):
        tables.fill(template, CONTENT)


@pytest.mark.parametrize(
    "use", ['table("time", "{rato}")', 'column("rato")', "where(rato=1)"]
)
def test_a_column_that_the_json_lacks_is_an_error(use):
    with pytest.raises(KeyError, match="rato"):
        tables.fill(f"{{{{ [rows.c]|{use} }}}}", CONTENT)


def test_an_unknown_template_and_a_missing_json_are_named():
    with pytest.raises(ValueError, match=r"results: nothing --> has no {# nothing #}"):
        report.render("<!-- results: nothing -->\n<!-- end -->", {})
    with pytest.raises(
        ValueError, match=r"results: nothing.text --> needs nothing\.json"
    ):
        report.render(
            "<!-- results: nothing.text -->\n<!-- end -->", {"nothing.text": ""}
        )


def test_a_changed_figure_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(
        report, "find_templates", lambda: {"a.text": '{{ seconds|f("g") }} s'}
    )
    (tmp_path / "a.json").write_text(json.dumps(CONTENT))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- results: a.text -->\n1.24 s\n<!-- end -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["report", "--check"])
    with pytest.raises(SystemExit, match=r"out of date: README\.md"):
        report.main()
    assert "1.24 s" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["report"])
    report.main()
    assert (
        page.read_text()
        == "before\n<!-- results: a.text -->\n1.25 s\n<!-- end -->\nafter\n"
    )


def test_every_template_is_used_and_every_result_has_its_provenance():
    used = set(
        re.findall(
            r"<!-- results: ([\w.]+) -->",
            "".join(path.read_text() for path in report.pages()),
        )
    )
    assert used == set(report.find_templates())
    for path in report.RESULTS.glob("*.json"):
        assert {"device", "commit", "versions"} <= set(
            json.loads(path.read_text())["provenance"]
        ), path.name


def test_the_documentation_is_checked_without_jax():
    code = "import sys; from benchmarks import report; report.find_templates(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=report.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"jax", "numpy", "matplotlib", "sklearn", "torch"} & set(
        done.stdout.split()
    )
