"""The runs on a GPU and on a TPU: a dry run of all of their code, which they share."""

import json
import runpy
import sys

import pytest

from tests.tools.tiers import nightly


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["gpu", nightly("tpu")])
def test_the_dry_run(platform, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", "--dry-run", "--out", str(tmp_path)])
    runpy.run_module(f"benchmarks.{platform}.run", run_name="__main__")
    rows = json.loads((tmp_path / f"{platform}_dry_run.json").read_text())["rows"]
    sections = {
        "step",
        "queue",
        "stacks",
        "accuracy",
        "hostile",
        "shapes",
        "product",
    }
    if platform == "gpu":
        sections.add("compile")
    assert {row["section"] for row in rows} == sections
    for result in (row["result"] for row in rows):
        assert not [
            found
            for found in (result, *result.values())
            if isinstance(found, dict) and "error" in found
        ]
