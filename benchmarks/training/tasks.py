"""Define the tasks that `optimizers.py` trains: model, data, held-out data; and a single run."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import text_data
import train_transformer
from flax import nnx

import muonjax


@dataclasses.dataclass(frozen=True)
class Task:
    """A model as a function of a seed; batches (inputs, labels) by seed and step; the held-out batch."""

    name: str
    model: Callable[[int], nnx.Module]
    batch: Callable[[int, int], tuple[Any, Any]]
    held_out: tuple[Any, Any]
    fingerprint: str
    sites: tuple[muonjax.Site, ...] = ()


class ConvNet(nnx.Module):
    """Images [batch, 8, 8, 1] -> logits [batch, 10]."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.second = nnx.Conv(width, 2 * width, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 2 * width, 4 * width, rngs=rngs)
        self.head = nnx.Linear(4 * width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        return self.head(nnx.relu(self.hidden(x)))


def digits(tiny: bool) -> Task:
    """scikit-learn's 1797 handwritten digits, a fifth of them held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order, :, :, None] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    cut = len(labels) * 4 // 5

    def batch(seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.random.default_rng((seed, step)).integers(0, cut, 64)
        return images[chosen], labels[chosen]

    return Task(
        "digits",
        lambda seed: ConvNet(4 if tiny else 32, rngs=nnx.Rngs(seed)),
        batch,
        (images[cut:], labels[cut:]),
        fingerprint=f"{len(labels)} images",
    )


def bytes_of(name: str, text: text_data.Text, tiny: bool) -> Task:
    """The example's transformer, at its own size, on a text."""
    layers, width, heads, context, size = (1, 16, 2, 16, 2) if tiny else (4, 192, 6, 128, 16)

    def split(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return windows[:, :-1], windows[:, 1:]

    return Task(
        name,
        lambda seed: train_transformer.Transformer(layers, width, heads, context, rngs=nnx.Rngs(seed)),
        lambda seed, step: split(text.batch(seed, step, size, context)),
        split(text.held_out_windows(context)),
        fingerprint=text.fingerprint,
        sites=(muonjax.mha_site("blocks/.*/attention"),),
    )


def documentation(tiny: bool) -> Task:
    """The text of Python's documentation, from `pydoc_data`."""
    return bytes_of("documentation", text_data.Text(), tiny)


def source(tiny: bool) -> Task:
    """The source of the standard library's modules in alphabetical order; the last 5 % are held out."""
    modules = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "source"
        path.write_bytes(b"\n".join(module.read_bytes() for module in modules))
        return bytes_of("source", text_data.Text(str(path)), tiny)


TASKS = {"digits": digits, "documentation": documentation, "source": source}


class Run:
    """One model and one optimizer: `step()` updates `params`, `measure()` evaluates the held-out data."""

    def __init__(self, task: Task, optimizer: Callable[..., optax.GradientTransformation], seed: int):
        model = task.model(seed)
        self.graph, state = nnx.split(model, nnx.Param)
        self.params = nnx.to_pure_dict(state)
        # From the model, not only from names: a kernel with one input channel could be a depthwise one.
        numbers = nnx.to_pure_dict(muonjax.dimension_numbers(model))
        self.optimizer = optax.with_extra_args_support(optimizer(numbers, task.sites))
        self.opt_state = self.optimizer.init(self.params)
        self.task, self.seed, self.steps_done = task, seed, 0
        self._step = jax.jit(self._moved, donate_argnums=(0, 1))
        self._measure = jax.jit(self._measured)

    def _forward(self, params: Any, batch: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """Mean loss; and accuracy, and the largest attention logits that the layers recorded."""
        inputs, labels = batch
        model = nnx.merge(self.graph, nnx.State(params))
        logits, sown = nnx.capture(lambda model, x: model(x), nnx.Intermediate)(model, inputs)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, ((logits.argmax(-1) == labels).mean(), sown)

    def _moved(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        grads, (_, sown) = jax.grad(self._forward, has_aux=True)(params, batch)
        settings = {"max_logits": sown} if self.task.sites else {}
        updates, opt_state = self.optimizer.update(grads, opt_state, params, **settings)
        return optax.apply_updates(params, updates), opt_state

    def _measured(self, params: Any) -> tuple[jax.Array, jax.Array]:
        loss, (accuracy, _) = self._forward(params, jax.tree.map(jnp.asarray, self.task.held_out))
        return loss, accuracy

    def step(self) -> Any:
        """Run the next step of the schedule."""
        batch = self.task.batch(self.seed, self.steps_done)
        self.params, self.opt_state = self._step(self.params, self.opt_state, batch)
        self.steps_done += 1
        return self.params

    def measure(self) -> tuple[float, float]:
        """Held-out loss (nats) and accuracy."""
        loss, accuracy = self._measure(self.params)
        return float(loss), float(accuracy)
