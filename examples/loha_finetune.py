"""Fine-tune a trained transformer on another kind of text with LoHa adapters, by Muon and by AdamW.

    python examples/train_transformer.py                      # first: train the model to start from
    python examples/loha_finetune.py                          # about two minutes on two CPU cores
    python examples/loha_finetune.py --start runs/muon --rank 8

The model was trained on Python's documentation and is fine-tuned on Python's source code. Its kernels stay frozen: only
the adapters' thin factors are trained, and merging them at the end gives a plain model.
"""

import argparse
import json
import pathlib
import sysconfig
import time
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from text_data import Text
from tqdm import tqdm
from train_transformer import Trainer, Transformer, cross_entropy

import muonjax

LAYERS = r"blocks/\d+/(attention/(query|key|value|out)|up|down)$"
PACKAGES = ("asyncio", "email", "json")


def load(folder: pathlib.Path) -> tuple[Transformer, int]:
    """The model of a run of train_transformer.py, and its context length in bytes."""
    saved = folder / "checkpoints"
    if not checkpoints.steps(saved):
        raise SystemExit(
            f"--start {folder} holds no checkpoint; first: python examples/train_transformer.py"
        )
    settings = checkpoints.read_run(saved)["settings"]
    args = argparse.Namespace(**settings, mesh=None)  # whatever mesh it was trained on
    trainer = Trainer(args)
    _, state = checkpoints.restore(
        saved, settings, {"params": trainer.params, "opt_state": trainer.opt_state}
    )
    model = Transformer(args.layers, args.width, args.heads, args.context, rngs=nnx.Rngs(0))
    nnx.update(model, nnx.State(state["params"]))
    return model, args.context


def standard_library(to: pathlib.Path) -> str:
    """A file with the source of a few packages of the standard library: Python, not English."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [file for package in PACKAGES for file in sorted((root / package).glob("*.py"))]
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(b"\n".join(file.read_bytes() for file in files))
    return str(to)


def make_optimizer(name: str, rate: float, steps: int) -> optax.GradientTransformation:
    """No weight decay: if one factor decays, so does the whole product."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), steps, 0.1 * rate)
    if name == "muon":
        # Every factor is a thin matrix [in, rank] or [rank, out], so its Gram matrix is rank × rank.
        return muonjax.muon(schedule, weight_decay=0.0)
    return optax.adamw(schedule, b2=0.95, weight_decay=0.0)


def loss_of(model: Transformer, windows: jax.Array) -> jax.Array:
    """Mean loss in nats per byte."""
    return cross_entropy(model(windows[:, :-1]), windows)


evaluate = nnx.jit(loss_of)


def fine_tune(
    model: Transformer,
    tx: optax.GradientTransformation,
    text: Text,
    context: int,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Train the adapters of `model` in place; returns parameter count, memory and time."""
    graph, adapters, frozen = nnx.split(model, muonjax.nnx.LoHaParam, ...)
    adapters = nnx.to_pure_dict(adapters)
    opt_state = jax.jit(tx.init)(adapters)

    def step(adapters: Any, opt_state: Any, frozen: Any, windows: jax.Array):
        def loss_fn(adapters: Any) -> jax.Array:
            return loss_of(nnx.merge(graph, nnx.State(adapters), frozen), windows)

        loss, grads = jax.value_and_grad(loss_fn)(adapters)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, loss

    def windows(i: int) -> np.ndarray:
        return text.batch(args.seed, i, args.batch, context)

    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(adapters, opt_state, frozen, windows(0))
        .compile()
    )
    began = time.perf_counter()
    for i in (bar := tqdm(range(args.steps), disable=args.quiet)):
        adapters, opt_state, loss = compiled(adapters, opt_state, frozen, windows(i))
        if i % 10 == 0:
            bar.set_postfix_str(f"loss {float(loss):.3f}")
    jax.block_until_ready(adapters)
    seconds = (time.perf_counter() - began) / args.steps
    nnx.update(model, nnx.State(adapters))
    return {
        "trainable": sum(leaf.size for leaf in jax.tree.leaves(adapters)),
        "state_mib": sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state)) / 2**20,
        "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "seconds": seconds,
    }


def adapt(
    model: Transformer, optimizer: str, rate: float, text: Text, context: int, args: Any
) -> dict:
    """Train and merge adapters on a copy of `model`; returns held-out losses, memory and time."""
    model = nnx.clone(model)
    muonjax.nnx.add_loha(
        model, LAYERS, rank=args.rank, alpha=args.alpha, rngs=nnx.Rngs(args.seed + 1)
    )
    took = fine_tune(model, make_optimizer(optimizer, rate, args.steps), text, context, args)
    held_out = text.held_out_windows(context)
    adapted, loss_adapted = model(held_out[:4, :-1]), float(evaluate(model, held_out))
    muonjax.nnx.merge(model)  # a plain Transformer again
    merged, loss_merged = model(held_out[:4, :-1]), float(evaluate(model, held_out))
    difference = float(jnp.abs(merged - adapted).max())
    if difference > 1e-3 * float(jnp.abs(adapted).max()):
        raise SystemExit(
            f"The merged model's logits differ from the adapted one's by {difference}."
        )
    return {
        "optimizer": optimizer,
        "learning_rate": rate,
        "held_out": loss_adapted,
        "held_out_merged": loss_merged,
        "merged_difference": difference,
        **took,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    runs = pathlib.Path("runs")
    start = runs / "compare" / "muonclip"
    add("--start", type=pathlib.Path, default=start, help="folder of a run of train_transformer.py")
    add("--data", help="a file to fine-tune on; None: packages of Python's standard library")
    add(
        "--optimizers",
        nargs="+",
        choices=("muon", "adamw"),
        default=["muon", "adamw"],
        help="what trains",
    )
    add("--muon-rate", type=float, default=2e-2, help="Muon's peak learning rate")
    add("--adamw-rate", type=float, default=2e-2, help="AdamW's peak learning rate")
    add("--rank", type=int, default=4, help="rank of each of an adapter's two products")
    add("--alpha", type=float, help="adapters are scaled by alpha / rank; None: alpha = rank")
    add("--steps", type=int, default=150, help="length of each run and of its schedule")
    add("--batch", type=int, default=16, help="windows per step")
    add("--seed", type=int, default=0, help="seed of the adapters and of the data")
    add(
        "--out", type=pathlib.Path, default=runs / "loha", help="folder for the text and the report"
    )
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "rank"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def main() -> None:
    """Fine-tune with each optimizer, from the same start."""
    args = parse()
    model, context = load(args.start)
    text = Text(args.data or standard_library(args.out / "source.txt"))
    before = float(evaluate(model, text.held_out_windows(context)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{args.start}: held-out loss {before:.4f} on the new text, {parameters:,} parameters")
    rows = []
    for optimizer in args.optimizers:
        rate = args.muon_rate if optimizer == "muon" else args.adamw_rate
        row = adapt(model, optimizer, rate, text, context, args)
        rows.append(row)
        print(
            f"{optimizer}: held-out loss {row['held_out']:.4f} (merged {row['held_out_merged']:.4f}, logits within "
            f"{row['merged_difference']:.1e}), {row['trainable']:,} trainable parameters, optimizer state "
            f"{row['state_mib']:.2f} MiB, peak temporary memory {row['temporary_mib']:.0f} MiB, "
            f"{row['seconds']:.2f} s/step"
        )
    report = {"before": before, "parameters": parameters, "runs": rows}
    args.out.mkdir(parents=True, exist_ok=True)  # with --data it does not exist yet
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"The report is in {args.out / 'report.json'}")


if __name__ == "__main__":
    main()
