"""Functions in which names, sizes and spellings mislead are read as what they compute, and clipped exactly or not."""

import random
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import muonjax
from muonjax._inspect.clip_certificate import Certificate
from tests.inspect import attention_programs, hostile_programs, researchers_programs
from tests.inspect.library_models.model import flattened

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # parameters that are never used
]

PROGRAMS = [
    *hostile_programs.PROGRAMS,
    *researchers_programs.PROGRAMS,
    *attention_programs.PROGRAMS,
]
KNOWN = {
    "attention_by_a_counter": "refused: a layer that an index of the loop's own chooses"
}


def named(programs):
    cases = []
    for program in programs:
        name = program.fun.__name__
        marks = [pytest.mark.xfail(reason=KNOWN[name])] if name in KNOWN else []
        cases.append(pytest.param(program, marks=marks, id=name))
    return cases


def inspected(program, transform=lambda fun: fun):
    return muonjax.inspect(transform(program.fun), program.params, *program.args)


def by_name(name):
    (program,) = (program for program in PROGRAMS if program.fun.__name__ == name)
    return program, inspected(program)


def described(numbers):
    """Dimension numbers as the tables write them."""

    def axes(value):
        return ", ".join(
            map(str, sorted(value) if isinstance(value, tuple) else [value])
        )

    text = f"{axes(numbers.reduction_axis)} | {axes(numbers.output_axis)}"
    if isinstance(numbers, muonjax.FusedDimensionNumbers):
        parts = (
            numbers.parts
            if isinstance(numbers.parts, int)
            else ", ".join(map(str, numbers.parts))
        )
        text += f" / {parts} of {numbers.axis}"
        text += f", {numbers.repeats} times" if numbers.repeats > 1 else ""
    return text


def answer(decision, expected):
    """A decision in the words of the tables: the expected ones if they are true."""
    if expected == hostile_programs.ANYTHING:
        return expected
    if decision.numbers is None:
        why = f"by names: {decision.why}" if decision.by_names else decision.why
        return expected if expected in why else f"Adam: {why}"
    text = described(decision.numbers)
    return f"{text}; {described(decision.per_head)}" if ";" in expected else text


def answers(read, expected, names=None):
    return {
        name: answer(read.decision((names or {}).get(name, name)), expected[name])
        for name in expected
    }


@pytest.mark.parametrize("program", named(PROGRAMS))
def test_every_parameter_and_attention_is_read_as_what_it_does(program):
    check_answers(program, inspected(program))
    # A jitted function holds the arrays that it closes over in its own jaxpr.
    check_answers(program, inspected(program, jax.jit))


def check_answers(program, read):
    assert answers(read, program.expected) == program.expected
    problems = [attention.problem for attention in read.attentions]
    if isinstance(program.sites, int):
        assert problems == [""] * program.sites
    elif program.sites is not None:
        words = (program.sites,) if isinstance(program.sites, str) else program.sites
        assert [
            word if word in problem else problem
            for word, problem in zip(words, problems, strict=True)
        ] == [*words]
    else:
        assert problems


@pytest.mark.parametrize("program", named(hostile_programs.PROGRAMS))
def test_names_and_their_order_say_nothing(program):
    rng = random.Random(program.fun.__name__)
    names = {
        name: "".join(rng.choices("bcdfghjkmnprtvxz", k=6)) for name in program.expected
    }
    paths, leaves, structure = flattened(program.params)
    params = {names[path]: leaf for path, leaf in zip(paths, leaves, strict=True)}

    def fun(p, *args):
        return program.fun(
            structure.unflatten([p[names[path]] for path in paths]), *args
        )

    read = muonjax.inspect(fun, params, *program.args)
    assert answers(read, program.expected, names) == program.expected


def drawn(program):
    """Parameters and data."""
    rng = np.random.default_rng(0)

    def draw(a):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        whole = jnp.issubdtype(a.dtype, jnp.integer)
        return jnp.asarray(
            rng.integers(1, 3, a.shape)
            if whole
            else 0.7 * rng.standard_normal(a.shape),
            a.dtype,
        )

    return jax.tree.map(draw, (program.params, program.args))


def of_all_heads(maxima):
    return np.concatenate([np.asarray(x).reshape(-1) for x in maxima.values()])


