"""Models of Flax Linen's own layers."""

import jax
from flax import linen as nn

from tests.inspect.library_models.model import (
    cross_entropy,
    shape,
    tokens,
)


def parameters(module: nn.Module, *inputs, **settings):
    """Shapes of the parameters, and of all else."""
    variables = dict(
        jax.eval_shape(
            lambda *x: module.init(jax.random.key(0), *x, **settings), *inputs
        )
    )
    return variables.pop("params"), variables


class Block(nn.Module):
    """Before each part a norm; the arguments that `nn.scan` wants."""

    options: tuple = ()

    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4, name="a", **dict(self.options)
        )
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(256, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(64, name="down")(y), None


class Language(nn.Module):
    """Layers one by one or scanned along an axis of the parameters, and a tied head."""

    scan_axis: int | None = None
    options: tuple = ()

    @nn.compact
    def __call__(self, text):
        table = nn.Embed(99, 64, name="table")
        x = table(text) + self.param("positions", nn.initializers.normal(), (8, 64))
        if self.scan_axis is None:
            for _ in range(2):
                x, _ = Block(self.options)(x)
        else:
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": self.scan_axis},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = layers(self.options, name="layers")(x, None)
        return table.attend(nn.LayerNorm()(x))


def linen_language(scan_axis=None, **options):
    """The next token, with the options of attention; random keys, of which dropout takes some, are an input."""
    module = Language(scan_axis, tuple(options.items()))
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(lambda text: module.init(keys, text), tokens(2, 8))[
        "params"
    ]

    def loss(params, text, key):
        logits = module.apply({"params": params}, text, rngs={"dropout": key})
        return cross_entropy(logits[:, :-1], text[:, 1:])

    return (
        loss,
        params,
        [tokens(2, 8), jax.eval_shape(lambda: jax.random.key(0))],
    )


class Translator(nn.Module):
    @nn.compact
    def __call__(self, x, states):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="own")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="other")(x, states)
        return nn.Dense(99, name="head")(x)


def linen_cross_attention():
    module = Translator()
    inputs = [shape(2, 6, 64), shape(2, 5, 48)]
    params, _ = parameters(module, *inputs)

    def loss(params, x, states, labels):
        return cross_entropy(module.apply({"params": params}, x, states), labels)

    return loss, params, [*inputs, tokens(2, 6)]


class Images(nn.Module):
    @nn.compact
    def __call__(self, x):  # (batch, 16, 16, 3)
        x = nn.relu(nn.Conv(16, (3, 3), name="first")(x))
        x = nn.relu(
            nn.BatchNorm(use_running_average=False)(
                nn.Conv(16, (3, 3), strides=2, name="strided")(x)
            )
        )
        x = nn.relu(nn.Conv(32, (3, 3), feature_group_count=4, name="grouped")(x))
        x = nn.relu(
            nn.GroupNorm(4)(
                nn.Conv(32, (3, 3), feature_group_count=32, name="depthwise")(x)
            )
        )
        x = nn.relu(nn.Conv(24, (1, 1), name="pointwise")(x))
        x = nn.relu(nn.Conv(24, (2, 2), strides=2, name="windows")(x))
        x = nn.relu(nn.ConvLocal(8, (2, 2), strides=2, name="local")(x))
        x = nn.relu(nn.ConvTranspose(12, (3, 3), strides=(2, 2), name="transposed")(x))
        x = nn.ConvTranspose(10, (3, 3), transpose_kernel=True, name="turned")(x)
        return nn.Dense(5, name="head")(nn.relu(x).mean((1, 2)))


def linen_images():
    module = Images()
    params, averages = parameters(module, shape(2, 16, 16, 3))

    def loss(params, averages, x, labels):
        logits, _ = module.apply(
            {"params": params, **averages}, x, mutable=["batch_stats"]
        )
        return cross_entropy(logits, labels)

    return loss, params, [averages, shape(2, 16, 16, 3), tokens(2)]
