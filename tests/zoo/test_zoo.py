"""Every leaf of the public models in the zoo is decided rightly, or refused with a rule that decides it."""

import functools
import re

import jax
import pytest
from optax.contrib import MuonDimensionNumbers

from muonjax._matrices.matrix_view import FusedDimensionNumbers, matrix_pieces
from muonjax._names.dimension_numbers import Route, dimension_numbers, routes
from tests.zoo.reader import matches, params, read_zoo

ZOO = read_zoo()


def suggested_rules(message):
    """The rules of an error's text, as a person pastes them."""
    text = re.search(r"rules=(\[\(r'.*?\)\])(?= )", message)[1]
    names = {"MuonDimensionNumbers": MuonDimensionNumbers, "FusedDimensionNumbers": FusedDimensionNumbers}
    return eval(text, names)


def wrong(name, rules=()):
    """Leaves whose answer is none of the right ones; those that a rule decides aside."""
    right = {leaf.path: leaf.right for leaf in ZOO[name]}
    found = [route for route in routes(params(ZOO[name]), rules=rules)[0] if isinstance(route, Route)]
    return [
        (route.path, route.shape, route.numbers, route.why)
        for route in found
        if route.why != "rule" and not matches(route.numbers, right[route.path])
    ]


@functools.cache
def rules_for(name):
    """The rules that the errors of a tree suggest, pasted one after the other; none where nothing is refused."""
    rules = []
    for _ in range(4):
        try:
            dimension_numbers(params(ZOO[name]), rules=rules)
            return tuple(rules)
        except ValueError as error:
            rules += suggested_rules(str(error))
    raise AssertionError(f"the rules that the errors suggest do not decide {name}: {rules}")


@pytest.mark.parametrize("name", sorted(ZOO))
def test_each_leaf_is_right(name):
    """What is not refused is right, and what is refused is decided by the rules of the error."""
    assert wrong(name, rules_for(name)) == []


def test_the_zoo_is_large_and_few_trees_are_refused():
    refused = [name for name in ZOO if rules_for(name)]
    assert len(ZOO) >= 391
    assert len(refused) <= 0.09 * len(ZOO), refused
    has_to_be = [name for name, leaves in ZOO.items() if any(leaf.right == ("refuse",) for leaf in leaves)]
    assert set(has_to_be) <= set(refused)


def test_dimension_numbers_fit_the_leaves():
    """Each answer, ours and the zoo's, is a view of its leaf."""
    for leaves in ZOO.values():
        for leaf in leaves:
            for answer in leaf.right:
                if answer not in (None, "refuse", "warn"):
                    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                    assert matrix_pieces({leaf.path: answer}, {leaf.path: shape}, call="zoo")
