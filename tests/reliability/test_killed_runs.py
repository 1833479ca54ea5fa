"""A run that is killed and resumed ends in the same bits, and goes on from no checkpoint that is damaged."""

import pytest

from benchmarks.reliability import killed_runs

STEPS = 16


@pytest.mark.nightly
def test_killed_twice_and_resumed_ends_in_the_same_bits(tmp_path):
    found = killed_runs.kill_and_resume(tmp_path, kills=2, steps=STEPS, longest=0.2)
    assert found["kills"] == 2
    assert found["runs_with_the_same_bits"] == found["runs"]


@pytest.mark.thorough
def test_a_damaged_checkpoint_never_gives_other_bits(tmp_path):
    killed_runs.finish(killed_runs.launch(tmp_path, STEPS))
    found = killed_runs.damage_and_resume(tmp_path, damages=12, steps=STEPS)
    assert sum(sum(outcomes.values()) for outcomes in found.values()) == 12
    for outcomes in found.values():
        assert outcomes["other bits"] == outcomes["crashed"] == 0
        assert outcomes["refused"] >= 1
