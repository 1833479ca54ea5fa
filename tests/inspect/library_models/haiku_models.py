"""Models of Haiku's own layers."""

import jax
import jax.numpy as jnp

from tests.inspect.library_models.model import cross_entropy, shape, tokens


def transformed(forward, *inputs):
    """`apply(params, *inputs)` and the parameters' shapes."""
    import haiku as hk

    made = hk.without_apply_rng(hk.transform(forward))
    return made.apply, jax.eval_shape(made.init, jax.random.key(0), *inputs)


def block(x):
    import haiku as hk

    init = hk.initializers.VarianceScaling(1.0)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None, None]
    y = hk.LayerNorm(-1, True, True)(x)
    x = x + hk.MultiHeadAttention(4, 8, w_init=init, model_size=32, name="a")(
        y, y, y, mask=mask
    )
    return x + hk.nets.MLP([64, 32], name="m")(hk.LayerNorm(-1, True, True)(x))


def haiku_layer_stack():
    """Layers scanned by `layer_stack`, rematerialized."""

    def forward(text):
        import haiku as hk

        x = hk.Embed(99, 32)(text)
        x = hk.experimental.layer_stack(3, name="stack")(hk.remat(block))(x)
        return hk.Linear(99, name="head")(x)

    apply, params = transformed(forward, tokens(2, 8))

    def loss(params, text):
        return cross_entropy(apply(params, text)[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 8)]


def haiku_images():
    def forward(x):
        import haiku as hk

        x = jax.nn.relu(hk.Conv2D(16, 3, name="first")(x))
        x = jax.nn.relu(
            hk.Conv2D(32, 3, stride=2, feature_group_count=4, name="grouped")(x)
        )
        x = jax.nn.relu(hk.DepthwiseConv2D(1, 3, name="depthwise")(x))
        x = jax.nn.relu(hk.SeparableDepthwiseConv2D(2, 3, name="separable")(x))
        x = jax.nn.relu(hk.Conv2DTranspose(12, 3, stride=2, name="transposed")(x))
        x = hk.GroupNorm(4)(jax.nn.relu(hk.Linear(20, name="dense")(x)))
        return hk.Linear(5, name="head")(x.mean((1, 2)))

    apply, params = transformed(forward, shape(2, 8, 8, 3))

    def loss(params, x, labels):
        return cross_entropy(apply(params, x), labels)

    return loss, params, [shape(2, 8, 8, 3), tokens(2)]


def haiku_resnet():
    """Batch normalization whose averages are an input."""
    import haiku as hk

    def forward(x):
        net = hk.nets.ResNet(
            (1, 1, 1, 1),
            10,
            channels_per_group=(16, 16, 32, 32),
            bottleneck=True,
        )
        return net(x, is_training=True)

    made = hk.transform_with_state(forward)
    x = shape(2, 32, 32, 3)
    params, state = jax.eval_shape(made.init, jax.random.key(0), x)

    def loss(params, state, x, labels):
        return cross_entropy(made.apply(params, state, None, x)[0], labels)

    return loss, params, [state, x, tokens(2)]


def haiku_recurrent():
    """Input and state joined before one product with the four gates; a gated cell with three."""

    def forward(text):
        import haiku as hk

        x = hk.Embed(30, 16)(text).swapaxes(0, 1)
        lstm, gru, vanilla = (
            hk.LSTM(24, name="lstm"),
            hk.GRU(24, name="gru"),
            hk.VanillaRNN(24, name="rnn"),
        )
        for cell in (lstm, gru, vanilla):
            x, _ = hk.dynamic_unroll(cell, x, cell.initial_state(x.shape[1]))
        return hk.Linear(30, name="head")(x)

    apply, params = transformed(forward, tokens(2, 7))

    def loss(params, text):
        return cross_entropy(apply(params, text).swapaxes(0, 1)[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 7)]
