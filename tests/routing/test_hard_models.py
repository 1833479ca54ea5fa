"""Small models that were made to be hard for routing by names: each leaf is right, or refused where it may be."""

import pathlib
import warnings

import pytest

from muonjax._routing.dimension_numbers import routes
from tests.zoo.reader import matches, params, read_zoo

TREES = read_zoo(pathlib.Path(__file__).parent / "trees")
CHANCES = {  # nothing but sizes speaks for a head
    "tied embedding, feed-forward of the vocabulary's width at the root",
    "tied embedding, unnamed feed-forward of the vocabulary's width at the root",
    "TransE with a projection",
}


@pytest.mark.parametrize("name", sorted(TREES))
def test_each_leaf_is_right(name):
    right = {leaf.path: leaf.right for leaf in TREES[name]}
    may_refuse = any("refuse" in answers for answers in right.values())
    message = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, _ = routes(params(TREES[name]))
        except ValueError as error:
            found, message = [], str(error)
    wrong = [(r.path, r.shape, r.numbers, r.why) for r in found if not matches(r.numbers, right[r.path])]
    assert wrong == []
    assert message is None or may_refuse
    assert bool(caught) == (name in CHANCES)
    for text in (message, *(str(warning.message) for warning in caught)):
        assert text is None or "program = muonjax.inspect(loss_fn, params, batch)" in text


def test_there_are_many():
    assert len(TREES) >= 90
