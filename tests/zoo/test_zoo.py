"""Every leaf of the public models in the zoo is decided rightly, or refused with a rule that decides it."""

import re

import pytest
from optax.contrib import MuonDimensionNumbers

from muonjax._routing.dimension_numbers import FusedDimensionNumbers, Route, dimension_numbers, routes
from muonjax._routing.rules import check_rule
from tests.zoo.reader import matches, params, read_zoo

ZOO = read_zoo()
REFUSED = {name for name, leaves in ZOO.items() if any(leaf.right == ("refuse",) for leaf in leaves)}


def suggested_rules(message):
    """The rules of an error's text, as a person pastes them."""
    text = re.search(r"rules=(\[\(r'.*?\)\])(?= )", message)[1]
    names = {"MuonDimensionNumbers": MuonDimensionNumbers, "FusedDimensionNumbers": FusedDimensionNumbers}
    return eval(text, names)


def wrong(name, rules=()):
    """Leaves whose answer is none of the right ones; those that have to be refused aside."""
    right = {leaf.path: leaf.right for leaf in ZOO[name]}
    found = [route for route in routes(params(ZOO[name]), rules=rules)[0] if isinstance(route, Route)]
    return [
        (route.path, route.shape, route.numbers, route.why)
        for route in found
        if right[route.path] != ("refuse",) and not matches(route.numbers, right[route.path])
    ]


@pytest.mark.parametrize("name", sorted(set(ZOO) - REFUSED))
def test_each_leaf_is_right(name):
    assert wrong(name) == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_leaves_have_a_rule_that_works(name):
    """Pasting the rules of the errors, one after the other, decides the tree, and all other leaves rightly."""
    rules = []
    for _ in range(3):
        try:
            dimension_numbers(params(ZOO[name]), rules=rules)
            break
        except ValueError as error:
            rules += suggested_rules(str(error))
    assert rules
    assert wrong(name, rules) == []


def test_the_zoo_is_large_and_few_trees_are_refused():
    assert len(ZOO) >= 150
    assert len(REFUSED) <= 0.02 * len(ZOO)


def test_dimension_numbers_fit_the_leaves():
    """Each answer, ours and the zoo's, is a view of its leaf."""
    for leaves in ZOO.values():
        for leaf in leaves:
            for answer in leaf.right:
                if answer not in (None, "refuse"):
                    check_rule(leaf.path, leaf.shape, leaf.dtype, answer)
