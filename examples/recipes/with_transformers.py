"""Fine-tune Transformers' Flax GPT-2 with MuonClip: `inspect` reads the loss function, so no name of GPT-2 is needed.

    pip install -e . "transformers<5" && python examples/recipes/with_transformers.py
    python examples/recipes/with_transformers.py --checkpoint gpt2   # downloads the weights

Transformers has Flax models up to version 4; without `--checkpoint` the model is tiny and random.
"""

import argparse
import functools

import jax
import numpy as np
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config

import muonjax


def tiny():
    """GPT-2 with two layers of width 32."""
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return FlaxGPT2LMHeadModel(config, input_shape=(1, 8))


def loss_fn(params, model, tokens, attention_mask):
    """Mean cross-entropy over the tokens that are no padding."""
    logits = model(tokens, attention_mask, params=params, train=False).logits
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    weights = attention_mask[:, 1:]
    return (losses * weights).sum() / weights.sum()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", help="name or folder of pre-trained weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    # Low, for the tiny model; with published weights use 100
    parser.add_argument("--threshold", type=float, default=0.5)
    args = parser.parse_args()
    model = FlaxGPT2LMHeadModel.from_pretrained(args.checkpoint) if args.checkpoint else tiny()
    # In place of a tokenizer's output
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (4, 16))
    attention_mask = np.ones_like(tokens)
    program = muonjax.inspect(loss_fn, model.params, model, tokens, attention_mask)
    tx = muonjax.muonclip(args.learning_rate, program, threshold=args.threshold, weight_decay=0.01)
    params, state = model.params, tx.init(model.params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, model, *batch)
        updates, state = tx.update(grads, state, params, max_logits=max_logits)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(args.steps):
        params, state, loss = step(params, state, tokens, attention_mask)
    metrics = muonjax.metrics(state)
    print(f"loss {loss:.3f}, largest logit {metrics['qk_clip/largest']:.2f}, "
          f"{metrics['qk_clip/total_clipped']:.0f} clips")  # fmt: skip
    # model.save_pretrained(folder, params=params) writes a checkpoint that loads as any other.


if __name__ == "__main__":
    main()
