"""Models of public libraries: each parameter and each attention is decided rightly, whatever the names are."""

import warnings

import jax
import optax
import pytest

import muonjax
from tests.inspect.library_models import MODELS
from tests.inspect.library_models.answers import (
    expected_attention,
    expected_leaves,
    found_attention,
    is_right,
    said,
    same_heads,
)
from tests.inspect.library_models.model import scrambled, shapes_of
from tests.tools import tiers

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# One of each kind: a fused projection, heads side by side, refused attentions and others, layers on another axis
# than the first, convolutions, a loop over layers, gates, shared parameters, latent attention, and experts.
KINDS = (
    "transformers-gpt2",
    "transformers-bloom",
    "transformers-t5",
    "flax-linen_scan_on_axis_1",
    "flax-linen_images",
    "flax-nnx_fused_in_a_jax_scan",
    "haiku-haiku_recurrent",
    "equinox-equinox_scan",
    "jax-latent_attention",
    "jax-chosen_experts",
)


def inspected(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # parameters that are never used
        return muonjax.inspect(model.loss, model.params, *model.inputs)


def decided(model, program):
    """What is said of each parameter, alone and with a matrix for each head, by path."""
    decisions = {path: program.decision(path) for path in shapes_of(model.params)}
    why = {
        path: f"by names: {d.why}" if d.by_names else d.why
        for path, d in decisions.items()
    }
    return {
        path: (d.numbers, d.per_head if d.numbers else None, why[path])
        for path, d in decisions.items()
    }


def wrong(model, found, answers):
    """What is found and what would be right, by path, where they differ."""
    shapes = shapes_of(model.params)
    return {
        path: (*found[path], right)
        for path, right in answers.items()
        if not is_right(*found[path], right, shapes[path])
    }


@pytest.mark.parametrize("name", MODELS)
@tiers.quick(*KINDS, others="nightly")
def test_every_parameter_and_attention_is_decided_rightly_whatever_the_names_are(
    name,
):
    pytest.importorskip(
        MODELS[name].needs, reason=f"{MODELS[name].needs} is not installed"
    )
    model = MODELS[name].make()
    program = inspected(model)
    found = decided(model, program)
    matrices = {path: (numbers, why) for path, (numbers, _, why) in found.items()}
    assert not wrong(model, matrices, expected_leaves(model, model.leaves))
    heads = {path: (per_head, why) for path, (_, per_head, why) in found.items()}
    others = {
        pattern: right
        for pattern, right in model.leaves.items()
        if pattern not in model.per_head
    }
    answers = expected_leaves(model, {**model.per_head, **others}, every=False)
    assert not wrong(model, heads, answers)
    attentions = [
        found_attention(model.params, attention) for attention in program.attentions
    ]
    wanted = [expected_attention(model, line) for line in model.attentions]
    right = len(attentions) == len(wanted) and all(map(same_heads, attentions, wanted))
    assert right, (list(map(said, attentions)), list(map(said, wanted)))

    other, path_of = scrambled(model)
    there = inspected(other)
    assert {
        path_of[word]: said_of for word, said_of in decided(other, there).items()
    } == found

    def as_named(heads):
        if isinstance(heads, str):
            return heads
        return {(factor, path_of[word]): grid for (factor, word), grid in heads.items()}

    scrambled_attentions = [
        as_named(found_attention(other.params, a)) for a in there.attentions
    ]
    assert len(scrambled_attentions) == len(attentions)
    assert all(map(same_heads, scrambled_attentions, attentions))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # attentions that are refused
        make = (
            muonjax.muonclip
            if any(a.site for a in program.attentions)
            else muonjax.muon
        )
        if any(str(answer).startswith("by names") for answer in model.leaves.values()):
            return
        state = jax.eval_shape(make(1e-2, program).init, model.params)
    assert len(jax.tree.leaves(optax.tree_utils.tree_get(state, "trace"))) > 0
