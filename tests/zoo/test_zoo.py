"""Every leaf of public models, and of small ones made to be hard, is right, or goes to Adam with a warning."""

import pathlib
import re
import warnings

import pytest

from muonjax._names.routes import routes
from tests.zoo.reader import matches, params, read_zoo

ZOO = read_zoo()
HARD = read_zoo(pathlib.Path(__file__).parents[1] / "names" / "trees")


def suggested_rules(message):
    """The rules of a warning, as a person pastes them."""
    return eval(re.search(r"rules=(\[.*?\])\)", message)[1])


@pytest.mark.parametrize("name", [*sorted(ZOO), *sorted(HARD)])
def test_each_leaf_is_right(name):
    """What goes to Adam with a warning is marked; the warning's rules name it and nothing else."""
    leaves = (ZOO | HARD)[name]
    right = {leaf.path: leaf.right for leaf in leaves}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _ = routes(params(leaves))
    wrong = [
        r
        for r in found
        if not matches(r.numbers, (None,) if r.is_open else right[r.path])
    ]
    assert [(r.path, r.shape, r.numbers, r.why) for r in wrong] == []
    is_open = {r.path for r in found if r.is_open}
    assert is_open == {r.path for r in found if "warn" in right[r.path]}
    texts = [
        text for warning in caught if "can't tell" in (text := str(warning.message))
    ]
    assert len(texts) == bool(is_open)
    for text in texts:
        assert "program = muonjax.inspect(loss_fn, params, batch)" in text
        ruled, _ = routes(params(leaves), rules=suggested_rules(text))
        assert is_open == {r.path for r in ruled if r.why == "rule"}


def test_the_zoo_is_large_and_few_of_its_matrices_are_open():
    assert len(ZOO) >= 391
    assert len(HARD) >= 296
    matrices = [
        leaf for leaves in ZOO.values() for leaf in leaves if None not in leaf.right
    ]
    assert sum("warn" in leaf.right for leaf in matrices) <= 0.042 * len(matrices)
