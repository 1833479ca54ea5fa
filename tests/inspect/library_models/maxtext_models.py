"""MaxText's decoders at tiny sizes, in its own trainer's loss."""

import os
import pathlib

import jax
from flax import linen as nn
from flax import nnx

from tests.inspect.library_models.model import tokens

TINY = """
    hardware=cpu skip_jax_distributed_system=true dataset_type=synthetic attention=dot_product log_config=false
    enable_checkpointing=false override_model_config=true base_emb_dim=32 base_mlp_dim=48 base_num_query_heads=4
    base_num_kv_heads=2 head_dim=8 base_num_decoder_layers=4 vocab_size=99 max_target_length=16 per_device_batch_size=2
    dtype=float32 remat_policy=full run_name=muonjax
"""


def decoder(name, settings=""):
    """The model of one of MaxText's own configurations, with other sizes."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train as trainer
    from maxtext.utils import maxtext_utils, model_creation_utils

    base = str(pathlib.Path(pyconfig.__file__).parent / "base.yml")
    words = f"model_name={name} {TINY} {settings}".split()
    config = pyconfig.initialize(["", base, *words])
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])

    def make():
        return model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))

    with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        graph, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params, rest, data):
        with mesh, nn.logical_axis_rules(config.logical_axis_rules):
            whole = nnx.merge(graph, params, rest, copy=True)
            return trainer.loss_fn(whole, config, dict(data), None, None)[0]

    words = (
        "inputs",
        "inputs_position",
        "inputs_segmentation",
        "targets",
        "targets_position",
        "targets_segmentation",
    )
    data = {word: tokens(2, 16) for word in words}
    params, rest = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, rest)
    )
    return loss, params, [rest, data]
