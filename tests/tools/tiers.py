"""What each tier runs: cases that only `.ci/run` adds, and how many examples hypothesis draws.

The markers are in pyproject.toml. `pytest -n auto` is the quick tier, `.ci/run` adds the thorough one, and
`pytest --hypothesis-profile=nightly tests/reliability` draws 20,000 examples.
"""

import itertools

import pytest
from hypothesis import HealthCheck, settings

# Examples that the tests in tests/reliability share by percent. Every run but the nightly one draws the same.
EXAMPLES = {"quick": 60, "thorough": 300, "nightly": 20_000}


def thorough(*case, id=None):
    """One entry of `pytest.mark.parametrize`: the values of a case, which `.ci/run` adds to the quick ones."""
    return pytest.param(*case, marks=pytest.mark.thorough, id=id)


def nightly(*case, id=None):
    """One entry of `pytest.mark.parametrize`, of the nightly tests only."""
    return pytest.param(*case, marks=pytest.mark.nightly, id=id)


def quick(*ids, others="thorough"):
    """Mark the cases of a parametrized test that are quick, by their ids; `others` is the marker of the rest."""
    return pytest.mark.quick(*ids, others=others)


# With several `parametrize`, the thorough cases are those that bring two values together for the first time;
# what only adds a third to two that have met runs at night.
every_pair = pytest.mark.every_pair


def mark_others(items):
    """Give their marker to the cases that `quick` does not name, and the night what `every_pair` leaves out."""
    mark_not_quick(items)
    crossed = [item for item in items if item.get_closest_marker("every_pair")]
    for _, cases in itertools.groupby(
        crossed, lambda item: item.nodeid.partition("[")[0]
    ):
        leave_pairs_that_met(list(cases))


def leave_pairs_that_met(cases):
    def pairs(case):
        values = [(name, repr(value)) for name, value in case.callspec.params.items()]
        return set(itertools.combinations(values, 2))

    left = [case for case in cases if case.get_closest_marker("thorough")]
    met = set().union(
        *(pairs(case) for case in cases if not case.get_closest_marker("thorough"))
    )
    while (
        left
        and not pairs(case := max(left, key=lambda case: len(pairs(case) - met))) <= met
    ):
        met |= pairs(case)
        left.remove(case)
    for case in left:
        case.add_marker("nightly")


def mark_not_quick(items):
    named = {}
    met = {}
    for item in items:
        marker = item.get_closest_marker("quick")
        if marker is not None:
            test = item.nodeid.partition("[")[0]
            named.setdefault(test, set(marker.args))
            met.setdefault(test, set()).add(item.callspec.id)
            if item.callspec.id not in marker.args:
                item.add_marker(marker.kwargs["others"])
    for test, ids in met.items():
        if len(ids) > len(named[test]) and not ids & named[test]:
            raise pytest.UsageError(
                f"{test}: quick{tuple(named[test])} names none of {sorted(ids)}."
            )


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
