"""Thousands of steps: weights stay where weight decay and RMS matching hold them, logits below the clip, all finite."""

import numpy as np
import pytest

from benchmarks.reliability import long_runs
from tests.tools.tiers import nightly, thorough

# Weights forget with each 1 / (rate · weight_decay) = 500 steps. 4,000 of a kind are run once for all tests.
STEPS = [4_000, nightly(20_000)]


@pytest.mark.parametrize("precision", ["float32", *map(thorough, ["bfloat16 momentum", "bfloat16"])])
@pytest.mark.parametrize("gradients", ["adversarial", *map(thorough, ["constant", "random"])])
def test_weights_never_pass_the_analytic_bound(precision, gradients):
    row = long_runs.weight_norms(gradients, precision, steps=4_000)
    assert row["finite"]
    assert row["largest_rms"] <= row["bound"]


@pytest.mark.thorough
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16 momentum"])
def test_a_constant_gradient_ends_at_the_fixed_point(precision, steps):
    """W = -(rms / weight_decay) sqrt(max(m, n)) U V^H: no step moves it any more."""
    row = long_runs.weight_norms("constant", precision, steps=steps)
    np.testing.assert_allclose(row["final_rms"], row["fixed_point"], rtol=0.01)
    assert row["largest_rms"] <= row["bound"]


@pytest.mark.thorough
@pytest.mark.parametrize("steps", STEPS)
def test_random_gradients_end_at_their_fixed_point(steps):
    """Independent directions add in squares: RMS = rms sqrt(rate / (weight_decay (2 - rate weight_decay)))."""
    row = long_runs.weight_norms("random", "float32", steps=steps)
    np.testing.assert_allclose(row["final_rms"], row["fixed_point"], rtol=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float32", thorough("bfloat16")])
def test_the_clip_bounds_logits_that_gradients_only_raise(precision):
    clipped, free = (long_runs.logits(clip, precision, steps=4_000) for clip in (True, False))
    assert clipped["finite"]
    assert clipped["largest_logit"] <= clipped["bound"]
    assert free["largest_logit"] > 3 * clipped["bound"]
