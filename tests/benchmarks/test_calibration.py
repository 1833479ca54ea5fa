"""The roofline against public measurements: 130 rows, few constants, and none of them moved by hand."""

import dataclasses
import json
import math

import pytest

from benchmarks.common import measure, roofline
from benchmarks.gpu import calibration

SUMMARIES = json.loads((measure.RESULTS / "calibration.json").read_text())["summaries"]


@pytest.mark.parametrize(("chip", "most"), [("H100", 0.10), ("B200", 0.12)])
def test_the_model_is_as_near_to_public_times_as_it_says(chip, most):
    rows = calibration.greyhound(chip)
    assert len(rows) == 65
    (said,) = (row for row in SUMMARIES if row["name"] == f"{chip}, PyTorch")
    found = calibration.rms(roofline.ROOFLINES[chip].pessimistic, rows)
    assert found == pytest.approx(said["rms"], abs=1e-4)
    assert found <= said["predicted_rms"] <= most


@pytest.mark.parametrize("name", ["round", "efficiency"])
def test_the_constants_are_the_best_ones(name):
    model = roofline.ROOFLINES["H100"].pessimistic
    rows = calibration.greyhound("H100")
    for factor in (0.95, 1.05):
        value = getattr(model, name)
        moved = {kind: x * factor for kind, x in value.items()} if name == "efficiency" else value * factor
        assert calibration.rms(dataclasses.replace(model, **{name: moved}), rows) > calibration.rms(
            model, rows
        )


def test_a_fit_finds_the_constants_that_made_the_times():
    truth = {"efficiency": 0.6, "round": 4e-6, "gap": 2e-6}
    model = roofline.gpu("B200", launch=6e-6, factorization=1e-4, **truth)
    rows = [row._replace(milliseconds=row.modelled(model)) for row in calibration.greyhound("B200")]
    found = calibration.fit("B200", rows)
    for name, value in truth.items():
        assert found[name] == pytest.approx(value, rel=0.02)


def test_the_ends_are_in_order():
    rows = calibration.marin("products") + calibration.greyhound("H100")
    for row in rows:
        optimistic, pessimistic = map(row.modelled, roofline.ROOFLINES["H100"])
        assert optimistic <= pessimistic * 1.01
    # Marin's products are the optimistic end, PyTorch's the other: each would call the other end wrong by a quarter.
    assert calibration.rms(roofline.ROOFLINES["H100"].pessimistic, calibration.marin("products")) > math.log(
        1.25
    )
