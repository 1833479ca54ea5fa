"""Train Flax's lm1b example with MuonClip, sharded over four devices (FSDP) by its own logical axis rules.

pip install -e . && python examples/recipes/lm1b_fsdp.py   # a CPU simulates the four devices
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 2
# From its configuration
RULES = (("mlp", "tensor"), ("vocab", "tensor"), ("embed", "fsdp"), ("heads", "tensor"))


# The model: parameters, names and logical axes of Flax's examples/lm1b/models.py, without dropout and decoding.


def logical(init, *axes):
    return nn.with_logical_partitioning(init, axes)


def layer_norm(name=None):
    zeros, ones = nn.initializers.zeros, nn.initializers.ones
    return nn.LayerNorm(
        bias_init=logical(zeros, "embed"), scale_init=logical(ones, "embed"), name=name
    )


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.xavier_uniform()
        x = nn.relu(nn.Dense(4 * WIDTH, kernel_init=logical(init, "embed", "mlp"))(x))
        return nn.Dense(WIDTH, kernel_init=logical(init, "mlp", "embed"))(x)


class EncoderDecoder1DBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        init = logical(nn.initializers.xavier_uniform(), "embed", "kv")
        attention = nn.MultiHeadDotProductAttention(HEADS, kernel_init=init, use_bias=False)
        x = x + attention(layer_norm()(x), mask=mask)
        return x + MlpBlock()(layer_norm()(x))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask):
        embed = nn.Embed(
            VOCABULARY, WIDTH, embedding_init=logical(nn.initializers.normal(1.0), "vocab", "embed")
        )
        x = embed(jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1])
        for i in range(LAYERS):
            x = EncoderDecoder1DBlock(name=f"encoderdecoderblock_{i}")(x, mask)
        init = logical(nn.initializers.xavier_uniform(), "embed", "vocab")
        return nn.Dense(VOCABULARY, kernel_init=init, name="logitdense")(
            layer_norm("encoderdecoder_norm")(x)
        )


class TransformerLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        mask = nn.combine_masks(
            nn.make_attention_mask(tokens > 0, tokens > 0),
            nn.make_causal_mask(tokens),  # zeros are padding
        )
        return Decoder(name="decoder")(tokens, mask)


# Training.


def make_mesh(devices):
    shape = (1, len(devices), 1)
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=devices)


def loss_fn(params, apply_fn, tokens):
    logits = apply_fn({"params": params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def make_state(
    model: nn.Module, tokens: jax.Array, mesh: Mesh, threshold: float
) -> muonjax.linen.TrainState:
    """Parameters and optimizer state, created with their shardings."""

    def init():
        return model.init(jax.random.key(0), tokens)["params"]

    specs = nn.get_partition_spec(jax.eval_shape(init))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    params = jax.jit(lambda: nn.unbox(init()), out_shardings=shardings)()
    # With it each matrix is orthogonalized on one device; without it, on every device.
    distribution = muonjax.Distribution(mesh, shardings)
    program = muonjax.inspect(loss_fn, params, model.apply, tokens)
    tx = muonjax.muonclip(1e-2, program, threshold=threshold, distribution=distribution)
    state_shardings = muonjax.state_shardings(tx, params, distribution)
    opt_state = jax.jit(tx.init, out_shardings=state_shardings)(params)
    count = jax.device_put(jnp.zeros([], jnp.int32), NamedSharding(mesh, P()))
    return muonjax.linen.TrainState(
        step=count, apply_fn=model.apply, params=params, tx=tx, opt_state=opt_state
    )


def step(state, tokens):
    """One update, with the largest logits of each attention."""
    (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(
        state.params, state.apply_fn, tokens
    )
    return state.apply_gradients(grads=grads, max_logits=max_logits), loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    # Low, so that it takes effect in this tiny model
    parser.add_argument("--threshold", type=float, default=1.0)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # accelerators are not affected
    mesh = make_mesh(jax.devices()[:4])
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 1, VOCABULARY)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
    state = make_state(TransformerLM(), tokens, mesh, args.threshold)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    train = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    for _ in range(args.steps):
        state, loss = train(state, tokens)
    metrics = muonjax.metrics(state.opt_state)
    kernel = state.params["decoder"]["encoderdecoderblock_0"]["MlpBlock_0"]["Dense_0"]["kernel"]
    print(
        f"a kernel: {kernel.shape}, of which each device has {kernel.addressable_shards[0].data.shape}"
    )
    print(f"loss {loss:.3f}, largest logit {metrics['qk_clip/largest']:.2f}, "
          f"{metrics['qk_clip/total_clipped']:.0f} clips")  # fmt: skip


if __name__ == "__main__":
    main()
