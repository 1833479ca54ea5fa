"""Run the recipes as programs, at a tiny size, and compare their statistics with brute-force logits in float64."""

import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax

RECIPES = pathlib.Path(__file__).parents[2] / "examples" / "recipes"
PROGRAMS = [
    "lm1b_fsdp.py",
    "vit_digits.py",
    "with_equinox.py",
    "with_transformers.py",
]
NEEDED = {"with_transformers.py": "transformers", "with_equinox.py": "equinox", "vit_digits.py": "sklearn"}


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS)
def test_runs(program):
    name, *flags = program.split()
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    command = [sys.executable, str(RECIPES / name), "--steps", "3", "--threshold", "0.02", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loss, logit, clips = re.search(
        r"loss ([\d.]+).*largest logit ([\d.]+), (\d+) clips", done.stdout
    ).groups()
    assert float(loss) < 6
    assert float(logit) >= 0.02
    assert int(clips) > 0


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def largest(q, k, visible, scale):
    """The largest logit of each head in float64, from q [batch, time, heads, size] and as many or fewer key heads."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = np.einsum("bthd,bshd->bhts", q, k) * scale
    return np.where(visible, logits, -np.inf).max((0, 2, 3))


def check(statistics, of, params, sites):
    """Clipped by `statistics`, the float64 logits `of(params)`, [heads] by attention, are right to 3e-6."""
    exact = of(params)
    flat = np.concatenate([*exact.values()])
    threshold = float(np.median(flat))
    clipped = of(muonjax.apply_qk_clip(params, statistics, sites, threshold))
    assert (flat > threshold).any()
    for path, logits in exact.items():
        np.testing.assert_allclose(clipped[path], np.minimum(logits, threshold), rtol=3e-6)


CAUSAL = np.tri(16, dtype=bool)
TOKENS = np.random.default_rng(0).integers(1, 64, (2, 16))
TOKENS[1, 10:] = 0  # padding


@pytest.mark.thorough
def test_lm1b():
    import lm1b_fsdp as recipe

    model = recipe.TransformerLM()
    params = nn.unbox(model.init(jax.random.key(0), TOKENS)["params"])
    (_, statistics), _ = muonjax.value_and_grad(recipe.loss_fn)(params, model.apply, TOKENS)
    _, seen = model.apply(
        {"params": params}, TOKENS, mutable=["intermediates"],
        capture_intermediates=lambda module, _: module.name == "LayerNorm_0",
    )  # fmt: skip
    seen = seen["intermediates"]["decoder"]
    visible = (CAUSAL & (TOKENS > 0)[:, None] & (TOKENS > 0)[:, :, None])[:, None]

    def of(params):
        found = {}
        for name in ("encoderdecoderblock_0", "encoderdecoderblock_1"):
            x = np.asarray(seen[name]["LayerNorm_0"]["__call__"][0], np.float64)
            attention = float64(params["decoder"][name]["MultiHeadDotProductAttention_0"])
            q, k = (np.einsum("btd,dhe->bthe", x, attention[n]["kernel"]) for n in ("query", "key"))
            found[name] = largest(q, k, visible, 8**-0.5)
        return found

    check(statistics, of, params, muonjax.inspect(recipe.loss_fn, params, model.apply, TOKENS))


@pytest.mark.thorough
def test_lm1b_on_four_devices_is_lm1b_on_one():
    import lm1b_fsdp as recipe

    results = []
    for count in (4, 1):
        mesh = recipe.make_mesh(jax.devices()[:count])
        tokens = jax.device_put(np.tile(TOKENS, (2, 1)), NamedSharding(mesh, P(("data", "fsdp"))))
        state = recipe.make_state(recipe.TransformerLM(), tokens, mesh, 0.5)
        kernel = state.params["decoder"]["encoderdecoderblock_0"]["MlpBlock_0"]["Dense_0"]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (32 // count, 128)
        before = jax.device_get(state.params)
        state, _ = jax.jit(recipe.step)(state, tokens)
        results.append(jax.tree.map(np.subtract, jax.device_get(state.params), before))
        assert muonjax.metrics(state.opt_state)["qk_clip/num_clipped"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *results)


@pytest.mark.thorough
def test_equinox():
    eqx = pytest.importorskip("equinox")
    import with_equinox as recipe

    model = recipe.Transformer(2, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    windows = np.pad(TOKENS, ((0, 0), (0, 1)))
    (loss, statistics), grads = muonjax.value_and_grad(recipe.loss_fn)(params, static, windows)
    plain = jax.value_and_grad(recipe.loss_fn)(params, static, windows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), (loss, grads), plain)
    inputs, x = [], jax.vmap(jax.vmap(model.embedding))(TOKENS)
    for block in model.blocks:
        inputs.append(np.asarray(jax.vmap(jax.vmap(block.attention_norm))(x), np.float64))
        x = jax.vmap(block)(x)

    def of(params):
        found = {}
        for i, block in enumerate(eqx.combine(params, static).blocks):
            q, k = (
                (inputs[i] @ np.asarray(p.weight, np.float64).T).reshape(2, 16, recipe.HEADS, -1)
                for p in (block.attention.query_proj, block.attention.key_proj)
            )
            found[f"blocks/{i}/attention"] = largest(q, k, CAUSAL, 8**-0.5)
        return found

    check(statistics, of, params, muonjax.inspect(recipe.loss_fn, params, static, windows).sites)


@pytest.mark.thorough
def test_transformers():
    pytest.importorskip("transformers")
    import with_transformers as recipe

    model = recipe.tiny()
    # Biases are zero at first; they are scaled with their kernels.
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), model.params)
    attention_mask = np.ones_like(TOKENS)
    attention_mask[:, :10] = 0  # most of it is padding, on the left
    data = model, TOKENS, attention_mask
    statistics = muonjax.value_and_grad(recipe.loss_fn)(params, *data)[0][1]
    positions = np.tile(np.arange(16), (2, 1))
    _, seen = model.module.apply(
        {"params": params}, TOKENS, attention_mask, positions,
        capture_intermediates=lambda module, _: module.name == "ln_1", mutable=["intermediates"],
    )  # fmt: skip

    def of(params):
        found = {}
        for layer, block in params["transformer"]["h"].items():
            x = np.asarray(
                seen["intermediates"]["transformer"]["h"][layer]["ln_1"]["__call__"][0], np.float64
            )
            projection = float64(block["attn"]["c_attn"])
            q, k, _ = np.split(x @ projection["kernel"].T + projection["bias"], 3, axis=-1)
            q, k = (z.reshape(2, 16, 4, -1) for z in (q, k))
            found[layer] = largest(q, k, CAUSAL & (attention_mask > 0)[:, None, None, :], 8**-0.5)
        return found

    check(statistics, of, params, muonjax.inspect(recipe.loss_fn, params, *data).sites)


@pytest.mark.thorough
def test_vit():
    pytest.importorskip("sklearn")
    import vit_digits as recipe

    model = recipe.ViT(2, nnx.Rngs(0))
    images = jax.random.uniform(jax.random.key(0), (3, 8, 8, 1))
    program = muonjax.inspect(recipe.loss_fn, model, images, jnp.arange(3))
    (_, statistics), _ = muonjax.value_and_grad(recipe.loss_fn)(model, images, jnp.arange(3))
    inputs, x = [], model.pos_embeddings(images)
    for layer in model.layers:
        inputs.append(np.asarray(layer.layernorm_before(x), np.float64))
        x = layer(x)

    def of(params):
        found = {}
        for i, x in enumerate(inputs):
            attention = float64(params["layers"][i]["attention"])
            q, k = (
                np.einsum("btd,dhe->bthe", x, attention[n]["kernel"]) + attention[n]["bias"]
                for n in ("query", "key")
            )
            found[i] = largest(q, k, True, 8**-0.5)
        return found

    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    check(statistics, of, params, program)


PAGES = RECIPES.parents[1] / "docs" / "recipes"


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_what_a_page_adds_is_in_its_program(page):
    text = (PAGES / page).read_text()
    if page == "frameworks.md":  # what is above is complete programs, which run with the code of all pages
        text = text[text.index("## Transformers") :]
    code = "".join((RECIPES / name).read_text() for name in re.findall(r"`examples/recipes/(\w+\.py)`", text))
    lines = {line.strip() for line in code.splitlines()}
    added = [
        line[1:].strip()
        for diff in re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
        for line in diff.splitlines()
        if re.match(r"\+(?!\+)", line)
    ]
    assert added
    assert set(added) <= lines | {""}, sorted(set(added) - lines)
