"""Every leaf of public models, and of small ones made to be hard, is right, refused with a rule, or warned about."""

import functools
import pathlib
import re
import warnings

import jax
import pytest
from optax.contrib import MuonDimensionNumbers

from muonjax._matrices.matrix_view import FusedDimensionNumbers, matrix_pieces
from muonjax._names.dimension_numbers import routes
from tests.zoo.reader import matches, params, read_zoo

ZOO = read_zoo()
HARD = read_zoo(pathlib.Path(__file__).parents[1] / "names" / "trees")


def suggested_rules(message):
    """The rules of a message, as a person pastes them."""
    text = re.search(r"rules=(\[\(r'.*?\)\])(?= |\)\. )", message)[1]
    names = {"MuonDimensionNumbers": MuonDimensionNumbers, "FusedDimensionNumbers": FusedDimensionNumbers}
    return eval(text, names)


def answers(leaves, rules=()):
    """The routes of a tree, what its warning names, and all messages; no routes where the tree is refused."""
    found, messages = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, _ = routes(params(leaves), rules=rules)
        except ValueError as error:
            messages = [str(error)]
    texts = [str(warning.message) for warning in caught]
    patterns = [pattern for text in texts if "rules=[" in text for pattern, _ in suggested_rules(text)]
    warned = {leaf.path for leaf in leaves for pattern in patterns if re.search(pattern, leaf.path)}
    return found, warned, messages + texts


@functools.cache
def rules_for(name):
    """The rules that the errors of a tree suggest, pasted one after the other; none where nothing is refused."""
    rules = []
    for _ in range(4):
        found, _, messages = answers(ZOO[name], rules)
        if found:
            return tuple(rules)
        rules += suggested_rules(messages[0])
    raise AssertionError(f"the rules that the errors suggest do not decide {name}: {rules}")


@pytest.mark.parametrize("name", [*sorted(ZOO), *sorted(HARD)])
def test_each_leaf_is_right(name):
    """What goes to Adam with a warning is marked, and so is what may be refused in a hard tree; public models that are
    refused are decided by the rules of the error."""
    leaves = (ZOO | HARD)[name]
    right = {leaf.path: leaf.right for leaf in leaves}
    found, warned, messages = answers(leaves, rules_for(name) if name in ZOO else ())
    assert found or any("refuse" in answer for answer in right.values())
    found = [r for r in found if r.why != "rule"]
    assert warned == {r.path for r in found if "warn" in right[r.path]}
    wrong = [r for r in found if not matches(r.numbers, (None,) if r.path in warned else right[r.path])]
    assert [(r.path, r.shape, r.numbers, r.why) for r in wrong] == []
    for text in messages:
        assert "rules=[" not in text or "program = muonjax.inspect(loss_fn, params, batch)" in text


def test_the_zoo_is_large_and_few_of_its_trees_are_refused_and_few_of_its_matrices_go_to_adam():
    refused = [name for name in ZOO if rules_for(name)]
    assert len(ZOO) >= 391
    assert len(HARD) >= 296
    assert len(refused) <= 0.09 * len(ZOO), refused
    has_to_be = [name for name, leaves in ZOO.items() if any(leaf.right == ("refuse",) for leaf in leaves)]
    assert set(has_to_be) <= set(refused)
    matrices = [leaf for leaves in ZOO.values() for leaf in leaves if {None, "refuse"}.isdisjoint(leaf.right)]
    assert sum("warn" in leaf.right for leaf in matrices) <= 0.015 * len(matrices)


def test_dimension_numbers_fit_the_leaves():
    """Each answer, ours and the zoo's, is a view of its leaf."""
    for leaves in ZOO.values():
        for leaf in leaves:
            for answer in leaf.right:
                if answer not in (None, "refuse", "warn"):
                    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                    assert matrix_pieces({leaf.path: answer}, {leaf.path: shape}, call="zoo")
