"""The run on a GPU: a dry run of all of its code."""

import json
import runpy
import sys

import pytest

from benchmarks.common import measure


def dry_run(folder, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["run", "--dry-run", "--out", str(folder), *flags])
    runpy.run_module("benchmarks.gpu.run", run_name="__main__")
    return json.loads((folder / "gpu_dry_run.json").read_text())["rows"]


def has_error(result):
    return "error" in result or any(
        isinstance(part, dict) and has_error(part) for part in result.values()
    )


@pytest.mark.thorough
def test_the_dry_run(tmp_path, monkeypatch):
    rows = dry_run(tmp_path, monkeypatch)
    sections = ["step", "queue", "stacks", "accuracy", "hostile", "compile"]
    assert [row["section"] for row in rows] == sections
    assert not [row for row in rows if has_error(row["result"])]


def test_a_row_takes_the_place_of_an_earlier_one_and_others_stay(tmp_path, monkeypatch):
    other = {"section": "step", "what": "small", "result": {}, "commit": "c"}
    earlier = {"section": "hostile", "what": [24, 24], "result": {}, "commit": "c"}
    measure.write("gpu_dry_run", {"rows": [earlier, other]}, folder=tmp_path)
    new, kept = dry_run(tmp_path, monkeypatch, "--sections", "hostile")
    assert kept == other
    assert new["result"]["count"] > 0
