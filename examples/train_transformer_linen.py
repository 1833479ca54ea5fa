"""Train the byte-level transformer in Flax Linen with MuonClip, its layers in one `nn.scan`.

    python examples/train_transformer_linen.py

The shortest complete program. train_transformer.py (NNX) has checkpoints, pictures and resuming as well.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from text_data import Text

import muonjax


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on the normalized residual stream."""

    heads: int

    @nn.compact
    def __call__(self, x, _=None):
        attention = nn.MultiHeadDotProductAttention(self.heads, use_bias=False, name="attention")
        x = x + attention(nn.RMSNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        y = nn.gelu(nn.Dense(4 * x.shape[-1], use_bias=False, name="up")(nn.RMSNorm()(x)))
        return x + nn.Dense(x.shape[-1], use_bias=False, name="down")(y), None


class Transformer(nn.Module):
    """A decoder over bytes: [batch, time] -> logits [batch, time, 256]."""

    layers: int
    width: int
    heads: int
    context: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, self.width, name="embedding")(tokens)
        x = x + nn.Embed(self.context, self.width, name="position_embedding")(
            jnp.arange(tokens.shape[1])
        )
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},  # kernels become (layers, ...)
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = blocks(self.heads, name="blocks")(x)
        return nn.Dense(256, use_bias=False, name="head")(nn.RMSNorm()(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = {"steps": 200, "layers": 4, "width": 192, "heads": 6, "context": 128, "batch": 16}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--threshold", type=float, default=15.0)
    args = parser.parse_args()

    text = Text()
    model = Transformer(args.layers, args.width, args.heads, args.context)
    held_out = text.held_out_windows(args.context)
    params = jax.jit(model.init)(jax.random.key(0), held_out[:1, :-1])["params"]

    @jax.jit
    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    program = muonjax.inspect(loss_fn, params, held_out[:1])
    print(muonjax.tabulate(params, program))

    rate = args.learning_rate
    warmup = max(1, args.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        rate / warmup, rate, warmup, args.steps, 0.1 * rate
    )
    tx = muonjax.muonclip(schedule, program, threshold=args.threshold)
    state = muonjax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, tokens):
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(state.params, tokens)
        return state.apply_gradients(grads=grads, max_logits=max_logits), loss

    for count in range(args.steps):
        state, loss = step(state, text.batch(0, count, args.batch, args.context))
        if (count + 1) % 20 == 0 or count + 1 == args.steps:
            clips = muonjax.metrics(state.opt_state)[
                "qk_clip/total_clipped"
            ]  # heads scaled, over all steps
            print(
                f"step {count + 1}: loss {loss:.3f}, held out {loss_fn(state.params, held_out):.3f}, {clips:.0f} clips"
            )


if __name__ == "__main__":
    main()
