"""Execute the notebook's code cells in order, as a notebook does, with a few training steps."""

import contextlib
import io
import json
import pathlib
import re

import matplotlib
import pytest

NOTEBOOK = (
    pathlib.Path(__file__).parents[2] / "examples" / "from_adamw_to_muonclip.ipynb"
)
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def program():
    """The code cells as one program, without the notebook's commands such as `%pip`, which have to come alone."""
    sources = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    commands = [source for source in sources if source.startswith(("%", "!"))]
    assert commands == ["%pip install -q -e .. matplotlib"]
    return "\n\n".join(source for source in sources if source not in commands)


def test_is_stored_with_what_it_prints_and_draws():
    outputs = [output for cell in CELLS for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    losses = [
        float(loss)
        for loss in re.findall(r"^\w+: loss ([\d.]+)", printed, flags=re.MULTILINE)
    ]
    assert len(set(losses)) == 4  # a curve for each run, and they differ
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    compile(program(), NOTEBOOK.name, "exec")


@pytest.mark.thorough
def test_runs(monkeypatch):
    monkeypatch.setenv("STEPS", "4")
    matplotlib.use("Agg")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program(), NOTEBOOK.name, "exec"), {"__name__": "__main__"})
    assert "blocks/0/down/kernel" in printed.getvalue()
    for name in ("AdamW", "Muon", "Muon_fast", "MuonClip"):
        assert f"{name}: loss" in printed.getvalue()
