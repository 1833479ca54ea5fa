"""Functions in which names, sizes and first appearances mislead are read as what they compute."""

import random
import warnings

import jax
import pytest

import muonjax
from tests.inspect.hostile_programs import PROGRAMS

pytestmark = pytest.mark.promotes("the programs are written as people write them")


def described(numbers):
    """Dimension numbers as the tables write them."""

    def axes(value):
        return ", ".join(map(str, sorted(value) if isinstance(value, tuple) else [value]))

    text = f"{axes(numbers.reduction_axis)} | {axes(numbers.output_axis)}"
    if isinstance(numbers, muonjax.FusedDimensionNumbers):
        parts = numbers.parts if isinstance(numbers.parts, int) else ", ".join(map(str, numbers.parts))
        text += f" / {parts} of {numbers.axis}" + (
            f", {numbers.repeats} times" if numbers.repeats > 1 else ""
        )
    return text


def answer(decision, expected):
    """A decision in the words of the tables: the expected ones if they are true."""
    if decision.problem:
        return "refused"
    if decision.numbers is not None:
        return described(decision.numbers)
    return expected if expected in decision.why else f"Adam: {decision.why}"


def renamed(program, seed):
    """The same program with random names, in another order."""
    rng = random.Random(seed)
    names = {name: "".join(rng.choices("bcdfghjkmnprtvxz", k=6)) for name in program.expected}
    params = {names[name]: leaf for name, leaf in program.params.items()}
    return names, params, lambda p, *args: program.fun({name: p[new] for name, new in names.items()}, *args)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.fun.__name__)
@pytest.mark.parametrize("scrambled", [False, True], ids=["as it is", "random names"])
def test_every_parameter_is_read_as_what_it_does(program, scrambled):
    names, params, fun = {name: name for name in program.expected}, program.params, program.fun
    if scrambled:
        names, params, fun = renamed(program, program.fun.__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parameters that are never used
        read = muonjax.inspect(fun, params, *program.args)
    assert {
        name: answer(read.decision(new), program.expected[name]) for name, new in names.items()
    } == program.expected


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.fun.__name__)
def test_every_attention_is_found_or_refused_with_its_reason(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        read = muonjax.inspect(program.fun, program.params, *program.args)
    if isinstance(program.sites, str):
        (refused,) = read.attentions
        assert program.sites in refused.problem, refused
    else:
        assert [a.problem for a in read.attentions] == [""] * program.sites


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.sites == 1], ids=lambda program: program.fun.__name__
)
def test_half_the_factor_gives_half_the_logits(program):
    """What a site scales, scales the logits."""
    keys = iter(jax.random.split(jax.random.key(0), 100))
    real = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), program.params)
    args = [jax.random.normal(next(keys), a.shape) for a in program.args]
    read = muonjax.inspect(program.fun, program.params, *program.args)
    (largest,) = jax.jit(muonjax.value_and_grad(program.fun))(real, *args)[0][1].values()
    assert (largest > 0).all()
    name = read.attentions[0].name
    half = muonjax.apply_qk_clip(real, {name: largest}, read, largest.max() / 2)
    (after,) = jax.jit(muonjax.value_and_grad(program.fun))(half, *args)[0][1].values()
    expected = jax.numpy.minimum(largest, largest.max() / 2)
    assert jax.numpy.allclose(after, expected, rtol=1e-5), (largest, after)


def test_check_clip_measures_what_a_clip_does():
    (program,) = [p for p in PROGRAMS if p.fun.__name__ == "fused_attention"]
    keys = iter(jax.random.split(jax.random.key(0), 100))
    real = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), program.params)
    x = jax.random.normal(next(keys), program.args[0].shape)
    read = muonjax.inspect(program.fun, real, x)
    assert abs(read.check_clip(real, x)["max_logits"]) < 1e-5
    (site,) = read.sites
    without_biases = tuple(scale for scale in site.scales if scale.path != "b")
    wrong = muonjax.Site(path="", scales=without_biases, norms=())
    broken = read.attentions[0]._replace(site=wrong)
    read.attentions = (broken,)
    assert abs(read.check_clip(real, x)["max_logits"]) > 1e-2
