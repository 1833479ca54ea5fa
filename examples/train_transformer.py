"""Train a byte-level transformer (Flax NNX) with MuonClip and with AdamW, on the text of Python's own documentation.

    python examples/train_transformer.py                          # both, one picture; under three minutes on two cores
    python examples/train_transformer.py --optimizer muonclip     # one of them
    python examples/train_transformer.py --resume runs/muonclip   # continues a killed run, bit for bit
    python examples/train_transformer.py --mesh fsdp=4,tensor=2   # on eight devices; a CPU simulates them

Read it from `Transformer` downwards: the model, the optimizer, one step, the loop.
"""

import argparse
import csv
import os
import pathlib
import statistics
import time
from collections.abc import Iterable
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import plots
from flax import nnx
from text_data import Text
from tqdm import tqdm

import muonjax

OPTIMIZERS = ("muonclip", "muon", "adamw", "adamclip")
LOSS_NAME = "loss (nats per byte)"
MONITOR_EVERY = 10  # steps between two measurements of muonjax.monitor
# The best of five rates (benchmarks/training/steps_to_loss.py).
LEARNING_RATES = {"muonclip": 8e-3, "muon": 8e-3, "adamw": 2e-3, "adamclip": 2e-3}


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each on the normalized residual stream."""

    def __init__(self, width: int, heads: int, depth: int, *, rngs: nnx.Rngs):
        small = nnx.initializers.variance_scaling(0.1 / depth, "fan_in", "truncated_normal")
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, decode=False, out_kernel_init=small, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, kernel_init=small, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """A decoder over bytes: [batch, time] -> logits [batch, time, 256]."""

    def __init__(self, layers: int, width: int, heads: int, context: int, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(256, width, embedding_init=normal, rngs=rngs)
        self.position_embedding = nnx.Embed(context, width, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, layers, rngs=rngs) for _ in range(layers)])
        self.final_norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def make_schedule(args: argparse.Namespace) -> optax.Schedule:
    """Linear warm-up over a tenth of the steps, then a cosine decay to a tenth of the peak rate."""
    rate, warmup = args.learning_rate, max(1, args.steps // 10)
    # From rate / warmup and not from 0, which would make the first step do nothing.
    return optax.warmup_cosine_decay_schedule(
        rate / warmup, rate, warmup, max(args.steps, 2), 0.1 * rate
    )


def make_optimizer(
    args: argparse.Namespace,
    program: muonjax.Program,
    distribution: muonjax.Distribution | None = None,
) -> optax.GradientTransformation:
    """The optimizer by name: weight decay 0.1 on matrices, b2 = 0.95 where Adam is involved."""
    schedule = make_schedule(args)
    adam = {
        "b2": 0.95,
        "weight_decay": 0.1,
        "mask": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    }
    match args.optimizer:
        case "muonclip":
            return muonjax.muonclip(
                schedule, program, threshold=args.threshold, distribution=distribution
            )
        case "muon":
            return muonjax.muon(schedule, program, distribution=distribution)
        case "adamw":
            return optax.adamw(schedule, **adam)
        case "adamclip":
            return muonjax.adamclip(schedule, program, threshold=args.threshold, **adam)
    raise SystemExit(
        f"--optimizer {args.optimizer} is unknown; choose one of {', '.join(OPTIMIZERS)}."
    )


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean loss in nats per byte of predicting tokens[:, 1:]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


class Trainer:
    """The model's structure, the optimizer, and the three compiled functions that a run needs."""

    def __init__(self, args: argparse.Namespace):
        model = Transformer(
            args.layers, args.width, args.heads, args.context, rngs=nnx.Rngs(args.seed)
        )
        self.graph, params = nnx.split(model, nnx.Param)
        params = nnx.to_pure_dict(params)
        tokens = jax.ShapeDtypeStruct((args.batch, args.context + 1), jnp.int32)
        # It reads the loss: which parameters are matrices, and where attention is. Nothing is computed.
        self.program = muonjax.inspect(self.loss, params, tokens)
        self.layout = meshes.Layout(args.mesh, params)
        self.params = self.layout.params(params)
        # Every tenth step it measures the sizes of updates and weights, and keeps them in its state.
        optimizer = make_optimizer(args, self.program, self.layout.distribution)
        self.optimizer = muonjax.monitor(optimizer, self.program, every_k=MONITOR_EVERY)
        self.opt_state = self.layout.init(self.optimizer, self.params)
        self.clips = args.optimizer.endswith("clip")
        out = None
        if self.layout.mesh:  # results keep the shardings of the arguments
            out = (*jax.tree.map(lambda x: x.sharding, (self.params, self.opt_state)), None, None)
        self.step = jax.jit(self._step, donate_argnums=(0, 1), out_shardings=out)
        self.evaluate = jax.jit(self.loss)
        self.next_logits = jax.jit(
            lambda params, tokens, last: self.forward(params, tokens)[0, last]
        )

    def forward(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, 256]."""
        return nnx.merge(self.graph, nnx.State(params))(tokens)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Mean loss in nats per byte of predicting tokens[:, 1:]."""
        return cross_entropy(self.forward(params, tokens[:, :-1]), tokens)

    def _step(self, params: Any, opt_state: Any, tokens: jax.Array):
        (loss, max_logits), grads = muonjax.value_and_grad(self.loss)(params, tokens)
        updates, opt_state = self.optimizer.update(grads, opt_state, params, max_logits=max_logits)
        by_layer = {f"logit/{module}": heads.max() for module, heads in max_logits.items()}
        return optax.apply_updates(params, updates), opt_state, loss, by_layer

    def sample(self, params: Any, prompt: bytes, length: int, context: int, seed: int) -> str:
        """Text that continues `prompt`, sampled at temperature 0.8."""
        tokens = list(prompt)
        for i in range(length):
            window = tokens[-context:]
            padded = np.zeros((1, context), np.int32)
            padded[0, : len(window)] = window
            logits = self.next_logits(params, padded, len(window) - 1)
            key = jax.random.fold_in(jax.random.key(seed), i)
            tokens.append(int(jax.random.categorical(key, logits / 0.8)))
        return bytes(tokens).decode(errors="replace")


