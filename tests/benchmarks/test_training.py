"""The trainings in emulated half precision: a run of two steps, and the rate that is reported."""

import math

import pytest

from benchmarks.common import measure
from benchmarks.training import half_precision


def test_the_best_rate_has_the_least_mean_over_the_seeds():
    losses = {4e-3: (2.0, 2.3), 2e-3: (2.1, 2.1), 8e-3: (1.9,)}
    runs = []
    for rate, values in losses.items():
        runs += [{"method": "a", "rate": rate, "held_out": loss} for loss in values]
    runs.append({"method": "b", "rate": 4e-3, "held_out": 1.0})
    assert half_precision.at_best_rate(runs, "a")["rate"] == 8e-3
    best = half_precision.at_best_rate(runs[:4], "a")
    assert best["rate"] == 2e-3
    assert (best["mean"], best["least"], best["most"]) == (2.1, 2.1, 2.1)


@pytest.mark.thorough
def test_each_run_is_written_and_none_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(half_precision, "STEPS", 2)
    monkeypatch.setattr(half_precision, "RATES", (8e-3,))
    monkeypatch.setattr(half_precision, "SEEDS", (0,))
    half_precision.main(["five steps, float16"])
    (run,) = measure.read("training_half_precision")["runs"]
    assert run["held_out"] < math.log(256)  # the loss of one who knows nothing
    assert run["update"] > 0
    monkeypatch.setattr(half_precision.Trainer, "run", None)
    half_precision.main(["five steps, float16"])
