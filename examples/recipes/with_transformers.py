"""Fine-tune Transformers' Flax GPT-2 with MuonClip: largest logits from Linen's `capture_intermediates`.

    pip install muonjax "transformers<5" && python examples/recipes/with_transformers.py
    python examples/recipes/with_transformers.py --checkpoint gpt2   # downloads the weights

Transformers has Flax models up to version 4; without `--checkpoint` the model is tiny and random.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config

import muonjax


def tiny():
    """GPT-2 with two layers of width 32."""
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return FlaxGPT2LMHeadModel(config, input_shape=(1, 8))


def is_projection(module, method):
    """The Dense of queries, keys and values of each layer."""
    return module.name == "c_attn"


def max_logits(config, seen, attention_mask):
    """The largest logits [heads] of each attention, from what its projection put out."""
    found = {}
    for layer, block in seen["transformer"]["h"].items():
        qkv = block["attn"]["c_attn"]["__call__"][0]  # [batch, time, 3 * width]
        q, k, _ = (z.reshape(*z.shape[:2], config.n_head, -1) for z in jnp.split(qkv, 3, axis=-1))
        mask = attention_mask[:, None, None, :]  # padding
        found[f"transformer/h/{layer}/attn"] = muonjax.max_logits(q, k, mask=mask, is_causal=True)
    return found


def forward(model, params, tokens, attention_mask):
    """Logits of the next tokens, and the largest attention logits; without dropout."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    output, sown = model.module.apply(
        {"params": params},
        tokens,
        attention_mask,
        positions,
        deterministic=True,
        capture_intermediates=is_projection,
        mutable=["intermediates"],
    )
    return output.logits, max_logits(model.config, sown["intermediates"], attention_mask)


def loss_fn(params, model, tokens, attention_mask):
    """Mean cross-entropy over the tokens that are no padding, and the largest attention logits."""
    logits, statistics = forward(model, params, tokens, attention_mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    weights = attention_mask[:, 1:]
    return (losses * weights).sum() / weights.sum(), statistics


def make_optimizer(model, learning_rate, threshold):
    """MuonClip; GPT-2's kernels hold heads and features on one axis, so it needs the number of heads."""
    sites = muonjax.sites_from(model.params, num_heads=model.config.n_head)
    return muonjax.muonclip(learning_rate, sites, threshold=threshold, weight_decay=0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", help="name or folder of pre-trained weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument(
        "--threshold", type=float, default=0.5
    )  # low, for the tiny model; with weights use 100
    args = parser.parse_args()
    model = FlaxGPT2LMHeadModel.from_pretrained(args.checkpoint) if args.checkpoint else tiny()
    tx = make_optimizer(model, args.learning_rate, args.threshold)
    params, state = model.params, tx.init(model.params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, attention_mask):
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, statistics), grads = value_and_grad(params, model, tokens, attention_mask)
        updates, state = tx.update(grads, state, params, max_logits=statistics)
        return optax.apply_updates(params, updates), state, loss

    tokens = np.random.default_rng(0).integers(
        0, model.config.vocab_size, (4, 16)
    )  # yours: a tokenizer's output
    attention_mask = np.ones_like(tokens)
    for _ in range(args.steps):
        params, state, loss = step(params, state, tokens, attention_mask)
    metrics = muonjax.metrics(state)
    print(f"loss {loss:.3f}, largest logit {metrics['qk_clip/largest']:.2f}, "
          f"{metrics['qk_clip/total_clipped']:.0f} clips")  # fmt: skip
    # model.save_pretrained(folder, params=params) writes a checkpoint that loads as any other.


if __name__ == "__main__":
    main()
