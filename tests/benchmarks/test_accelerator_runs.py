"""The runs on a GPU and on a TPU: dry runs of all of their code."""

import json
import subprocess
import sys

import pytest


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_dry_run(platform, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{platform}.run", "--dry-run", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / f"{platform}_dry_run.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"check", "product", "step"}
    assert not [row for row in rows if "error" in row["result"]]
    assert all(row["result"]["ok"] for row in rows if row["section"] == "check")
