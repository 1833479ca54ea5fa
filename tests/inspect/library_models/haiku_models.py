"""Models of Haiku's own layers."""

import jax
import jax.numpy as jnp

from tests.inspect.library_models.model import cross_entropy, tokens


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


def haiku_recurrent():
    """Input and state joined before one product with the four gates; a gated cell with three."""

    def forward(text):
        import haiku as hk

        x = hk.Embed(30, 16)(text).swapaxes(0, 1)
        lstm = hk.LSTM(24, name="lstm")
        gru = hk.GRU(24, name="gru")
        vanilla = hk.VanillaRNN(24, name="rnn")
        for cell in (lstm, gru, vanilla):
            x, _ = hk.dynamic_unroll(cell, x, cell.initial_state(x.shape[1]))
        return hk.Linear(30, name="head")(x)

    apply, params = transformed(forward, tokens(2, 7))

    def loss(params, text):
        return cross_entropy(apply(params, text).swapaxes(0, 1)[:, :-1], text[:, 1:])

    return loss, params, [tokens(2, 7)]
