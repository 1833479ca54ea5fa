"""What each tier runs: single cases that only `.ci/run` adds, and how many examples hypothesis draws.

The markers are in pyproject.toml. `pytest -n auto` is the quick tier, `.ci/run` adds the thorough one, and
`pytest --hypothesis-profile=nightly tests/reliability` draws 20,000 examples.
"""

import pytest
from hypothesis import HealthCheck, settings

# Of all tests in tests/reliability together. Derandomized, so that every run but the nightly one draws the same.
EXAMPLES = {"quick": 60, "thorough": 300, "nightly": 20_000}


def thorough(*case, id=None):
    """One entry of `pytest.mark.parametrize`: the values of a case, which `.ci/run` adds to the quick ones."""
    return pytest.param(*case, marks=pytest.mark.thorough, id=id)


def register_profiles():
    for tier, number in EXAMPLES.items():
        settings.register_profile(
            tier,
            max_examples=number,
            derandomize=tier != "nightly",
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )


def tier():
    return settings.get_current_profile_name()


def examples(percent):
    """`percent` of the tier's examples, at least two."""
    profile = settings.get_profile(tier())
    return settings(profile, max_examples=max(2, profile.max_examples * percent // 100))
