"""Run the recipes of trainers that are installed: each in an environment of its own, in the nightly workflow."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CLIENTS = ("maxtext", "levanter", "tunix", "keras", "haiku", "equinox")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def run(client, *arguments):
    """What a recipe prints."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(
            f"{client} is not installed; .github/workflows/nightly.yml says what it needs"
        )
    program = ROOT / "examples" / "recipes" / f"with_{client}.py"
    paths = [str(ROOT), str(ROOT / "examples")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "KERAS_BACKEND": "jax",
    }
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def number(name, output):
    return float(re.search(rf"{name} (-?[\d.]+)", output)[1])


@pytest.mark.parametrize("client", CLIENTS)
def test_its_trainer_learns(client):
    """Uniform predictions of 256 tokens have a loss of 5.55."""
    assert number("loss", run(client, "--steps", "30")) < 4


MLA = (
    "attention_type=mla", "decoder_block=deepseek", "first_num_dense_layers=1", "num_experts=4",
    "num_experts_per_tok=2", "base_moe_mlp_dim=64", "shared_experts=1", "sparse_matmul=false",
    "base_num_kv_heads=4", "q_lora_rank=32", "kv_lora_rank=32", "qk_nope_head_dim=16", "qk_rope_head_dim=16",
    "v_head_dim=16",
)  # fmt: skip


@pytest.mark.parametrize(
    "settings", [(), MLA, ("gradient_accumulation_steps=2", "per_device_batch_size=4")]
)
def test_maxtext_clips_exactly(settings):
    """Its synthetic batch is the same in each step: what the first clip leaves is what the second step sees.

    The model has one layer, because the inputs of a second one would change with the first one's attention.
    """
    threshold, settings = 0.5, ("base_num_decoder_layers=1", *settings)
    assert (
        number("largest logit", run("maxtext", "--steps", "1", *settings)) > threshold
    )
    clip = (f"qk_clip_threshold={threshold}", *settings)
    after = number(
        "largest logit", run("maxtext", "--steps", "2", "--rate", "1e-30", *clip)
    )
    assert after == pytest.approx(threshold, rel=1e-5)


def test_maxtext_takes_the_largest_logit_of_all_micro_batches():
    """In the first step both have the same weights and, in some order, the same examples."""
    whole, parts = (
        run(
            "maxtext",
            "--steps",
            "1",
            f"gradient_accumulation_steps={n}",
            f"per_device_batch_size={8 // n}",
        )
        for n in (1, 2)
    )
    assert number("largest logit", parts) == pytest.approx(
        number("largest logit", whole), rel=1e-5
    )