class Log:
    """metrics.csv: a row for each step, written at once; a resumed run first drops the rows after its checkpoint."""

    def __init__(self, path: pathlib.Path, step: int):
        self.rows, names = [], []
        if step and path.exists():
            self.rows = [row for row in plots.read(path) if row["step"] <= step]
            names = path.read_text().partition("\n")[0].strip().split(",")
        self._file = path.open("w", newline="")
        self._writer: csv.DictWriter | None = None
        if self.rows:
            self._begin(names)
            self._writer.writerows({**row, "step": int(row["step"])} for row in self.rows)
            self._file.flush()

    def _begin(self, names: Iterable[str]) -> None:
        self._writer = csv.DictWriter(self._file, list(names))
        self._writer.writeheader()

    def write(self, row: dict[str, float | None]) -> None:
        """Append one step; None, for what is not measured in it, leaves its cell empty."""
        if self._writer is None:
            self._begin(row)
        self.rows.append({name: x for name, x in row.items() if x is not None})
        self._writer.writerow(self.rows[-1])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def identify(args: argparse.Namespace, text: Text) -> dict[str, Any]:
    """The settings of a run; a checkpoint with different ones is refused."""
    names = ("optimizer", "learning_rate", "threshold", "steps", "seed")
    names += ("layers", "width", "heads", "context", "batch")
    return {name: getattr(args, name) for name in names} | {"text": text.fingerprint}


