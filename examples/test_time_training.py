"""Train a layer that updates its own weights by Muon during the forward pass (test-time training).

    python examples/test_time_training.py  # both memories and a picture; a few minutes on two cores

The task is associative recall of vectors: a sequence gives pairs of a key and a value, then asks for the values of new
keys. In every sequence the values are the keys after a rotation of its own, plus noise; the keys are concentrated in a
few directions. Attention sees one chunk of tokens only, so a memory has to keep the pairs for the questions:

- "msign": a fast weight W per head that maps keys to values. A chunk of tokens gives the gradient G of
  -|W k - v|^2 / 2, and Muon takes a step, S <- momentum S + G, W <- W + rate msign(S). The training loss is
  differentiated through all of this, including msign.
- "linear": linear attention, W <- decay W + rate v k^T. It has equally many parameters.

The task suits msign: the sum of v k^T is the rotation times a positive matrix, so the rotation is its polar factor.
Where keys are symbols that have to be distinguished, linear attention learns faster and recalls more.

Start reading at `Memory`.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import optax
from flax import nnx

import muonjax

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEMORIES = {"msign": 0.0, "linear": 3.0}
"""The kinds of memory, and the initial logit of each one's retention: a momentum of 1/2, a decay of 0.95."""


def recall_batch(
    key: jax.Array, size: int, pairs: int, questions: int, dimension: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens [size, pairs + questions, 2 * dimension + 1], and the expected values [size, questions, dimension].

    A token is a key, its value and a 1; in a question the last two are 0.
    """
    rotation_key, basis_key, key_key, noise_key, question_key = jax.random.split(key, 5)
    rotation, basis = (
        jax.random.orthogonal(k, dimension, (size,)) for k in (rotation_key, basis_key)
    )
    spread = jnp.geomspace(1, 0.1, dimension)
    keys = jax.random.normal(key_key, (size, pairs, dimension)) * spread @ basis
    noise = 0.05 * jax.random.normal(noise_key, keys.shape)
    asked = unit(jax.random.normal(question_key, (size, questions, dimension)))
    told = jnp.concatenate([keys, keys @ rotation + noise, jnp.ones((size, pairs, 1))], axis=-1)
    question = jnp.concatenate([asked, jnp.zeros((size, questions, dimension + 1))], axis=-1)
    return jnp.concatenate([told, question], axis=1), asked @ rotation


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length one."""
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


class Memory(nnx.Module):
    """Fast weights, one matrix per head, that each chunk of tokens reads and then updates."""

    def __init__(self, width: int, heads: int, chunk: int, kind: str, *, rngs: nnx.Rngs):
        size = width // heads
        project = functools.partial(
            nnx.LinearGeneral, width, (heads, size), use_bias=False, rngs=rngs
        )
        self.key, self.value = project(), project()
        self.out = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), use_bias=False, rngs=rngs)
        # A logit: momentum or decay
        self.keep = nnx.Param(jnp.full(heads, MEMORIES[kind], jnp.float32))
        self.rate = nnx.Param(jnp.zeros(heads))  # a logarithm
        # Five steps, as in Muon
        self.orthogonalize = functools.partial(muonjax.msign, coefficients=muonjax.polar_express(5))
        self.kind, self.chunk = kind, chunk

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        key, value = (
            jnp.reshape(p(x), (batch, length // self.chunk, self.chunk, *p.out_features))
            for p in (self.key, self.value)
        )
        key = unit(key)
        keep = jax.nn.sigmoid(self.keep[...])[:, None, None]
        rate = jnp.exp(self.rate[...])[:, None, None]

        def read_and_learn(carry, chunk):
            fast, momentum = carry  # [batch, heads, size, size]
            k, v = chunk  # [batch, chunk, heads, size]
            answer = jnp.einsum("bhij,bchj->bchi", fast, k)
            if self.kind == "msign":
                surprise = v - jnp.einsum("bhij,bchj->bchi", fast, k)
                momentum = keep * momentum + jnp.einsum("bchi,bchj->bhij", surprise, k)
                fast = fast + rate * self.orthogonalize(momentum)
            else:
                fast = keep * fast + rate * jnp.einsum("bchi,bchj->bhij", v, k)
            return (fast, momentum), answer

        heads, size = key.shape[-2:]
        blank = jnp.zeros((batch, heads, size, size))
        chunks = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (key, value))
        _, answers = jax.lax.scan(read_and_learn, (blank, blank), chunks)
        answers = jnp.swapaxes(answers, 0, 1).reshape(batch, length, heads, size)
        return self.out(answers)


class Model(nnx.Module):
    """Embedding, attention within a chunk, memory, perceptron: [batch, time, features] -> [batch, time, dimension]."""

    def __init__(self, args: argparse.Namespace, kind: str, *, rngs: nnx.Rngs):
        width = args.width
        dimension = width // args.heads
        self.embedding = nnx.Linear(2 * dimension + 1, width, use_bias=False, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            args.heads, width, use_bias=False, decode=False, rngs=rngs
        )
        self.memory_norm = nnx.RMSNorm(width, rngs=rngs)
        self.memory = Memory(width, args.heads, args.chunk, kind, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)
        self.final_norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, dimension, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        time = jnp.arange(tokens.shape[1])
        chunk = time // self.memory.chunk
        mask = (time[:, None] >= time) & (chunk[:, None] == chunk)
        x = x + self.attention(self.attention_norm(x), mask=mask)
        x = x + self.memory(self.memory_norm(x))
        x = x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))
        return self.head(self.final_norm(x))


