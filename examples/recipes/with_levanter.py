"""Train a Llama of Levanter with Muon, by Levanter's own trainer: an OptimizerConfig, and the program of its loss.

pip install -e . marin-levanter --pre && python examples/recipes/with_levanter.py
"""

import argparse
import dataclasses
import tempfile

import equinox as eqx
import haliax as hax
import jax
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import OptimizerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from text_data import Text

import muonjax

TINY = LlamaConfig(
    max_seq_len=64, hidden_dim=64, intermediate_dim=256, num_layers=2, num_heads=4, num_kv_heads=2
)


@OptimizerConfig.register_subclass("muonjax")
@dataclasses.dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    def build(self, num_train_steps):
        rate = self.lr_scheduler(num_train_steps)
        return muonjax.muon(rate, program(), weight_decay=self.weight_decay)


def loss_fn(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key)


def program():
    """What the loss does with each parameter; nothing is computed."""
    model = eqx.filter_eval_shape(lambda: TINY.build(hax.Axis("vocab", 256), key=jax.random.key(0)))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    example = LmExample.causal(hax.zeros(TINY.max_Pos, int))
    return muonjax.inspect(
        lambda params: loss_fn(eqx.combine(params, static), example).scalar(), params
    )


def optimizer(schedule):
    return muonjax.muon(schedule, program())


def train(optimizer, rate, steps, batch=8):
    """The loss of each step, and the optimizer's state."""
    text, Pos = Text(), TINY.max_Pos
    windows = [
        window for step in range(steps) for window in text.batch(0, step, batch, Pos.size - 1)
    ]
    dataset = ListAsyncDataset([LmExample.causal(hax.named(window, Pos)) for window in windows])
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            tracker=NoopConfig(),
            train_batch_size=batch,
            num_train_steps=steps,
            checkpointer=CheckpointerConfig(base_path=folder),
            log_dir=folder,
            watch=WatchConfig(watch_targets=[]),
            log_jaxprs=False,
            log_xla_hlo=False,
            require_accelerator=False,
        )
        config.initialize()
        tx = optimizer(MuonConfig(learning_rate=rate).lr_scheduler(steps))
        with Trainer(config, tx, loss_fn) as trainer:
            key = jax.random.key(0)
            state = trainer.initial_state(
                key, model_init=lambda: TINY.build(hax.Axis("vocab", 256), key=key)
            )
            infos = trainer.training_steps(state, trainer.data_loader(dataset))
            losses = [float((last := info).loss) for info in infos]
            return losses, last.state.opt_state


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    print(f"loss {train(optimizer, 1e-2, parser.parse_args().steps)[0][-1]:.3f}")


if __name__ == "__main__":
    main()
