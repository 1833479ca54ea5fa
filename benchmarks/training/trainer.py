"""One method at one size: its compiled step, what a step costs, and a run that a checkpoint continues."""

import functools
import math
import os
import pathlib
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import muonjax
from benchmarks.common import measure
from benchmarks.training.decoder import Attend, Decoder, Size, attention
from benchmarks.training.methods import METHODS, schedule
from benchmarks.training.source_text import Text

EVERY = 10  # steps between two measurements of "muonclip, exact"
EVALUATIONS = 12  # in a run
HELD_OUT = 8  # batches
Tree = Any


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean loss in nats per token of predicting tokens[:, 1:]."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


class Task:
    """The model with one attention, and what there is of its training before an optimizer comes.

    Args:
      implementation: "xla" or "cudnn".
      parts: A batch is cut into as many, which come one after the other.
    """

    def __init__(self, size: Size, implementation: str, parts: int):
        self.size, self.implementation, self.parts = size, implementation, parts
        self.graph, self.params = self._split(nnx.eval_shape(lambda: self._model(0)))
        self.tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
        # XLA's softmax is visible, and both attentions have the same weights.
        self.program = muonjax.inspect(self.visible_loss, self.params, self.tokens)
        self.init = jax.jit(lambda seed: self._split(self._model(seed))[1])

    def _model(self, seed: jax.typing.ArrayLike) -> Decoder:
        return Decoder(self.size, rngs=nnx.Rngs(jax.random.key(seed)))

    def _split(self, model: Decoder) -> tuple[Any, Tree]:
        graph, params = nnx.split(model, nnx.Param)
        return graph, nnx.to_pure_dict(params)

    def loss(
        self, params: Tree, tokens: jax.Array, attend: Attend
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss in nats per token, and the largest logits that `attend` measures."""
        logits, max_logits = nnx.merge(self.graph, nnx.State(params))(
            tokens[:, :-1], attend
        )
        return cross_entropy(logits, tokens), max_logits

    def visible_loss(self, params: Tree, tokens: jax.Array) -> jax.Array:
        return self.loss(params, tokens, attention("xla"))[0]

    def gradients(
        self, statistic: str | None, params: Tree, tokens: jax.Array, count: jax.Array
    ) -> Tree:
        """((loss, largest logits), gradients), the means of the parts and their largest logits."""

        def of_part(tokens: jax.Array) -> Tree:
            if statistic == "program":
                return muonjax.value_and_grad(self.visible_loss)(params, tokens)
            attend = attention(self.implementation, statistic, count % EVERY == 0)
            return jax.value_and_grad(self.loss, has_aux=True)(params, tokens, attend)

        if self.parts == 1:
            return of_part(tokens)
        (loss, max_logits), grads = lax.map(
            of_part, tokens.reshape(self.parts, -1, tokens.shape[-1])
        )
        max_logits = jax.tree.map(lambda x: x.max(0), max_logits)
        return (loss.mean(), max_logits), jax.tree.map(lambda x: x.mean(0), grads)

    @functools.cached_property
    def without_optimizer(self) -> Any:
        """Loss and gradients alone, without a statistic: (params, tokens, count) -> loss and gradients."""
        return jax.jit(functools.partial(self.gradients, None))

    @functools.cached_property
    def evaluate(
        self,
    ) -> Callable[[Tree, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
        """Of parameters and a held-out batch: the loss, and the largest logits, exact whatever the optimizer."""
        loss = functools.partial(
            self.loss, attend=attention(self.implementation, "exact")
        )
        return jax.jit(loss).lower(self.params, self.tokens).compile()


class Trainer:
    """A task with an optimizer. Rate and number of steps are arguments of its step: all runs share one program."""

    def __init__(self, task: Task, name: str):
        self.task, self.method = task, METHODS[name]
        self.statistic = self.method.statistic
        if self.statistic == "free":
            self.statistic = "program" if task.implementation == "xla" else "bound"

    def _optimizer(
        self, rate: jax.typing.ArrayLike, steps: jax.typing.ArrayLike
    ) -> Any:
        return self.method.make(schedule(rate, steps), self.task.program)

    def _step(
        self, state: Tree, tokens: jax.Array, rate: Any, steps: Any, count: Any
    ) -> Any:
        params = state["params"]
        (loss, max_logits), grads = self.task.gradients(
            self.statistic, params, tokens, count
        )
        clip = {"max_logits": max_logits} if self.statistic else {}
        updates, opt_state = self._optimizer(rate, steps).update(
            grads, state["opt_state"], params, **clip
        )
        return {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
        }, loss

    def init(self, seed: int) -> Tree:
        """The state before the first step."""
        params = self.task.init(seed)
        return {
            "params": params,
            "opt_state": jax.jit(self._optimizer(0.0, 1.0).init)(params),
        }

    @functools.cached_property
    def step(self) -> Any:
        """The whole step, compiled: (state, tokens, rate, steps, count) -> (state, loss). The state is donated."""
        start = time.perf_counter()
        step = jax.jit(self._step, donate_argnums=0)
        lowered = step.lower(
            jax.eval_shape(self.init, 0), self.task.tokens, *numbers(0, 1, 0)
        )
        traced = time.perf_counter()
        compiled = lowered.compile()
        self.seconds = {
            "trace": traced - start,
            "compile": time.perf_counter() - traced,
        }
        return compiled


@functools.cache
def fitting(size: Size, implementation: str, name: str) -> Trainer:
    """The trainer that cuts a batch into the fewest parts with which its step fits into the device's memory."""
    parts, tokens = 1, random_tokens(size)
    while True:
        task = task_of(size, implementation, parts)
        trainer = Trainer(task, name)
        try:
            # First without the optimizer, so that what all methods share is tuned before the compiler is timed.
            jax.block_until_ready(
                task.without_optimizer(task.init(0), tokens, np.int32(0))
            )
            jax.block_until_ready(
                trainer.step(trainer.init(0), tokens, *numbers(0, 1, 0))
            )
            return trainer
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or parts == size.batch:
                raise
        parts *= 2


task_of = functools.cache(Task)


def numbers(
    rate: float, steps: int, count: int
) -> tuple[np.float32, np.float32, np.int32]:
    """The last arguments of a step."""
    return np.float32(rate), np.float32(steps), np.int32(count)


def random_tokens(size: Size) -> jax.Array:
    return jax.random.randint(
        jax.random.key(0), (size.batch, size.context + 1), 0, size.vocabulary
    )


def time_step(trainer: Trainer, calls: int = EVERY, rounds: int = 4) -> dict[str, Any]:
    """What a whole step takes, what it takes without the optimizer, and what it takes to compile.

    The device has `calls` steps in its queue, and one of them measures logits where every tenth does.
    """
    size = trainer.task.size
    state, tokens = trainer.init(0), random_tokens(size)

    def whole() -> Any:
        nonlocal state
        for count in range(calls):
            state, loss = trainer.step(state, tokens, *numbers(1e-4, 100, count))
        return loss

    def without() -> Any:
        for count in range(calls):
            result = trainer.task.without_optimizer(
                state["params"], tokens, np.int32(count)
            )
        return result

    seconds = measure.interleave({"whole": whole, "without": without}, rounds=rounds)
    timed = measure.summary(seconds["whole"], seconds["without"])
    memory = jax.devices()[0].memory_stats() or {}
    return timed | {
        "seconds": timed["seconds"] / calls,
        "optimizer_share": 1 - 1 / timed["ratio"],
        "tokens": size.tokens,
        "compile_seconds": trainer.seconds,
        "state_bytes": bytes_of(state),
        "temporary_bytes": trainer.step.memory_analysis().temp_size_in_bytes,
        "peak_bytes": memory.get("peak_bytes_in_use"),
    }


def bytes_of(tree: Tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


class Run(NamedTuple):
    """What distinguishes a run from the others of its trainer."""

    rate: float
    seed: int
    steps: int


def train(
    trainer: Trainer,
    text: Text,
    run: Run,
    checkpoint: pathlib.Path,
    left: Callable[[], float],
) -> Iterator[dict[str, Any]]:
    """Train from the checkpoint, or from the start where there is none, as far as the time allows.

    Args:
      checkpoint: A file, written every minute and when the time is up, and removed after the last step.
      left: The seconds that are left.

    Yields:
      The results up to now, after each evaluation.
    """
    size, every = trainer.task.size, max(5, run.steps // EVALUATIONS)
    identity = run._asdict() | {"data": text.record["hash"], "tokens": size.tokens}
    names = ("step", "seconds", "held_out", "largest_logit")
    curve: dict[str, list[float | None]] = {name: [] for name in names}
    row = identity | {"done": 0, "seconds": 0.0, "complete": False, "curve": curve}
    state = trainer.init(run.seed)
    state, row = restore(checkpoint, identity) or (state, row)
    held_out = text.held_out_batches(HELD_OUT, size.batch, size.context)
    to_evaluate = 5.0 if row["done"] else add_evaluation(row, trainer, state, held_out)
    to_save = 2 + bytes_of(state) / 2e8  # seconds
    yield row
    previous, first = jnp.zeros(()), row["done"]
    began = saved = time.perf_counter()
    for step in range(first, run.steps):
        # One step stays in flight, during which the next batch is read.
        tokens = jax.device_put(text.batch(run.seed, step, size.batch, size.context))
        state, loss = trainer.step(state, tokens, *numbers(run.rate, run.steps, step))
        jax.block_until_ready(previous)
        previous = loss
        row["done"] = step + 1
        a_step = (time.perf_counter() - began) / (row["done"] - first)
        stop = left() < 3 * a_step + to_evaluate + to_save
        evaluates = row["done"] % every == 0 or row["done"] == run.steps
        if not (stop or evaluates):
            continue
        jax.block_until_ready(loss)
        row["seconds"] += time.perf_counter() - began
        if evaluates:
            to_evaluate = add_evaluation(row, trainer, state, held_out)
            row["complete"] = (
                row["done"] == run.steps or row["curve"]["held_out"][-1] is None
            )
            yield row
        if row["complete"]:
            checkpoint.unlink(missing_ok=True)
            return
        if stop or time.perf_counter() - saved > 60:
            save(checkpoint, state, row)
            saved = time.perf_counter()
        if stop:
            return
        began, first = time.perf_counter(), row["done"]


def add_evaluation(
    row: dict[str, Any], trainer: Trainer, state: Tree, held_out: np.ndarray
) -> float:
    """Add the held-out loss and the largest logit to the results; returns how many seconds it took."""
    evaluate = trainer.task.evaluate
    began = time.perf_counter()
    results = [evaluate(state["params"], batch) for batch in held_out]
    losses, max_logits = zip(*jax.device_get(results), strict=True)
    point = {
        "step": row["done"],
        "seconds": row["seconds"],
        "held_out": float(np.mean(losses)),
        "largest_logit": float(np.max(jax.tree.leaves(max_logits))),
    }
    for name, value in point.items():
        # None: the run diverged.
        row["curve"][name].append(round(value, 5) if math.isfinite(value) else None)
    if trainer.statistic:
        row["clipped"] = int(
            muonjax.metrics(state["opt_state"])["qk_clip/total_clipped"]
        )
    return time.perf_counter() - began


def save(path: pathlib.Path, state: Tree, row: dict[str, Any]) -> None:
    """Write a checkpoint under another name first, so that a killed process leaves the one before."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps((jax.device_get(state), row)))
    os.replace(unfinished, path)


def restore(
    path: pathlib.Path, identity: dict[str, Any]
) -> tuple[Tree, dict[str, Any]] | None:
    """The state and the results of a checkpoint; None without one, or if it is damaged or another run's."""
    try:
        state, row = pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return (jax.device_put(state), row) if identity.items() <= row.items() else None
