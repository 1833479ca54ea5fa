"""Run MaxText's own trainer with MuonClip: the optimizer, the largest logits, and one line of its training step.

pip install maxtext==0.2.5 and what its trainer imports (docs/recipes/maxtext.md)
python examples/recipes/with_maxtext.py                                 # settings of MaxText can follow
python examples/recipes/with_maxtext.py gradient_accumulation_steps=2
"""

import argparse
import functools
import inspect
import json
import os
import pathlib
import shlex
import tempfile
import textwrap

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # no Google Cloud

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx, traverse_util
from maxtext.configs import pyconfig
from maxtext.layers.attention_op import AttentionOp
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train as trainer
from maxtext.utils import gradient_accumulation

import muonjax

TINY = shlex.split("""
    run_name=muonjax hardware=cpu skip_jax_distributed_system=true dataset_type=synthetic attention=dot_product
    enable_checkpointing=false enable_tensorboard=false enable_goodput_recording=false log_config=false
    base_emb_dim=64 base_mlp_dim=256 base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 base_num_decoder_layers=2
    vocab_size=256 max_target_length=64 per_device_batch_size=8 dtype=float32 remat_policy=full
    opt_type=adamw
""")


def optimizer(learning_rate_schedule, config, model=None, mesh=None):
    """MuonClip for MaxText's `get_optimizer`; which parameters are matrices is read from MaxText's own loss.

    The softmax is inside of a kernel, so a site says by hand where attention is.
    """

    def loss(model, data):
        return trainer.loss_fn(model, config, data, None, None)[0]

    shape = jax.ShapeDtypeStruct((1, config.max_target_length), jnp.int32)
    names = [a + b for a in ("inputs", "targets") for b in ("", "_position", "_segmentation")]
    with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        program = muonjax.inspect(loss, model, dict.fromkeys(names, shape))
    params = nnx.state(model, nnx.Param)
    specs = nnx.get_partition_spec(params)
    shardings = nn.logical_to_mesh_sharding(specs, mesh, config.logical_axis_rules)
    if config.attention_type == "mla":
        site = muonjax.mla_site(nope=config.qk_nope_head_dim, scan_axis=config.param_scan_axis)
    else:
        site = muonjax.mha_site(scan_axis=config.param_scan_axis)
    return muonjax.muonclip(
        learning_rate_schedule,
        site,
        dimension_numbers=program,
        threshold=config.qk_clip_threshold,
        weight_decay=config.muon_weight_decay,
        mu_dtype=config.mu_dtype,
        distribution=muonjax.Distribution(mesh, nnx.as_pure(shardings)),
    )


def largest_logits(sown):
    """{module path: [layers, heads]} from what MaxText's attentions have sown: of all calls and examples."""
    largest = {}
    for path, calls in traverse_util.flatten_dict(sown, sep="/").items():
        if path.endswith("max_logits"):
            module = path.removesuffix("/max_logits").removesuffix("/attention_op")
            largest[module] = jnp.stack(jax.tree.leaves(calls)).max((0, -2))
    return largest


def record_max_logits(attention_op):
    """Makes every attention of MaxText store the largest logits [batch, heads] that its kernel found.

    MaxText does so for latent attention only (`use_qk_clip`); leave that off, since it also clips.
    """
    call = attention_op.__call__

    @functools.wraps(call)
    def recording(self, *args, **kwargs):
        return call(self, *args, **{**kwargs, "record_max_logits": True})

    attention_op.__call__ = recording


EDITS = [  # a line of MaxText, and what replaces it
    (
        trainer,
        "train_step",
        "state.apply_gradients(grads)",
        """
        state.apply_gradients(grads, max_logits=largest_logits(intermediate_outputs))
        """,
    ),
    (  # with gradient accumulation: the maximum over micro-batches, not their sum
        gradient_accumulation,
        "gradient_accumulation_loss_and_grad",
        "aux = jax.tree.map(lambda x: jnp.sum(x, axis=0), aux)",
        """
        largest_or_sum = lambda path, x: (jnp.max if "max_logits" in str(path) else jnp.sum)(x, axis=0)
        aux = jax.tree_util.tree_map_with_path(largest_or_sum, aux)
        """,
    ),
]


# In memory; in your own copy of MaxText, in its files
for module, name, line, replacement in EDITS:
    source = inspect.getsource(getattr(module, name))
    if source.count(line) != 1:
        raise SystemExit(
            f"{module.__name__}.{name} has not one line {line!r}: another version of MaxText?"
        )
    exec(
        source.replace(line, "; ".join(textwrap.dedent(replacement).split("\n")[1:-1])),
        module.__dict__,
    )
    setattr(trainer, name, getattr(module, name))
trainer.largest_logits = largest_logits
record_max_logits(AttentionOp)


def train(optimizer, rate, steps, *settings):
    """The loss of each step, and the last train state."""

    def get_optimizer(config, schedule, model=None, mesh=None):
        return optax.with_extra_args_support(optimizer(schedule, config, model, mesh))

    optimizers.get_optimizer = get_optimizer
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        base = pathlib.Path(pyconfig.__file__).parent / "base.yml"
        where = [f"base_output_directory={folder}", f"metrics_file={metrics}"]
        length = [f"steps={steps}", f"learning_rate={rate}"]
        state = trainer.train_loop(
            *trainer.initialize(["", str(base), *TINY, *where, *length, *settings])
        )
        return [
            json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()
        ], state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-2)
    args, settings = parser.parse_known_args()
    losses, state = train(optimizer, args.rate, args.steps, *settings)
    print(f"loss {losses[-1]:.3f}, largest logit {muonjax.metrics(state)['qk_clip/largest']:.6f}")


if __name__ == "__main__":
    main()
