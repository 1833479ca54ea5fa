"""Execute the notebook's code cells in order, as a notebook does, with a few training steps."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "from_adamw_to_muonclip.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def program():
    """The code cells as one program, without the notebook's commands such as `%pip`, which have to come alone."""
    sources = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    commands = [source for source in sources if source.startswith(("%", "!"))]
    assert commands == ["%pip install -q muonjax matplotlib"]
    return "\n\n".join(source for source in sources if source not in commands)


def test_is_stored_without_outputs():
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    compile(program(), NOTEBOOK.name, "exec")


@pytest.mark.thorough
def test_runs():
    environment = os.environ | {"STEPS": "4", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-c", program()], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "blocks/0/attention/query/kernel" in done.stdout
    for name in ("AdamW", "Muon", "MuonClip"):
        assert f"{name}: loss" in done.stdout
