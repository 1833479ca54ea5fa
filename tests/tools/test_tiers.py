"""Which cases of a test that crosses several values are thorough, and which nightly."""

import itertools
from types import SimpleNamespace

from tests.tools import tiers


def case(markers, **params):
    """As pytest collects it: each argument's value, and the names of its markers."""
    return SimpleNamespace(
        nodeid=f"test_it[{params}]",
        callspec=SimpleNamespace(params=params),
        markers=markers,
        get_closest_marker=lambda name: name if name in markers else None,
        add_marker=markers.append,
    )


def test_every_pair_of_values_meets_by_day_and_all_others_by_night():
    sizes = {"preset": 3, "shape": 4, "dtype": 2}
    cases = [
        case(["every_pair", "thorough"], **dict(zip(sizes, values, strict=True)))
        for values in itertools.product(*map(range, sizes.values()))
    ]
    cases[5].markers.remove("thorough")  # quick
    tiers.mark_others([*cases, other := case(["thorough"])])

    def met(cases):
        return {
            two
            for c in cases
            for two in itertools.combinations(c.callspec.params.items(), 2)
        }

    by_day = [c for c in cases if "nightly" not in c.markers]
    assert met(by_day) == met(cases)
    assert cases[5] in by_day
    assert len(by_day) <= 14  # of 24; 12 are the fewest
    assert other.markers == ["thorough"]
