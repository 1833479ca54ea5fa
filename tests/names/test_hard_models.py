"""Small models that were made to be hard for routing by names: each leaf is right, refused or warned about."""

import pathlib
import re
import warnings

import pytest

from muonjax._names.dimension_numbers import routes
from tests.zoo.reader import matches, params, read_zoo

TREES = read_zoo(pathlib.Path(__file__).parent / "trees")


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
    assert message is None or may_refuse
    texts = [str(warning.message) for warning in caught]
    rules = re.findall(r"\(r'([^']*)', ", " ".join(texts))
    warned = {path for path in right for rule in rules if re.search(rule, path)}
    assert warned == {path for path, answers in right.items() if "warn" in answers and message is None}
    wrong = [(r.path, r.shape, r.numbers, r.why) for r in found if not matches(r.numbers, right[r.path])]
    assert [leaf for leaf in wrong if leaf[0] not in warned] == []
    for text in (message, *texts):
        assert text is None or "program = muonjax.inspect(loss_fn, params, batch)" in text


def test_there_are_many():
    assert len(TREES) >= 150
