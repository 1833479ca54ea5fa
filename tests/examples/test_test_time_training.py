"""Run the test-time-training example at a tiny size."""

import json
import re

import jax
import pytest

from tests.examples.programs import refusal, run

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
def test_it_trains_and_draws(tmp_path, caplog):
    with jax.log_compiles():
        run("test_time_training.py", *TINY, "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [trained["memory"] for trained in results["runs"]] == ["msign", "linear"]
    assert len({trained["parameters"] for trained in results["runs"]}) == 1
    for trained in results["runs"]:
        assert len(trained["losses"]) == 3
        assert all(
            0 < loss < 100 for loss in [*trained["losses"], trained["fresh_loss"]]
        )
    assert (tmp_path / "test_time_training.png").read_bytes().startswith(b"\x89PNG")
    # Once for each memory, however many steps it trains.
    compilations = re.findall(r"Finished XLA compilation of jit\(_step\)", caplog.text)
    assert len(compilations) == 2


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
