"""Run the test-time-training example at a tiny size."""

import json
import re

import jax
import pytest

from tests.examples.programs import refusal, run
from tests.tools.tiers import nightly

TINY = [
    "--steps",
    "3",
    "--pairs",
    "4",
    "--chunk",
    "2",
    "--batch",
    "2",
    "--width",
    "8",
    "--heads",
    "2",
]


@pytest.mark.thorough
@pytest.mark.parametrize("gradient", ["polynomial", nightly("polar")])
def test_it_trains_measures_and_draws(tmp_path, gradient, caplog):
    flags = ["--timing-rounds", "1", "--gradient", gradient, "--out", tmp_path]
    with jax.log_compiles():
        run("test_time_training.py", *TINY, *flags)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [trained["memory"] for trained in results["runs"]] == ["msign", "linear"]
    assert len({trained["parameters"] for trained in results["runs"]}) == 1
    for trained in results["runs"]:
        assert len(trained["losses"]) == 3
        assert all(
            0 < loss < 100 for loss in [*trained["losses"], trained["fresh_loss"]]
        )
    assert {row["gradient"] for row in results["gradients"]} == {
        "polynomial",
        "polar",
        "autodiff",
    }
    assert (tmp_path / "test_time_training.png").read_bytes().startswith(b"\x89PNG")
    # Once for each memory, however many steps it trains, and once for each derivative's cost.
    assert (
        len(re.findall(r"Finished XLA compilation of jit\(_step\)", caplog.text))
        == 2 + 3
    )


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--width", 9, "multiple of --heads"),
        ("--pairs", 5, "multiple of --chunk"),
        ("--steps", 0, "at least 1"),
    ],
)
def test_bad_flags(tmp_path, flag, value, message):
    assert message in refusal(
        "test_time_training", *TINY, flag, value, "--out", tmp_path
    )
