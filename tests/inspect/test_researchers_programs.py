"""Functions of the kinds that researchers write are read as what they compute; those that are not yet are named."""

import warnings

import pytest

import muonjax
from tests.inspect.researchers_programs import PROGRAMS
from tests.inspect.test_hostile_programs import answer

pytestmark = pytest.mark.promotes("the programs are written as people write them")

KNOWN = {"attention_by_a_counter": "refused: a layer that an index of the loop's own chooses"}


def cases():
    for program in PROGRAMS:
        name = program.fun.__name__
        marks = [pytest.mark.xfail(reason=KNOWN[name])] if name in KNOWN else []
        yield pytest.param(program, marks=marks, id=name)


@pytest.mark.parametrize("program", list(cases()))
def test_every_parameter_and_attention_is_read_as_what_it_does(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parameters that are never used
        read = muonjax.inspect(program.fun, program.params, *program.args)
    found = {name: answer(read.decision(name), expected) for name, expected in program.expected.items()}
    assert found == program.expected
    problems = [attention.problem for attention in read.attentions]
    if isinstance(program.sites, str):
        assert len(problems) == 1
        assert program.sites in problems[0]
    else:
        assert problems == [""] * program.sites


def test_what_is_known_to_be_read_wrongly_is_here():
    assert set(KNOWN) <= {program.fun.__name__ for program in PROGRAMS}
