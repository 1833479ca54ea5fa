"""Thousands of steps: weights stay where weight decay and RMS matching hold them, logits below the clip, all finite."""

import numpy as np
import pytest

from benchmarks.reliability import long_runs
from tests.tools.tiers import nightly, thorough

PRECISIONS = ("float32", "bfloat16 momentum", "bfloat16")
# How close to their fixed points weights end that round to float32. A constant gradient: W = -(rms / weight_decay)
# sqrt(max(m, n)) U V^H, which no step moves. Random ones: independent directions add in squares, so that
# RMS = rms sqrt(rate / (weight_decay (2 - rate weight_decay))).
END = {("constant", "float32"): 0.01, ("constant", "bfloat16 momentum"): 0.01, ("random", "float32"): 0.05}


# Weights forget with each 1 / (rate · weight_decay) = 500 steps.
@pytest.mark.parametrize(
    ("gradients", "precision", "steps"),
    [
        ("adversarial", "float32", 4_000),
        *(thorough("adversarial", precision, 4_000) for precision in PRECISIONS[1:]),
        *(thorough("constant", precision, 4_000) for precision in PRECISIONS),
        thorough("random", "float32", 4_000),
        thorough("random", "bfloat16", 4_000),  # as "bfloat16 momentum", which has no momentum here to round
        *(nightly(*case, 20_000) for case in END),
    ],
)
def test_weights_never_pass_the_analytic_bound_and_end_at_their_fixed_point(gradients, precision, steps):
    row = long_runs.weight_norms(gradients, precision, steps=steps)
    assert row["finite"]
    assert row["largest_rms"] <= row["bound"]
    if (gradients, precision) in END:
        np.testing.assert_allclose(row["final_rms"], row["fixed_point"], rtol=END[gradients, precision])


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float32", thorough("bfloat16")])
def test_the_clip_bounds_logits_that_gradients_only_raise(precision):
    clipped, free = (long_runs.logits(clip, precision, steps=4_000) for clip in (True, False))
    assert clipped["finite"]
    assert clipped["largest_logit"] <= clipped["bound"]
    assert free["largest_logit"] > 3 * clipped["bound"]
