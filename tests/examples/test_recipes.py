"""Run the recipes at a tiny size."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from tests.examples.programs import EXAMPLES, run

RECIPES = EXAMPLES / "recipes"
PROGRAMS = ["vit_digits.py", "with_equinox.py", "with_transformers.py"]
NEEDED = {
    "with_transformers.py": "transformers",
    "with_equinox.py": "equinox",
    "vit_digits.py": "sklearn",
}


def check(output):
    loss, logit, clips = re.search(
        r"loss ([\d.]+).*largest logit ([\d.]+), (\d+) clips", output
    ).groups()
    assert float(loss) < 6
    assert float(logit) >= 0.02
    assert int(clips) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS)
def test_runs(program):
    pytest.importorskip(NEEDED[program])
    check(run(f"recipes/{program}", "--steps", 3, "--threshold", 0.02))


@pytest.mark.thorough
def test_lm1b_runs_on_four_devices_of_its_own():
    command = [
        sys.executable,
        str(RECIPES / "lm1b_fsdp.py"),
        "--steps",
        "3",
        "--threshold",
        "0.02",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


TOKENS = np.random.default_rng(0).integers(1, 64, (2, 16))
TOKENS[1, 10:] = 0  # padding


@pytest.mark.thorough
def test_lm1b_on_four_devices_is_lm1b_on_one(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import lm1b_fsdp as recipe

    results = []
    for count in (4, 1):
        mesh = recipe.make_mesh(jax.devices()[:count])
        tokens = jax.device_put(
            np.tile(TOKENS, (2, 1)), NamedSharding(mesh, P(("data", "fsdp")))
        )
        state = recipe.make_state(recipe.TransformerLM(), tokens, mesh, 0.5)
        kernel = state.params["decoder"]["encoderdecoderblock_0"]["MlpBlock_0"][
            "Dense_0"
        ]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (32 // count, 128)
        before = jax.device_get(state.params)
        state, _ = jax.jit(recipe.step)(state, tokens)
        results.append(jax.tree.map(np.subtract, jax.device_get(state.params), before))
        assert muonjax.metrics(state.opt_state)["qk_clip/num_clipped"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *results)


PAGES = RECIPES.parents[1] / "docs" / "recipes"
WITH_LINES = sorted(path.name for path in PAGES.glob("*.md"))


@pytest.mark.parametrize("page", WITH_LINES)
def test_what_a_page_adds_is_in_its_program(page):
    text = (PAGES / page).read_text()
    if (
        page == "frameworks.md"
    ):  # what is above is complete programs, which run with the code of all pages
        text = text[text.index("## Transformers") :]
    code = "".join(
        (RECIPES / name).read_text()
        for name in re.findall(r"`examples/recipes/(\w+\.py)`", text)
    )
    lines = {line.strip() for line in code.splitlines()}
    added = [
        line[1:].strip()
        for diff in re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
        for line in diff.splitlines()
        if re.match(r"\+(?!\+)", line)
    ]
    assert added
    assert set(added) <= lines | {""}, sorted(set(added) - lines)