def train(args: argparse.Namespace) -> float:
    """Train, and return the final held-out loss; metrics, picture and checkpoints are in `args.out`."""
    text = Text(args.data)
    trainer = Trainer(args)
    settings = identify(args, text)
    folder = args.out / "checkpoints"
    state, start = {"params": trainer.params, "opt_state": trainer.opt_state}, 0
    if args.resume:
        start, state = checkpoints.restore(folder, settings, state)
        print(f"Resuming {args.out} after step {start}.")
    elif checkpoints.steps(folder):
        raise SystemExit(
            f"{args.out} holds a run already: continue it with --resume {args.out}, or choose another --out."
        )
    first = jax.process_index() == 0  # of several processes, only one prints and writes
    args.out.mkdir(parents=True, exist_ok=True)
    saver = checkpoints.Checkpoints(folder, settings)
    log = Log(args.out / "metrics.csv" if first else pathlib.Path(os.devnull), start)
    if first:
        print(describe(trainer, args))
    bar = tqdm(
        range(start, args.steps),
        initial=start,
        total=args.steps,
        desc=args.optimizer,
        disable=args.quiet or not first,
        bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    )
    try:
        state, held_out = run(args, trainer, text, state, bar, log, saver)
    except KeyboardInterrupt:
        print(f"\nStopped. Continue from the last checkpoint with --resume {args.out}")
        raise SystemExit(130) from None
    finally:
        log.close()
        saver.close()
    params = state["params"]
    if not first:
        return held_out
    threshold = args.threshold if trainer.clips else None
    figure = plots.plot({args.optimizer: log.rows}, threshold, LOSS_NAME)
    plots.save(figure, args.out / "metrics.png")
    print(f"{args.optimizer}: held-out loss {held_out:.4f} nats per byte after {args.steps} steps")
    if args.sample and jax.process_count() == 1:
        print(
            f"--- a sample\n{trainer.sample(params, b'The ', args.sample, args.context, args.seed)}\n---"
        )
    print(f"Metrics, picture and checkpoints are in {args.out}")
    return held_out


def describe(trainer: Trainer, args: argparse.Namespace) -> str:
    """What the program says of the parameters and of attention: in one line, or also for each parameter."""
    if args.optimizer == "adamw":
        return "adamw: all parameters"
    table = muonjax.tabulate(trainer.params, trainer.program)
    muon = next(line for line in table.splitlines() if line.startswith("Muon: "))
    count = len(trainer.program.attentions)
    clips = f"the clip watches {count} attention{'s' * (count != 1)}"
    parts = [f"{muon}, read from the loss"] * args.optimizer.startswith("muon") + [
        clips
    ] * trainer.clips
    return f"{table}\n" * args.table + "; ".join(parts)


def run(
    args: argparse.Namespace,
    trainer: Trainer,
    text: Text,
    state: dict[str, Any],
    bar: tqdm,
    log: Log,
    saver: checkpoints.Checkpoints,
) -> tuple[dict[str, Any], float]:
    """Train for the steps that the progress bar counts; returns the last state and its held-out loss."""
    schedule, windows = make_schedule(args), text.held_out_windows(args.context)
    params, opt_state, held_out = state["params"], state["opt_state"], None
    for step in bar:
        began = time.perf_counter()
        tokens = trainer.layout.batch(text.batch(args.seed, step, args.batch, args.context))
        params, opt_state, loss, logits = trainer.step(params, opt_state, tokens)
        row = {"step": step + 1, "loss": float(loss), "held_out": None}
        row |= {"learning_rate": float(schedule(step)), "seconds": time.perf_counter() - began}
        done = step + 1
        if done % args.eval_every == 0 or done == args.steps:
            held_out = row["held_out"] = float(trainer.evaluate(params, windows))
        row |= {name: float(x) for name, x in meshes.whole(logits).items()} | measured(
            step, opt_state
        )
        log.write(row)
        parts = [
            f"loss {row['loss']:.2f}",
            *([] if held_out is None else [f"held out {held_out:.2f}"]),
        ]
        if trainer.clips:
            parts += [
                f"logit {row['qk_clip/largest']:.1f}",
                f"clipped {row['qk_clip/num_clipped']:.0f}",
            ]
        bar.set_postfix_str(", ".join(parts))
        if done % args.checkpoint_every == 0 or done == args.steps:
            saver.save(done, {"params": params, "opt_state": opt_state})
    if held_out is None:  # resumed after its last step
        held_out = float(trainer.evaluate(params, windows))
    return {"params": params, "opt_state": opt_state}, held_out


