"""Result blocks: they render what the JSON says, name what is wrong, and load nothing heavy."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import report
from benchmarks.common.blocks import Block

PROVENANCE = {"device": "CPU, 2 cores", "versions": {"python": "3.11", "jax": "0.10.2", "optax": "0.2.8"}}
CONTENT = {
    "provenance": PROVENANCE,
    "seconds": 1.25,
    "rows": {
        "a, b": {"ratio": 0.5, "ratio_low": 0.25, "ratio_high": 0.75, "shape": [8, 16], "key.1": {"1": 2}},
        "c": {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "shape": [4], "key.1": {"1": None}},
    },
}


def test_a_table_and_its_sentence():
    block = Block(
        columns={
            "": "{name}",
            "size": "{shape}",
            "time": "{row:quartiles}",
            "dots": "{key.1[1]}",
            "large": lambda row: row["ratio"] > 0.7,
        },
        text="{table}\n\nIn units of {seconds:.1f} s, {count} rows. {machine}",
        values=lambda content: {"count": len(content["rows"])},
    )
    assert block.render(CONTENT).splitlines() == [
        "|  | size | time | dots | large |",
        "| --- | --- | --- | --- | --- |",
        "| a, b | 8 × 16 | 0.50 (0.25 to 0.75) | 2 | no |",
        "| c | 4 | 1.00 (1.00 to 1.00) |  | yes |",
        "",
        "In units of 1.2 s, 2 rows. CPU, 2 cores; jax 0.10.2, optax 0.2.8.",
    ]


def test_a_key_that_the_json_lacks_is_an_error():
    with pytest.raises(KeyError, match="second"):
        Block(text="{second}").render(CONTENT)
    with pytest.raises(KeyError, match="rato"):
        Block(columns={"time": "{rato}"}).render(CONTENT)


def test_an_unknown_block_and_a_missing_json_are_named():
    with pytest.raises(ValueError, match=r"results: nothing --> has no entry in BLOCKS"):
        report.render("<!-- results: nothing -->\n<!-- end -->", {})
    with pytest.raises(ValueError, match=r"results: nothing.text --> needs nothing\.json"):
        report.render("<!-- results: nothing.text -->\n<!-- end -->", {"nothing.text": Block(text="")})


def test_a_changed_figure_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "find_blocks", lambda: {"a.text": Block(text="{seconds:g} s")})
    (tmp_path / "a.json").write_text(json.dumps(CONTENT))
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- results: a.text -->\n1.24 s\n<!-- end -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["report", "--check"])
    with pytest.raises(SystemExit, match=r"out of date: README\.md"):
        report.main()
    assert "1.24 s" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["report"])
    report.main()
    assert page.read_text() == "before\n<!-- results: a.text -->\n1.25 s\n<!-- end -->\nafter\n"


def test_every_block_is_used_and_every_result_has_its_provenance():
    used = set(
        re.findall(r"<!-- results: ([\w.]+) -->", "".join(path.read_text() for path in report.pages()))
    )
    assert used == set(report.find_blocks())
    for path in report.RESULTS.glob("*.json"):
        assert {"device", "commit", "versions"} <= set(json.loads(path.read_text())["provenance"]), path.name


def test_the_documentation_is_checked_without_jax():
    code = "import sys; from benchmarks import report; report.find_blocks(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=report.ROOT, capture_output=True, text=True, check=True
    )
    assert not {"jax", "numpy", "matplotlib", "sklearn", "torch"} & set(done.stdout.split())
