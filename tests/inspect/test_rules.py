"""Taking any one rule away only refuses or warns: what has no rule is never taken for something that it may not be."""

import functools
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from muonjax._inspect import (
    entrywise_rules,
    follow,  # noqa: F401  it fills RULES
    follow_logits,
)
from muonjax._inspect.rules import RULES
from tests.inspect.library_models import MODELS
from tests.inspect.library_models.answers import found_attention
from tests.inspect.test_library_models import inspected as inspected_model
from tests.inspect.test_programs import PROGRAMS, drawn, inspected
from tests.tools import tiers

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
]


def once_traced(inspect):
    """A call that traces its function the first time, and then reads the same jaxpr again."""
    make = jax.make_jaxpr
    kept = []

    def tracing(fun, return_shape=False):
        def traced(*arguments):
            if not kept:
                kept.append(make(fun, return_shape=True)(*arguments))
            return kept[0]

        return traced if return_shape else make(fun)

    def read():
        with mock.patch.object(jax, "make_jaxpr", tracing):
            return inspect()

    return read


def said(read, params):
    """What is decided of each leaf, None where it is left open; what each clip scales; how many can't be clipped; and
    the program."""
    try:
        program = read()
    except ValueError:  # nothing is left that uses the parameters
        return {}, [], 0, None
    leaves = {
        path: None if d.by_names else (d.numbers, d.per_head if d.numbers else None)
        for path, d in program._decisions.items()
    }
    clips = [
        found_attention(params, a) for a in program.attentions if a.site is not None
    ]
    heads = [{key: grid.tolist() for key, grid in clip.items()} for clip in clips]
    return leaves, heads, len(program.attentions) - len(clips), program


def said_by_rules(read, params):
    """What is said of a program, and the rules that say it: without any other one it is read in the same way."""
    names = set()

    def noted(name, rule):
        def apply(records, node):
            names.add(name)
            return rule(records, node)

        return apply

    with mock.patch.dict(RULES, {name: noted(name, RULES[name]) for name in RULES}):
        return said(read, params), names


@functools.cache
def answers(names):
    """By name, how to read a program or model again, its parameters, what is said of it, and by which rules."""
    made = {
        p.fun.__name__: (functools.partial(inspected, p), p.params, p.args)
        for p in PROGRAMS
    }
    if names == "models":
        models = {
            name: entry.make()
            for name, entry in MODELS.items()
            if entry.needs in ("jax", "flax")
        }
        made = {
            name: (functools.partial(inspected_model, m), m.params, m.inputs)
            for name, m in models.items()
        }
    found = {}
    for name, (inspect, params, args) in made.items():
        read = once_traced(inspect)
        found[name] = (
            read,
            SimpleNamespace(params=params, args=args),
            *said_by_rules(read, params),
        )
    return found


def is_exact(program, given):
    """Whether a clip does what it should, measured: another one than before may be the queries' alone."""
    params, args = drawn(given)
    return max(program.check_clip(params, *args).values()) < 1e-4


def other_answers(monkeypatch, rule, names):
    """The programs of which something else is said, and not less, without a rule."""
    whole = answers(names)
    monkeypatch.delitem(RULES, rule)
    wrong = []
    for name, (read, given, (leaves, clips, *_), rules) in whole.items():
        if rule not in rules:
            continue
        now, left, refused, program = said(read, given.params)
        others = [
            path for path in now if now[path] is not None and now[path] != leaves[path]
        ]
        silent = (
            len(left) < len(clips) and left and not refused
        )  # without any clip, muonclip raises
        is_another = any(clip not in clips for clip in left)
        if others or silent or (is_another and not is_exact(program, given)):
            wrong.append((name, others))
    return wrong


@pytest.mark.parametrize("rule", sorted(RULES))
@tiers.quick("exp", "reduce_sum")
def test_less_is_known_without_a_rule(monkeypatch, rule):
    assert other_answers(monkeypatch, rule, "programs") == []


@pytest.mark.nightly
@pytest.mark.parametrize("rule", sorted(RULES))
def test_less_is_known_of_models_without_a_rule(monkeypatch, rule):
    assert other_answers(monkeypatch, rule, "models") == []


def ratio(function, x, y):
    """f(y) / f(x), if it is one number for all x; else 1."""
    # An arc cosine of 2 is no number.
    with np.errstate(all="ignore"), jax.debug_nans(False):
        ratios = [
            np.divide(function(b), function(a)) for a, b in zip(x, y, strict=True)
        ]
    is_constant = np.allclose(ratios, ratios[0], rtol=1e-4)
    return ratios[0] if is_constant else 1


def test_what_may_make_a_softmax_or_another_is_listed():
    """Without its name in these lists, an attention by a new exponential would be missed."""
    x = np.linspace(0.5, 2, 4, dtype=np.float32)
    exponentials, powers = set(), set()
    for name in entrywise_rules._ENTRYWISE.split():
        try:
            function = getattr(jax.lax, name)
            if abs(ratio(function, x, x + 1) - 1) > 0.1:
                exponentials.add(name)
            # abs(x) is a first power.
            if min(abs(ratio(function, x, 2 * x) - np.array([1, 2]))) > 0.1:
                powers.add(name)
        except (AttributeError, TypeError, ValueError):  # of several operands
            continue
    assert exponentials == {"exp", "exp2"} < set(follow_logits.EXPONENTIALS)
    assert powers == {"sqrt", "rsqrt", "cbrt", "square"} < set(follow_logits._POWERS)