def measured(step: int, opt_state: Any) -> dict[str, float | None]:
    """What the optimizer's state keeps; the monitor's numbers only in the steps in which it measures."""
    found = muonjax.metrics(opt_state)
    stale = "monitor/" if step % MONITOR_EVERY else None
    return {name: None if stale and name.startswith(stale) else x for name, x in found.items()}


def compare(args: argparse.Namespace) -> None:
    """Train with MuonClip and with AdamW, each at its own learning rate, draw both, and say what each step costs."""
    runs, rates, seconds = {}, {}, {}
    for optimizer in ("muonclip", "adamw"):
        rates[optimizer] = args.learning_rate or LEARNING_RATES[optimizer]
        own = {
            "optimizer": optimizer,
            "out": args.out / optimizer,
            "learning_rate": rates[optimizer],
            "sample": 0,
        }
        train(argparse.Namespace(**{**vars(args), **own}))
        runs[optimizer] = plots.read(args.out / optimizer / "metrics.csv")
        seconds[optimizer] = statistics.median(row["seconds"] for row in runs[optimizer])
    plots.save(plots.plot(runs, args.threshold, LOSS_NAME), args.out / "compare.png")
    ends = [
        f"{runs[name][-1]['held_out']:.3f} with {name} (rate {rate:g})"
        for name, rate in rates.items()
    ]
    print(
        f"Held-out loss after {args.steps} steps, in nats per byte: {', '.join(ends)}.\n"
        f"A training step with muonclip takes {seconds['muonclip'] / seconds['adamw']:.2f} times as long.\n"
        f"The picture is {args.out / 'compare.png'}"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        help="what trains the model; None: muonclip, then adamw, for comparison",
    )
    add("--learning-rate", type=float, help="peak rate; None: the tuned one of the optimizer")
    add("--threshold", type=float, default=15.0, help="largest attention logit that QK-Clip allows")
    add("--steps", type=int, default=100, help="length of the run and of its schedule")
    add("--data", help="a file to train on; None: the text of Python's documentation")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=192, help="size of the residual stream")
    add("--heads", type=int, default=6, help="attention heads")
    add("--context", type=int, default=128, help="bytes that the model sees")
    add("--batch", type=int, default=16, help="windows per step")
    add("--seed", type=int, default=0, help="of initialization, data and sample")
    add("--out", type=pathlib.Path, help="folder of the run; None: runs/<optimizer>")
    add("--resume", type=pathlib.Path, metavar="OUT", help="continue the run in this folder")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--eval-every", type=int, default=25, help="steps between held-out losses")
    add("--sample", type=int, default=300, help="bytes of text to write at the end; 0 for none")
    add("--table", action="store_true", help="print where each parameter goes, and why")
    add("--quiet", action="store_true", help="no progress bar")
    add(
        "--mesh",
        type=meshes.parse,
        help="mesh axes and their sizes, such as fsdp=4,tensor=2; None: one device",
    )
    add(
        "--coordinator",
        help="host:port of process 0 of several; 'auto' under Slurm and on TPU pods",
    )
    add("--processes", type=int, default=1, help="number of processes, if not 'auto'")
    add("--process", type=int, default=0, help="number of this process")
    args = parser.parse_args(argv)
    for name in (
        "steps",
        "layers",
        "width",
        "heads",
        "context",
        "batch",
        "checkpoint_every",
        "eval_every",
    ):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if (args.resume or args.coordinator) and not args.optimizer:
        args.optimizer = "muonclip"  # only one run is resumed, or divided among processes
    if args.coordinator and not args.mesh:
        parser.error("--coordinator needs --mesh: several processes share one mesh")
    if args.mesh and (args.batch % args.mesh["fsdp"] or args.heads % args.mesh["tensor"]):
        parser.error("--mesh: fsdp must divide --batch, and tensor --heads")
    args.out = args.resume or args.out or pathlib.Path("runs") / (args.optimizer or "compare")
    if args.optimizer:
        args.learning_rate = args.learning_rate or LEARNING_RATES[args.optimizer]
    return args


def main() -> None:
    """The command."""
    args = parse()
    meshes.start(args)
    if args.optimizer:
        train(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
