"""Train a MaxText decoder with MuonClip: its configuration, its mesh rules, and the largest logits of its attention op.

    python examples/recipes/with_maxtext.py            # its NNX model
    python examples/recipes/with_maxtext.py --linen    # its Linen model

MaxText itself needs more than a CPU and a minute, so this runs `maxtext_copy`. In MaxText, `get_optimizer` replaces the
function of that name in src/maxtext/optimizers/optimizers.py, and `record_max_logits(AttentionOp)` is called once.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import maxtext_copy
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import muonjax


def get_optimizer(config, learning_rate_schedule, distribution=None):
    """MuonClip for `opt_type: "muon"`; it reads the parameters' paths and shapes, so it needs no rule per model."""
    return muonjax.muonclip(
        learning_rate_schedule,
        threshold=config.qk_clip_threshold,
        weight_decay=config.muon_weight_decay,
        mu_dtype=config.mu_dtype,
        distribution=distribution,
    )


def record_max_logits(attention_op):
    """Makes every attention of MaxText store the largest logits [batch, heads] that its kernel found.

    MaxText does so for latent attention only (`use_qk_clip`); leave that off, since it also clips.
    """
    call = attention_op.__call__

    @functools.wraps(call)
    def recording(self, *args, **kwargs):
        return call(self, *args, **{**kwargs, "record_max_logits": True})

    attention_op.__call__ = recording


def shardings_of(specs, config, mesh):
    """Shardings of the parameters, from the names of their axes and `logical_axis_rules`."""
    return nn.logical_to_mesh_sharding(specs, mesh, config.logical_axis_rules)


def loss_of(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def train_nnx(config, mesh, tokens, segments, steps):
    """As MaxText with `pure_nnx`: its `TrainStateNNX.apply_gradients` passes `max_logits` on."""
    model = maxtext_copy.DecoderModel(config, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    shardings = shardings_of(nnx.get_partition_spec(params), config, mesh)
    nnx.update(model, jax.device_put(params, shardings))
    tx = get_optimizer(config, 1e-2, muonjax.Distribution(mesh, nnx.as_pure(shardings)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens, segments):
        def loss_fn(model):
            loss = loss_of(model(tokens, segments), tokens)
            return loss, nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate))

        (loss, intermediate_outputs), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads, max_logits=intermediate_outputs)
        return loss

    for _ in range(steps):
        loss = step(model, optimizer, tokens, segments)
    return loss, optimizer.opt_state


def train_linen(config, mesh, tokens, segments, steps):
    """As MaxText without `pure_nnx`; its train state becomes `muonjax.linen.TrainState`."""
    model = maxtext_copy.linen_model()
    variables = {"params": model.init(jax.random.key(0), tokens, segments)["params"]}
    shardings = shardings_of(nn.get_partition_spec(variables), config, mesh)
    params = jax.device_put(nn.unbox(variables), shardings)
    tx = get_optimizer(config, 1e-2, muonjax.Distribution(mesh, shardings))
    state = muonjax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, tokens, segments):
        def loss_fn(params):
            logits, intermediate_outputs = state.apply_fn(params, tokens, segments, mutable=["intermediates"])
            return loss_of(logits, tokens), intermediate_outputs

        (loss, intermediate_outputs), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, max_logits=intermediate_outputs), loss

    for _ in range(steps):
        state, loss = step(state, tokens, segments)
    return loss, state.opt_state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--threshold", type=float, default=1.0
    )  # low, so that it takes effect in this tiny model
    parser.add_argument("--linen", action="store_true", help="the Linen model instead of the NNX one")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # accelerators are not affected
    nnx.use_eager_sharding(False)  # as MaxText does: names of axes become shardings later
    config = maxtext_copy.CONFIG
    config.qk_clip_threshold = args.threshold
    mesh = jax.make_mesh((2, 2), config.mesh_axes, (AxisType.Auto,) * 2)
    record_max_logits(maxtext_copy.AttentionOp)
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, config.vocab_size)
    train = train_linen if args.linen else train_nnx
    loss, opt_state = train(config, mesh, tokens, jnp.ones_like(tokens), args.steps)
    metrics = muonjax.metrics(opt_state)
    print(f"loss {loss:.3f}, largest logit {metrics['qk_clip/largest']:.2f}, "
          f"{metrics['qk_clip/total_clipped']:.0f} clips")  # fmt: skip


if __name__ == "__main__":
    main()
