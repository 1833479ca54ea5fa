"""Log both learning rates and what the clip did, to a CSV file, TensorBoard or Weights & Biases, and draw the run.

pip install -e ".[examples]" && python examples/recipes/log_metrics.py
pip install tensorboardX && python examples/recipes/log_metrics.py --to tensorboard
pip install wandb && python examples/recipes/log_metrics.py --to wandb  # offline; `wandb sync` uploads it
"""

import argparse
import contextlib
import csv
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
import plots

import muonjax

Metrics = dict[str, float]
Log = Callable[[Metrics], object]

# Each opens a log in a folder. What it yields takes the metrics of one step.


@contextlib.contextmanager
def to_csv(folder: pathlib.Path) -> Iterator[Log]:
    with (folder / "metrics.csv").open("w", newline="") as file:

        def log(metrics: Metrics) -> None:
            writer = csv.DictWriter(file, list(metrics))
            if not file.tell():
                writer.writeheader()
            writer.writerow(metrics)
            file.flush()

        yield log


@contextlib.contextmanager
def to_tensorboard(folder: pathlib.Path) -> Iterator[Log]:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def log(metrics: Metrics) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, int(metrics["count"]))

        yield log


@contextlib.contextmanager
def to_wandb(folder: pathlib.Path) -> Iterator[Log]:
    import wandb

    with wandb.init(project="muonjax", dir=str(folder), mode="offline") as run:
        yield lambda metrics: run.log(metrics, step=int(metrics["count"]))


LOGS = {"csv": to_csv, "tensorboard": to_tensorboard, "wandb": to_wandb}

# A model with attention, and an optimizer with two schedules.

SHAPES = {
    "query": (16, 4, 8),
    "key": (16, 4, 8),
    "value": (16, 4, 8),
    "out": (4, 8, 16),
    "head": (16, 16),
}


def loss_fn(params: dict, x: jax.Array) -> jax.Array:
    """The mean square of the error in predicting the next vector."""
    q, k, v = (jnp.einsum("btd,dhs->bths", x, params[name]) for name in ("query", "key", "value"))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    y = x + jnp.einsum("bths,hsd->btd", attended, params["out"])
    return jnp.mean((y @ params["head"] - jnp.roll(x, -1, axis=1)) ** 2)


def make_optimizer(program: muonjax.Program, steps: int) -> optax.GradientTransformation:
    """MuonClip for matrices and AdamW for the rest, each with a schedule of its own."""
    # `inject_hyperparams` keeps AdamW's rate in the state, where `metrics` finds it.
    adam = optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, steps))
    schedule = optax.cosine_decay_schedule(2e-2, steps)
    tx = muonjax.muonclip(schedule, program, threshold=2.0, adam=adam)
    return muonjax.monitor(tx, program, every_k=1)  # the sizes of updates


def train(log: Log, steps: int) -> list[Metrics]:
    """Train, log each step, and return what was logged."""
    params = {
        name: jax.random.normal(jax.random.key(i), shape) / 4
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    x = jax.random.normal(jax.random.key(9), (8, 12, 16))
    program = muonjax.inspect(loss_fn, params, x)
    tx = make_optimizer(program, steps)
    state = tx.init(params)

    @jax.jit
    def step(params: dict, state: optax.OptState) -> tuple:
        (loss, max_logits), grads = muonjax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params, max_logits=max_logits)
        return optax.apply_updates(params, updates), state, loss

    history = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        metrics = {"loss": float(loss)} | muonjax.metrics(state)
        log(metrics)
        history.append(metrics)
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", choices=LOGS, default="csv")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/log_metrics"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with LOGS[args.to](args.out) as log:
        history = train(log, args.steps)
    plots.save(plots.plot({"muonclip": history}, threshold=2.0), args.out / "metrics.png")
    shown = (
        "loss",
        "learning_rate",
        "adam_learning_rate",
        "qk_clip/largest",
        "qk_clip/num_clipped",
    )
    print(*(f"{name} {history[-1][name]:.4g}" for name in shown), sep=", ")
    print(f"The log and its picture are in {args.out}")


if __name__ == "__main__":
    main()
