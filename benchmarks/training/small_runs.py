"""Train the small models with variants of Muon."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import text_data

import muonjax
from benchmarks.training.small_models import Model, loss

DECAY = 0.1
SIZES = {"steps": 300, "batch": 16, "width": 128, "layers": 2, "head_size": 16, "context": 64}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A variant of Muon for the matrices; all other parameters train with AdamW.

    Attributes:
      attention: As in `muonjax.dimension_numbers`.
      neurons: Whether `normalize_neurons` follows the orthogonalization.
      size: What sets the size of an update: a rule of `match_rms`, "hyperball", or "adamw", which is AdamW for all
        parameters.
      cautious: Whether the weight decay of the matrices is the cautious one.
      momentum: Dtype of the momentum of the matrices.
      look_ahead: Of `ema_nesterov` around all, times the learning rate over its maximum; from 15 % to 75 % of the
        steps.
      look_ahead_decay: Of its mean.
    """

    attention: Literal["whole", "heads"] = "whole"
    neurons: bool = False
    size: Literal["rms", "width", "spectral", "hyperball", "adamw"] = "rms"
    cautious: bool = False
    momentum: str | None = None
    look_ahead: float = 0.0
    look_ahead_decay: float = 0.99

    def optimizer(self, params: Any, rate: optax.Schedule, adam_rate: optax.Schedule) -> Any:
        """The Optax transformation of this recipe, for these parameters and learning rates."""
        decays = jax.tree.map(lambda p: p.ndim > 1, params)
        adam = functools.partial(optax.adamw, b2=0.95, weight_decay=DECAY, mask=decays)
        if self.size == "adamw":
            return adam(rate)
        numbers = muonjax.dimension_numbers(params, attention=self.attention)
        decay = muonjax.cautious_weight_decay if self.cautious else optax.add_decayed_weights
        if self.size == "hyperball":
            length = [muonjax.hyperball(rate, dimension_numbers=numbers)]
        else:
            length = [muonjax.match_rms(0.2, dimension_numbers=numbers, rule=self.size)]
            length += [decay(DECAY), optax.scale_by_learning_rate(rate)]
        matrices = optax.chain(
            muonjax.trace(0.95, nesterov=True, accumulator_dtype=self.momentum),
            muonjax.orthogonalize(dimension_numbers=numbers),
            *([muonjax.normalize_neurons(dimension_numbers=numbers)] if self.neurons else []),
            *length,
        )
        labels = jax.tree.map(
            lambda n: "adam" if n is None else "muon",
            numbers,
            is_leaf=lambda n: n is None or hasattr(n, "output_axis"),
        )
        return optax.partition({"muon": matrices, "adam": adam(adam_rate)}, labels)


class Trainer:
    """One model and one recipe, compiled once for all rates and seeds."""

    def __init__(
        self, model: Model, recipe: Recipe, steps: int, batch: int, text: text_data.Text | None = None
    ):
        self.model, self.recipe, self.steps, self.batch = model, recipe, steps, batch
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.loss = jax.jit(functools.partial(loss, model))
        self.text = text_data.Text() if text is None else text
        self.held_out = self.text.held_out_windows(model.context, most=256)

    def _optimizer(self, params: Any, rate: Any, adam_rate: Any) -> Any:
        """The optimizer with warm-up over a tenth of the steps, then cosine decay to a tenth; rates may be traced."""
        warmup = max(1, self.steps // 10)
        shape = optax.warmup_cosine_decay_schedule(1 / warmup, 1.0, warmup, max(self.steps, warmup + 1), 0.1)
        inner = self.recipe.optimizer(
            params, lambda count: rate * shape(count), lambda count: adam_rate * shape(count)
        )
        if not self.recipe.look_ahead:
            return inner

        def beta(count: jax.Array) -> jax.Array:
            on = (count >= 0.15 * self.steps) & (count < 0.75 * self.steps)
            return jnp.where(on, self.recipe.look_ahead * shape(count), 0.0)

        return muonjax.ema_nesterov(inner, beta, decay=self.recipe.look_ahead_decay)

    def _step(
        self, params: Any, state: Any, windows: jax.Array, rate: jax.Array, adam_rate: jax.Array
    ) -> Any:
        value, grads = jax.value_and_grad(functools.partial(loss, self.model))(params, windows)
        updates, state = self._optimizer(params, rate, adam_rate).update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def start(self, seed: int) -> tuple[Any, Any]:
        """Parameters and the optimizer's state."""
        params = jax.jit(self.model.init)(seed)
        return params, jax.jit(self._optimizer(params, 1.0, 1.0).init)(params)

    def windows(self, seed: int, step: int) -> Any:
        """The batch of a step: the same for every recipe."""
        return self.text.batch(seed, step, self.batch, self.model.context)

    def train(self, rate: float, adam_rate: float, seed: int) -> tuple[Any, Any]:
        """Parameters and the optimizer's state after training."""
        params, state = self.start(seed)
        for step in range(self.steps):
            params, state, _ = self.step(
                params, state, self.windows(seed, step), jnp.float32(rate), jnp.float32(adam_rate)
            )
        return params, state

    def run(self, rate: float, adam_rate: float, seed: int) -> float:
        """Train, and return the held-out loss; 10 nats if it is not finite."""
        params, state = self.train(rate, adam_rate, seed)
        weights = muonjax.ema_nesterov_params(state, params) if self.recipe.look_ahead else params
        held_out = float(self.loss(weights, self.held_out))
        return held_out if math.isfinite(held_out) else 10.0
