"""Every leaf of public models, and of small ones made to be hard, is right, or goes to Adam with a warning."""

import pathlib
import warnings

import pytest

from muonjax._names.routes import routes
from tests.names.test_routes import suggested_rules
from tests.zoo.reader import matches, params, read_zoo

ZOO = read_zoo()
HARD = read_zoo(pathlib.Path(__file__).parents[1] / "names" / "trees")


@pytest.mark.parametrize("name", [*sorted(ZOO), *sorted(HARD)])
def test_each_leaf_is_right(name):
    """What goes to Adam with a warning is marked; the rule that the warning shows is for one of these leaves."""
    leaves = (ZOO | HARD)[name]
    right = {leaf.path: leaf.right for leaf in leaves}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = routes(params(leaves))
    wrong = {
        path: answer
        for path, answer in found.items()
        if not matches(answer.numbers, (None,) if answer.is_open else right[path])
    }
    assert wrong == {}
    is_open = {path for path, answer in found.items() if answer.is_open}
    assert is_open == {path for path in found if "warn" in right[path]}
    texts = [
        text for warning in caught if "can't tell" in (text := str(warning.message))
    ]
    assert len(texts) == bool(is_open)
    for text in texts:
        assert "program = muonjax.inspect(loss_fn, params, batch)" in text
        ruled = routes(params(leaves), rules=suggested_rules(text))
        (path,) = (path for path, answer in ruled.items() if answer.why == "rule")
        assert path in is_open


def test_the_zoo_is_large_and_few_of_its_matrices_are_open():
    assert len(ZOO) >= 391
    assert len(HARD) >= 296
    matrices = [
        leaf for leaves in ZOO.values() for leaf in leaves if None not in leaf.right
    ]
    assert sum("warn" in leaf.right for leaf in matrices) <= 0.042 * len(matrices)
