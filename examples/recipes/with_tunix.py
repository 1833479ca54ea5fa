"""Train a Llama of Tunix with Muon, by Tunix's own trainer: one line.

pip install -e . google-tunix && python examples/recipes/with_tunix.py
"""

import argparse

import jax.numpy as jnp
from flax import nnx
from text_data import Text
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import utils
from tunix.sft.hooks import TrainingHooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import muonjax

TINY = ModelConfig(
    num_layers=2, vocab_size=256, embed_dim=64, hidden_dim=256, num_heads=4, head_dim=16, num_kv_heads=2,
    rope_theta=10_000, norm_eps=1e-5,
)  # fmt: skip


def optimizer(rate):
    return muonjax.muon(rate)


class Losses(TrainingHooks):
    """Keeps the loss of each step."""

    def __init__(self):
        self.steps = []

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.steps.append(float(train_loss))

    def nothing(self, *_, **__):
        """For the other hooks."""

    on_train_start = on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = (
        nothing
    )


def model_input(batch):
    """Tunix's default loss takes these."""
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }


def train(optimizer, rate, steps, batch=8, context=64):
    """The loss of each step, and the optimizer's state."""
    text, losses = Text(), Losses()
    tokens = [text.batch(0, step, batch, context - 1) for step in range(steps)]
    batches = [TrainingInput(input_tokens=x, input_mask=jnp.ones_like(x, bool)) for x in tokens]
    model = Llama3(TINY, rngs=nnx.Rngs(0))
    trainer = PeftTrainer(
        model, optimizer(rate), TrainingConfig(eval_every_n_steps=steps, max_steps=steps)
    )
    trainer.with_training_hooks(losses)
    trainer.with_gen_model_input_fn(model_input).train(batches)
    return losses.steps, trainer.optimizer.opt_state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    print(f"loss {train(optimizer, 1e-2, parser.parse_args().steps)[0][-1]:.3f}")


if __name__ == "__main__":
    main()
