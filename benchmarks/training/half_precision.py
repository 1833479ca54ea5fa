"""Held-out losses of the iterations of half precision, emulated on a CPU, each at three learning rates.

    python -m benchmarks.training.half_precision [--minutes 20] [METHOD ...]

The example's transformer of 1.9 million parameters trains for 120 steps with Muon. Runs differ only in how the momentum
is made orthogonal, and in the rate and the seed, on which weights and data depend. Each run is written when it ends,
and a later call goes on with those that are missing.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import train_transformer
from text_data import Text

import muonjax
from benchmarks.common import measure
from benchmarks.optimizer.half_precision import EMULATED, optax_bfloat16
from benchmarks.training.methods import schedule
from benchmarks.training.steps_to_loss import matching
from muonjax._common.platform import Policy
from muonjax._matrices.batching import Function
from muonjax._newton_schulz.polar_factor import polar_factor
from muonjax._transforms import orthogonalize

BATCH, CONTEXT, STEPS = 8, 128, 120
RATES = (4e-3, 2e-3, 8e-3)
SEEDS = (0, 1, 2)
SETTINGS = {
    "five steps": muonjax.NewtonSchulz(),
    "six steps": muonjax.NewtonSchulz(
        coefficients=muonjax.polar_express(6, lower=1e-3)
    ),
    "four steps": muonjax.NewtonSchulz.fast(),
}


def iteration(name: str, platform: str) -> Callable[[jax.Array], jax.Array]:
    """Our iteration as the platform runs it."""
    return functools.partial(
        polar_factor, settings=SETTINGS[name], policy=Policy(platform)
    )


METHODS = {
    "five steps, float16": iteration("five steps", "gpu"),
    "six steps, float16": iteration("six steps", "gpu"),
    "Optax, bfloat16": jnp.vectorize(optax_bfloat16, signature="(m,n)->(m,n)"),
    "balanced, float32": iteration("five steps", "cpu"),
    "five steps, bfloat16": iteration("five steps", "tpu"),
    "six steps, bfloat16": iteration("six steps", "tpu"),
    "four steps, float16": iteration("four steps", "gpu"),
}


@functools.cache
def example(seed: int) -> train_transformer.Trainer:
    """The example's model, loss and program, with the parameters before the first step."""
    flags = {"optimizer": "adamw", "seed": seed, "batch": BATCH, "context": CONTEXT}
    return train_transformer.Trainer(
        train_transformer.parse([f"--{name}={value}" for name, value in flags.items()])
    )


class Trainer:
    """The example with Muon, whose momentum a method makes orthogonal. All runs share one program."""

    def __init__(self, method: str):
        self.function = Function(lambda x, axis_name=(): METHODS[method](x))
        self.step = jax.jit(self._step, donate_argnums=1, compiler_options=EMULATED)
        self.text = Text()

    def _optimizer(self, rate: jax.typing.ArrayLike) -> Any:
        return muonjax.muon(schedule(rate, STEPS), example(0).program)

    def _step(
        self, params: Any, opt_state: Any, tokens: jax.Array, rate: jax.Array
    ) -> Any:
        grads = jax.grad(example(0).loss)(params, tokens)
        with mock.patch.object(
            orthogonalize, "polar_function", return_value=self.function
        ):
            updates, opt_state = self._optimizer(rate).update(grads, opt_state, params)
        squares = [
            jnp.mean(x**2) for x in jax.tree.leaves(updates["blocks"]) if x.ndim > 1
        ]
        size = jnp.sqrt(jnp.mean(jnp.stack(squares)))
        return optax.apply_updates(params, updates), opt_state, size

    def run(self, rate: float, seed: int) -> dict[str, float]:
        """The held-out loss after a run in nats per byte, and the mean size of its updates in units of the rate."""
        params = example(seed).params
        opt_state = self._optimizer(rate).init(params)
        sizes = []
        for count in range(STEPS):
            tokens = self.text.batch(seed, count, BATCH, CONTEXT)
            params, opt_state, size = self.step(
                params, opt_state, tokens, jnp.float32(rate)
            )
            sizes.append(float(size))
        loss = example(0).evaluate(
            params, self.text.held_out_windows(CONTEXT, most=256)
        )
        return {
            "held_out": round(float(loss), 5),
            "update": statistics.mean(sizes) / rate,
        }


def at_best_rate(runs: list[dict[str, Any]], method: str) -> dict[str, Any]:
    """The least mean over the seeds that any rate reaches, and the range of the seeds there."""
    rows = []
    for rate in RATES:
        losses = [run["held_out"] for run in matching(runs, method=method, rate=rate)]
        if losses:
            row = {"rate": rate, "seeds": len(losses), "mean": statistics.mean(losses)}
            rows.append(row | {"least": min(losses), "most": max(losses)})
    return min(rows, key=lambda row: row["mean"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], default=[])
    parser.add_argument(
        "--minutes", type=float, default=20, help="after which no run begins"
    )
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    trainer = functools.cache(Trainer)
    runs = measure.read("training_half_precision").get("runs", [])
    for rate, seed, method in itertools.product(RATES, SEEDS, args.methods or METHODS):
        if time.monotonic() > end or matching(
            runs, method=method, rate=rate, seed=seed
        ):
            continue
        began = time.monotonic()
        row = trainer(method).run(rate, seed)
        runs.append({"method": method, "rate": rate, "seed": seed, **row})
        print(runs[-1], f"{time.monotonic() - began:.0f} s", flush=True)
        best = {
            name: at_best_rate(runs, name)
            for name in {run["method"]: None for run in runs}
        }
        measure.write("training_half_precision", {"best": best, "runs": runs})


if __name__ == "__main__":
    main()