def clipped(tables):
    programs = (p for table in tables for p in table.PROGRAMS)
    return named(
        [
            p
            for p in programs
            if p.sites is None or (isinstance(p.sites, int) and p.sites > 0)
        ]
    )


def check_clip(read, p, args):
    assert max(read.check_clip(p, *args).values()) < 1e-4


@pytest.mark.parametrize("program", clipped([hostile_programs, attention_programs]))
def test_a_clip_is_exact_for_each_head(program):
    read = inspected(program)
    sites = [
        attention.site for attention in read.attentions if attention.site is not None
    ]
    if program.sites is None and not sites:
        return
    p, args = drawn(program)
    if program.logits is None:
        return check_clip(read, p, args)

    @jax.jit
    def measured(p):
        (_, maxima), _ = muonjax.value_and_grad(program.fun)(p, *args)
        return maxima, program.logits(p, *args)

    maxima, logits = measured(p)
    found, wanted = of_all_heads(maxima), logits.max((0, 2, 3))
    if (
        program.sites is None
    ):  # in the order of the projections, which may be another one
        check_clip(read, p, args)
        assert_allclose(np.sort(found), np.sort(wanted), rtol=2e-5)
        threshold = float(np.median(wanted))
        _, after = measured(muonjax.apply_qk_clip(p, maxima, read, threshold))
        return assert_allclose(
            after.max((0, 2, 3)), np.minimum(wanted, threshold), rtol=1e-4
        )
    assert_allclose(found, wanted, rtol=2e-5)
    if sites[0].scan_axis not in (None, ()):  # deeper layers get other inputs
        return check_clip(read, p, args)
    factors = np.linspace(0.5, 1, logits.shape[1], dtype=np.float32)
    cuts = np.cumsum([x.size for x in maxima.values()])[:-1]
    hot = {
        n: (1 / f).reshape(x.shape)
        for (n, x), f in zip(maxima.items(), np.split(factors, cuts), strict=True)
    }
    _, after = measured(muonjax.apply_qk_clip(p, hot, read, 1.0))
    assert_allclose(after, factors[:, None, None] * logits, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("program", clipped([researchers_programs]))
def test_a_clip_of_what_researchers_write_is_exact(program):
    p, args = drawn(program)
    check_clip(inspected(program), p, args)


@pytest.mark.parametrize(
    "name",
    [*attention_programs.REFUSED, *attention_programs.DOUBTED, "a_wide_mask_of_floats"],
)
def test_a_mask_that_may_be_a_bias_is_doubted(name):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        by_name(name)
    lines = [str(warning.message) for warning in record]
    doubts = [x for x in lines if "a mask or a bias: 'max_logits' (attention_" in x]
    assert len(doubts) == (name in attention_programs.DOUBTED)


def test_refused_attentions_on_one_line_are_counted_apart():
    _, read = by_name("attentions_of_one_line")
    assert [attention.name for attention in read.attentions] == ["layer0", "layer1"]


def test_a_gate_beside_the_kernel_of_the_queries_is_no_site_of_its_own():
    program, read = by_name("a_gate_beside_the_kernel_of_the_queries")
    jax.eval_shape(muonjax.muonclip(1e-2, read).init, program.params)


def test_check_clip_measures_what_a_clip_does():
    program, read = by_name("fused_attention")
    p, args = drawn(program)
    assert read.check_clip(p, *args)["max_logits"] < 1e-5
    (site,) = read.sites
    without_biases = tuple(scale for scale in site.scales if scale.path != "b")
    wrong = muonjax.Site(path="", scales=without_biases, norms="")
    read.attentions = (read.attentions[0]._replace(site=wrong),)
    assert read.check_clip(p, *args)["max_logits"] > 1e-2


@pytest.mark.parametrize(
    "name",
    ["a_gate_by_the_sum_of_squares", "a_penalty_on_the_queries", "a_sum_of_the_keys"],
)
def test_check_clip_sees_what_else_a_clip_changes(name):
    """Without the proof these are accepted."""
    follow = Certificate.failure
    with mock.patch.object(Certificate, "failure", lambda self: follow(self) and None):
        program, read = by_name(name)
        p, args = drawn(program)
        assert read.check_clip(p, *args)["max_logits"] > 1e-3
