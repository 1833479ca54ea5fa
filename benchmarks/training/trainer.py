"""One method at one size: its compiled step, what a step costs, and a run that a checkpoint continues."""

import functools
import math
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
Row = measure.Row


class Task:
    """The model with one attention, and what there is of its training before an optimizer comes.

    Args:
      implementation: "xla" or "cudnn".
      parts: A batch is cut into as many, which come one after the other.
    """

    def __init__(self, size: Size, implementation: str, parts: int):
        self.size = size
        self.implementation = implementation
        self.parts = parts
        self.graph, self.params = self._split(nnx.eval_shape(lambda: self._model(0)))
        self.tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
        # XLA's softmax is visible, and both attentions have the same weights.
        self.program = muonjax.inspect(self.visible_loss, self.params, self.tokens)
        self.init = jax.jit(lambda seed: self._split(self._model(seed))[1])

    def _model(self, seed: Any) -> Decoder:
        return Decoder(self.size, rngs=nnx.Rngs(jax.random.key(seed)))

    def _split(self, model: Decoder) -> tuple[Any, Tree]:
        graph, params = nnx.split(model, nnx.Param)
        return graph, nnx.to_pure_dict(params)

    def loss(
        self, params: Tree, tokens: jax.Array, attend: Attend
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss in nats per token of predicting tokens[:, 1:], and the largest logits that `attend` measures."""
        model = nnx.merge(self.graph, nnx.State(params))
        logits, max_logits = model(tokens[:, :-1], attend)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
        return losses.mean(), max_logits

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
    def evaluate(self) -> Any:
        """(params, held-out tokens) -> the loss, and the largest logits, exact whatever the optimizer."""
        attend = attention(self.implementation, "exact")
        return jax.jit(functools.partial(self.loss, attend=attend))


task_of = functools.cache(Task)


class Trainer:
    """A task with an optimizer. Rate and number of steps are arguments of its step: all runs share one program."""

    def __init__(self, task: Task, name: str):
        self.task = task
        self.method = METHODS[name]
        self.statistic = self.method.statistic
        if self.statistic == "free":
            self.statistic = "program" if task.implementation == "xla" else "bound"

    def _optimizer(self, rate: Any, steps: Any) -> Any:
        return self.method.make(schedule(rate, steps), self.task.program)

    def _step(
        self, state: Tree, tokens: jax.Array, rate: Any, steps: Any, count: Any
    ) -> Any:
        params = state["params"]
        (loss, max_logits), grads = self.task.gradients(
            self.statistic, params, tokens, count
        )
        clip = {"max_logits": max_logits} if self.statistic else {}
        tx = self._optimizer(rate, steps)
        updates, opt_state = tx.update(grads, state["opt_state"], params, **clip)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}, loss

    def init(self, seed: int) -> Tree:
        """The state before the first step."""
        params = self.task.init(seed)
        opt_state = jax.jit(self._optimizer(0.0, 1.0).init)(params)
        return {"params": params, "opt_state": opt_state}

    @functools.cached_property
    def step(self) -> Any:
        """The whole step, compiled: (state, tokens, rate, steps, count) -> (state, loss). The state is donated."""
        state = jax.eval_shape(self.init, 0)
        start = time.perf_counter()
        step = jax.jit(self._step, donate_argnums=0)
        lowered = step.lower(state, self.task.tokens, *numbers(0, 1, 0))
        traced = time.perf_counter()
        compiled = lowered.compile()
        end = time.perf_counter()
        self.seconds = {"trace": traced - start, "compile": end - traced}
        return compiled


@functools.cache
def fitting(size: Size, implementation: str, name: str) -> Trainer:
    """The trainer that cuts a batch into the fewest parts with which its step fits into the device's memory."""
    parts = 1
    tokens = random_tokens(size)
    while True:
        task = task_of(size, implementation, parts)
        trainer = Trainer(task, name)
        rate, steps, count = numbers(0, 1, 0)
        try:
            # First without the optimizer, so that what all methods share is tuned before the compiler is timed.
            jax.block_until_ready(task.without_optimizer(task.init(0), tokens, count))
            state = trainer.init(0)
            jax.block_until_ready(trainer.step(state, tokens, rate, steps, count))
            return trainer
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or parts == size.batch:
                raise
        parts *= 2


def numbers(rate: float, steps: int, count: int) -> tuple[Any, Any, Any]:
    """The last arguments of a step."""
    return np.float32(rate), np.float32(steps), np.int32(count)


def random_tokens(size: Size) -> jax.Array:
    shape = size.batch, size.context + 1
    return jax.random.randint(jax.random.key(0), shape, 0, size.vocabulary)


def time_step(trainer: Trainer, rounds: int = 4) -> Row:
    """What a whole step takes, what it takes without the optimizer, and what it takes to compile.

    The device has `EVERY` steps in its queue, one of which measures logits where every tenth does.
    """
    size = trainer.task.size
    state = trainer.init(0)
    tokens = random_tokens(size)

    def whole() -> Any:
        nonlocal state
        for count in range(EVERY):
            state, loss = trainer.step(state, tokens, *numbers(1e-4, 100, count))
        return loss

    def without() -> Any:
        gradients = trainer.task.without_optimizer
        for count in range(EVERY):
            result = gradients(state["params"], tokens, np.int32(count))
        return result

    seconds = measure.interleave({"whole": whole, "without": without}, rounds=rounds)
    timed = measure.summary(seconds["whole"], seconds["without"])
    return timed | {
        "seconds": timed["seconds"] / EVERY,
        "optimizer_share": 1 - 1 / timed["ratio"],
        "tokens": size.tokens,
        "compile_seconds": trainer.seconds,
        "state_bytes": bytes_of(state),
        "temporary_bytes": trainer.step.memory_analysis().temp_size_in_bytes,
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
) -> Iterator[Row]:
    """Train from the checkpoint, or from the start where there is none, as far as the time allows.

    Args:
      checkpoint: A file, written every minute and when the time is up, and removed after the last step.
      left: The seconds that are left.

    Yields:
      The results up to now, after each evaluation.
    """
    size = trainer.task.size
    every = max(5, run.steps // EVALUATIONS)
    identity = run._asdict() | {"data": text.record["hash"], "tokens": size.tokens}
    names = ("step", "seconds", "held_out", "largest_logit")
    curve: dict[str, list[float | None]] = {name: [] for name in names}
    row = identity | {"done": 0, "seconds": 0.0, "complete": False, "curve": curve}
    state = trainer.init(run.seed)
    state, row = restore(checkpoint, identity) or (state, row)
    held_out = text.held_out_batches(HELD_OUT, size.batch, size.context)
    if not row["done"]:
        add_evaluation(row, trainer, state, held_out)
    yield row
    saved = time.perf_counter()
    while not row["complete"]:
        began = time.perf_counter()
        last = min(row["done"] + every, run.steps)
        state = advance(trainer, text, run, state, range(row["done"], last))
        row["seconds"] += time.perf_counter() - began
        row["done"] = last
        add_evaluation(row, trainer, state, held_out)
        diverged = row["curve"]["held_out"][-1] is None
        row["complete"] = diverged or last == run.steps
        yield row
        if row["complete"]:
            checkpoint.unlink(missing_ok=True)
            return
        # The next evaluation comes after as many steps, and then there is a checkpoint to write.
        to_go_on = 1.2 * (time.perf_counter() - began) + 2 + bytes_of(state) / 2e8
        stop = left() < to_go_on
        if stop or time.perf_counter() - saved > 60:
            content = pickle.dumps((jax.device_get(state), row))
            measure.replace(checkpoint, content)
            saved = time.perf_counter()
        if stop:
            return


def advance(trainer: Trainer, text: Text, run: Run, state: Tree, steps: range) -> Tree:
    """The state after these steps. One step stays in flight, during which the next batch is read."""
    size = trainer.task.size
    previous = jnp.zeros(())
    for step in steps:
        tokens = jax.device_put(text.batch(run.seed, step, size.batch, size.context))
        state, loss = trainer.step(state, tokens, *numbers(run.rate, run.steps, step))
        jax.block_until_ready(previous)
        previous = loss
    return jax.block_until_ready(state)


def add_evaluation(
    row: Row, trainer: Trainer, state: Tree, held_out: np.ndarray
) -> None:
    """Add the held-out loss and the largest logit to the results."""
    evaluate = trainer.task.evaluate
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
        clipped = muonjax.metrics(state["opt_state"])["qk_clip/total_clipped"]
        row["clipped"] = int(clipped)


def restore(path: pathlib.Path, identity: Row) -> tuple[Tree, Row] | None:
    """The state and the results of a checkpoint; None without one, or if it is damaged or another run's."""
    try:
        state, row = pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None
    return (jax.device_put(state), row) if identity.items() <= row.items() else None