class Trainer:
    """A model's structure, its optimizer, and the compiled step and evaluation."""

    def __init__(self, args: argparse.Namespace, kind: str):
        self.graph, params = nnx.split(Model(args, kind, rngs=nnx.Rngs(args.seed)), nnx.Param)
        self.params = nnx.to_pure_dict(params)
        rate = optax.warmup_cosine_decay_schedule(
            0.0, args.learning_rate, max(1, args.steps // 10), args.steps, 0.05 * args.learning_rate
        )
        self.questions = args.chunk
        self.batch = functools.partial(
            recall_batch, pairs=args.pairs, questions=args.chunk, dimension=args.width // args.heads
        )
        self.size, self.key = args.batch, jax.random.key(args.seed)
        program = muonjax.inspect(
            self.loss,
            self.params,
            *jax.eval_shape(functools.partial(self.batch, size=self.size), self.key),
        )
        self.optimizer = muonjax.muonclip(rate, program, weight_decay=0.01)
        self.opt_state = self.optimizer.init(self.params)
        self.step = jax.jit(self._step)
        self.evaluate = jax.jit(self.loss)

    def loss(self, params, tokens, values):
        """Squared distance from the expected values, which have norm 1."""
        answers = nnx.merge(self.graph, nnx.State(params))(tokens)
        return jnp.mean(jnp.sum((answers[:, -self.questions :] - values) ** 2, axis=-1))

    def _step(self, params, opt_state, step):
        tokens, values = self.batch(jax.random.fold_in(self.key, step), self.size)
        (loss, max_logits), grads = muonjax.value_and_grad(self.loss)(params, tokens, values)
        updates, opt_state = self.optimizer.update(grads, opt_state, params, max_logits=max_logits)
        return optax.apply_updates(params, updates), opt_state, loss

    def fresh_loss(self, params) -> float:
        """The loss on sixteen batches of sequences that were not trained on."""
        return float(
            self.evaluate(params, *self.batch(jax.random.fold_in(self.key, 2**30), 16 * self.size))
        )


def train(args: argparse.Namespace, kind: str) -> dict:
    """One run: its number of parameters, the loss at every step, and the loss on fresh sequences."""
    trainer = Trainer(args, kind)
    params, opt_state, losses = trainer.params, trainer.opt_state, []
    for step in range(1, args.steps + 1):
        params, opt_state, loss = trainer.step(params, opt_state, step)
        losses.append(float(loss))
        if step % max(1, args.steps // 10) == 0:
            print(f"{kind:7s} step {step:5d}  loss {losses[-1]:.3f}", flush=True)
    count, fresh = sum(p.size for p in jax.tree.leaves(params)), trainer.fresh_loss(params)
    print(f"{kind}: {count} parameters, loss on fresh sequences {fresh:.3f}")
    return {"memory": kind, "parameters": count, "fresh_loss": fresh, "losses": losses}


def draw(runs: list[dict], path: pathlib.Path) -> None:
    """The loss of the two memories."""
    figure, losses = plt.subplots(figsize=(5, 3.8), layout="constrained")
    for run in runs:
        label = {"msign": "msign (test-time Muon)", "linear": "linear attention"}[run["memory"]]
        losses.plot(
            range(1, len(run["losses"]) + 1),
            run["losses"],
            linewidth=1,
            label=f"{label}: {run['fresh_loss']:.3f} on fresh sequences",
        )
    losses.set(
        xlabel="step",
        ylabel="squared distance from the value",
        title="Loss (1: a model that knows nothing)",
        ylim=(0, 1.5),
    )
    losses.grid(alpha=0.3)
    losses.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=600)
    add("--pairs", type=int, default=32, help="pairs before the questions; a multiple of --chunk")
    add(
        "--chunk",
        type=int,
        default=16,
        help="tokens that the memory reads at once; and the number of questions",
    )
    add("--batch", type=int, default=32)
    add("--width", type=int, default=64)
    add(
        "--heads",
        type=int,
        default=4,
        help="of attention and memory; width / heads is the size of a key",
    )
    add("--learning-rate", type=float, default=1e-2)
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/test_time_training"))
    args = parser.parse_args(argv)
    for name in ("steps", "pairs", "chunk", "batch", "width", "heads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if args.pairs % args.chunk:
        parser.error(f"--pairs {args.pairs} must be a multiple of --chunk {args.chunk}")
    return args


def main() -> None:
    """The command."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [train(args, kind) for kind in MEMORIES]
    (args.out / "results.json").write_text(json.dumps({"runs": runs}))
    draw(runs, args.out / "test_time_training.png")
    print("picture:", args.out / "test_time_training.png")


if __name__ == "__main__":
    main()
