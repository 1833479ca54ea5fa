"""Train multi-head latent attention at a rate that makes it diverge: with Muon, then with MuonClip.

    python examples/mla_qk_clip.py

A small byte-level transformer with DeepSeek's attention, trained at a learning rate at which its attention logits grow
into the thousands. The picture has the loss of both runs (thick: its mean over 20 steps), each head's largest logit,
and the steps at which QK-Clip scaled each head.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import linen as nn
from text_data import Text

import muonjax

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def rotate(x: jax.Array, base: float = 1000.0) -> jax.Array:
    """Rotary position embedding of [batch, time, heads, size]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * base ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
    )


class LatentAttention(nn.Module):
    """DeepSeek's attention: queries and keys have a part per head and a rotary part whose key all heads share."""

    heads: int
    nope: int = 16
    rotary: int = 8
    query_rank: int = 48
    latent_rank: int = 32

    @nn.compact
    def __call__(self, x):
        def dense(features, name):
            return nn.DenseGeneral(features, use_bias=False, name=name)

        q = nn.RMSNorm(name="q_norm")(dense(self.query_rank, "wq_a")(x))
        q = dense((self.heads, self.nope + self.rotary), "wq_b")(q)
        q = jnp.concatenate([q[..., : self.nope], rotate(q[..., self.nope :])], -1)

        latent, shared = jnp.split(
            dense(self.latent_rank + self.rotary, "wkv_a")(x), [self.latent_rank], -1
        )
        size = self.nope + self.rotary  # values have the same size
        kv = dense((self.heads, self.nope + size), "wkv_b")(nn.RMSNorm(name="kv_norm")(latent))
        k, v = jnp.split(kv, [self.nope], -1)
        shared = jnp.broadcast_to(rotate(shared[..., None, :]), (*k.shape[:-1], self.rotary))
        k = jnp.concatenate([k, shared], -1)

        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out")(y)


class Transformer(nn.Module):
    """A decoder over bytes: [batch, time] -> logits [batch, time, 256]."""

    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, self.width, name="embedding")(tokens)
        for i in range(self.layers):
            x = x + LatentAttention(self.heads, name=f"attention_{i}")(nn.RMSNorm()(x))
            y = nn.gelu(nn.Dense(4 * self.width, use_bias=False, name=f"up_{i}")(nn.RMSNorm()(x)))
            x = x + nn.Dense(self.width, use_bias=False, name=f"down_{i}")(y)
        return nn.Dense(256, use_bias=False, name="head")(nn.RMSNorm()(x))


def train(args: argparse.Namespace, clip: bool) -> dict[str, np.ndarray]:
    """Losses [steps], each head's largest logit [steps, layers, heads], and whether it was clipped."""
    text, model = Text(), Transformer(args.layers, args.width, args.heads)
    tokens = text.batch(0, 0, 1, args.context)
    params = jax.jit(model.init)(jax.random.key(args.seed), tokens[:, :-1])["params"]

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    program = muonjax.inspect(loss_fn, params, tokens)
    rate = optax.warmup_constant_schedule(0.0, args.learning_rate, max(1, args.steps // 10))
    inner = muonjax.muon(rate, program, weight_decay=0.0)
    tx = optax.chain(inner, muonjax.qk_clip(args.threshold, program)) if clip else inner
    state = tx.init(params)

    @jax.jit
    def step(params, state, tokens):
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params, max_logits=max_logits)
        maxima = jnp.stack([max_logits[f"attention_{i}"] for i in range(args.layers)])
        return optax.apply_updates(params, updates), state, loss, maxima

    name = "MuonClip" if clip else "Muon"
    losses, maxima = [], []
    for count in range(args.steps):
        tokens = text.batch(args.seed, count, args.batch, args.context)
        params, state, loss, largest = step(params, state, tokens)
        losses.append(float(loss))
        maxima.append(np.asarray(largest))
        if (count + 1) % max(1, args.steps // 10) == 0:
            print(
                f"{name:9} step {count + 1}: loss {losses[-1]:.3f}, largest logit {largest.max():.1f}"
            )
    return {"loss": np.array(losses), "maxima": np.array(maxima)}


def draw(runs: dict[str, dict[str, np.ndarray]], threshold: float, to: pathlib.Path) -> None:
    """Loss on the left, each head's largest logit on the right; below, the heads that QK-Clip scaled."""
    figure, axes = plt.subplot_mosaic(
        [["loss", "logits"], ["loss", "clipped"]],
        figsize=(9, 4.5),
        height_ratios=(3, 1),
        layout="constrained",
    )
    for color, (name, run) in zip(("C3", "C0"), runs.items(), strict=True):
        window = min(20, len(run["loss"]))
        mean = np.convolve(run["loss"], np.full(window, 1 / window), "valid")
        axes["loss"].plot(run["loss"], color=color, linewidth=0.6, alpha=0.4)
        axes["loss"].plot(
            np.arange(window - 1, len(run["loss"])),
            mean,
            color=color,
            linewidth=2,
            label=f"{name}, mean of {window}",
        )
        for head in np.ndindex(run["maxima"].shape[1:]):
            label = None if any(head) else name
            axes["logits"].plot(
                run["maxima"][:, *head], color=color, alpha=0.6, linewidth=0.8, label=label
            )
    axes["logits"].axhline(
        threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}"
    )
    axes["logits"].set(yscale="log", ylabel="largest logit", title="Largest logit of each head")
    maxima = runs["MuonClip"]["maxima"]
    steps, layers, heads = maxima.shape
    hot = (maxima > threshold).reshape(steps, layers * heads)
    axes["clipped"].imshow(
        hot.T, aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1
    )
    for layer in range(1, layers):
        axes["clipped"].axhline(layer * heads - 0.5, color="C1", linewidth=1)
    axes["clipped"].set_yticks(
        (np.arange(layers) + 0.5) * heads - 0.5, [f"layer {i}" for i in range(layers)]
    )
    axes["clipped"].set(
        xlim=axes["logits"].get_xlim(),
        xlabel="step",
        title="Heads (rows) that MuonClip scaled: black",
    )
    axes["loss"].set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    for panel in ("loss", "logits"):
        axes[panel].grid(alpha=0.3)
        axes[panel].legend(fontsize=9, frameon=False)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=120)
    plt.close(figure)


def parse(flags: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = {
        "steps": 300,
        "layers": 3,
        "width": 96,
        "heads": 4,
        "context": 64,
        "batch": 8,
        "seed": 0,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=0.07)
    parser.add_argument("--threshold", type=float, default=30.0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/mla_qk_clip"))
    return parser.parse_args(flags)


def main() -> None:
    args = parse()
    runs = {"Muon": train(args, clip=False), "MuonClip": train(args, clip=True)}
    draw(runs, args.threshold, args.out / "mla_qk_clip.png")
    for name, run in runs.items():
        print(
            f"{name}: last loss {run['loss'][-20:].mean():.3f}, largest logit {run['maxima'].max():.1f}"
        )
    print(f"The picture is in {args.out / 'mla_qk_clip.png'}")


if __name__ == "__main__":
    main()
