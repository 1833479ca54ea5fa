"""Functions of the kinds that researchers write are read as what they compute; those that are not yet are named."""

import warnings

import pytest

import muonjax
from tests.program.researchers_programs import PROGRAMS
from tests.program.test_hostile_programs import answer

pytestmark = pytest.mark.promotes("the programs are written as people write them")

_LEARNED = "a learned input times a matrix, before it meets data, is taken for factors of one matrix"
_MOVED = "entries of keys that data choose are not followed"
KNOWN = {
    "a_projected_position_table": _LEARNED,
    "perceiver_by_vmap": _LEARNED,
    "perceiver_with_unbatched_latents": _LEARNED,
    "prefix_tuning_by_an_mlp": _LEARNED,
    "a_sliding_window_by_gather": _MOVED,
    "keys_that_data_choose": _MOVED,
    "a_written_cache": "keys written into zeros are not followed",
    "an_invertible_convolution": "slogdet is not followed, so names decide",
    "attention_by_a_counter": "refused: which layer an iteration is can't be told yet",
    "differential_attention": "of two softmaxes that are subtracted, one is found",
    "exp_of_log_softmax": "refused with an untrue reason",
    "experts_that_labels_choose": "a one-hot choice after the product does not count experts",
    "heads_by_a_loop": "slices that are heads are taken for parts of a fused kernel",
    "spectral_norm": "the power iteration's products count as uses",
    "task_weights_by_a_dot": "a dot over examples takes the heads before it for layers",
    "two_towers_by_a_sum": "products entry by entry take nothing, unlike those by einsum",
}


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
