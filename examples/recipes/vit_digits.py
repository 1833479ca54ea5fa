"""Train a vision transformer on scikit-learn's digits with MuonClip, the model written as in bonsai and big_vision.

pip install -e . scikit-learn && python examples/recipes/vit_digits.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import muonjax

WIDTH, HEADS, PATCH = 32, 4, 2  # of images of 8 × 8 pixels


# The model: names and shapes of bonsai's `ViTClassificationModel`, which trains in the same way.


class Embeddings(nnx.Module):
    """Patches, a class token and positions."""

    def __init__(self, rngs):
        window = (PATCH, PATCH)
        self.projection = nnx.Conv(1, WIDTH, kernel_size=window, strides=window, rngs=rngs)
        self.cls_token = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 1, WIDTH)))
        self.pos_embeddings = nnx.Param(
            0.02 * jax.random.normal(rngs.params(), (1, 1 + (8 // PATCH) ** 2, WIDTH))
        )

    def __call__(self, images):  # [batch, 8, 8, 1]
        x = self.projection(images)
        x = x.reshape(len(x), -1, WIDTH)
        token = jnp.broadcast_to(self.cls_token[...], (len(x), 1, WIDTH))
        return jnp.concatenate([token, x], axis=1) + self.pos_embeddings[...]


class Layer(nnx.Module):
    """Attention and a two-layer perceptron."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.layernorm_before = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.layernorm_after = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.layernorm_before(x))
        return x + self.linear2(jax.nn.gelu(self.linear1(self.layernorm_after(x))))


class ViT(nnx.Module):
    """Images [batch, 8, 8, 1] -> logits [batch, 10]."""

    def __init__(self, layers, rngs):
        self.pos_embeddings = Embeddings(rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
        self.ln = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.classifier = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = self.pos_embeddings(images)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.ln(x)[:, 0])


def loss_fn(model, images, labels):
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--layers", type=int, default=2)
    # Low, so that it takes effect in this small model
    parser.add_argument("--threshold", type=float, default=5.0)
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)

    model = ViT(args.layers, nnx.Rngs(0))
    program = muonjax.inspect(loss_fn, model, images[:64], labels[:64])
    print(muonjax.tabulate(nnx.state(model, nnx.Param), program))
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, max(1, args.steps // 10), args.steps)
    optimizer = nnx.Optimizer(
        model, muonjax.muonclip(schedule, program, threshold=args.threshold), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, optimizer, images, labels):
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(model, images, labels)
        optimizer.update(model, grads, max_logits=max_logits)
        return loss

    rng = np.random.default_rng(0)
    for _ in range(args.steps):
        batch = rng.integers(0, 1500, 64)
        loss = step(model, optimizer, images[batch], labels[batch])
    correct = model(images[1500:]).argmax(-1) == labels[1500:]
    metrics = muonjax.metrics(optimizer.opt_state)
    print(
        f"loss {loss:.3f}, held-out accuracy {correct.mean():.3f}, largest logit {metrics['qk_clip/largest']:.2f}, "
        f"{metrics['qk_clip/total_clipped']:.0f} clips"
    )


if __name__ == "__main__":
    main()
