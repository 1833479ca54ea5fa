"""Time one GPT-2-small step of the variants of Muon against optax.contrib.muon and against `muon`, in one process.

The parameters and gradients of `muon_step`, the preset "balanced". A step that `monitor` measures and one that it does
not are timed apart: with every_k=10 the first is one step of ten.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from benchmarks.common import measure
from benchmarks.optimizer.muon_step import gpt2

EVERY = 10


def optimizers(grads: Any) -> dict[str, optax.GradientTransformation]:
    """By name; without weight decay, for Hyperball has none."""
    whole = muonjax.dimension_numbers(grads)
    heads = muonjax.dimension_numbers(grads, attention="heads")
    adam = optax.adamw(1e-3)

    def settings(numbers: Any) -> dict[str, Any]:
        return {"program": numbers, "adam": adam}

    muon = muonjax.muon(1e-3, weight_decay=0.0, **settings(whole))
    return {
        "Optax's": optax.contrib.muon(1e-3, consistent_rms=0.2, muon_weight_dimension_numbers=whole),
        "muon": muon,
        "per head": muonjax.muon(1e-3, weight_decay=0.0, **settings(heads)),
        "NorMuon": muonjax.normuon(1e-3, weight_decay=0.0, **settings(whole)),
        "int8 momentum": muonjax.muon(1e-3, weight_decay=0.0, mu_dtype=jnp.int8, **settings(whole)),
        "EMA-Nesterov": muonjax.ema_nesterov(muon, 0.3),
        "optax_contrib": muonjax.optax_contrib.muon(
            1e-3, consistent_rms=0.2, muon_weight_dimension_numbers=whole
        ),
        "Hyperball": muonjax.muonh(0.02, **settings(whole)),
        "monitor": muonjax.monitor(muon, every_k=EVERY),
    }


def main() -> None:
    args = measure.options(__doc__, layers=12, width=768, vocabulary=50_304, rounds=11)
    grads, _ = gpt2(args.layers, args.width, args.vocabulary, np.random.default_rng(0))
    calls = {}
    for name, tx in optimizers(grads).items():
        state = jax.jit(tx.init)(grads)
        step = jax.jit(tx.update).lower(grads, state, grads).compile()
        if name == "monitor":
            between = state._replace(count=jnp.ones_like(state.count))
            calls["a step that monitor measures"] = lambda step=step, state=state: step(grads, state, grads)
            calls["a step between"] = lambda step=step, state=between: step(grads, state, grads)
        else:
            calls[name] = lambda step=step, state=state: step(grads, state, grads)
    seconds = measure.interleave(calls, rounds=args.rounds)
    measured, between = (seconds.pop(name) for name in ("a step that monitor measures", "a step between"))
    seconds["monitor"] = [(m + (EVERY - 1) * b) / EVERY for m, b in zip(measured, between, strict=True)]
    rows = {
        name: {
            "optax": measure.summary(times, seconds["Optax's"]),
            "muon": measure.summary(times, seconds["muon"]),
        }
        for name, times in seconds.items()
    }
    results = {"every_k": EVERY, "measuring": measure.summary(measured, between), "optimizers": rows}
    shown = {name: {**row["optax"], "÷ muon": row["muon"]["ratio"]} for name, row in rows.items()}
    measure.write("variant_steps", {**vars(args), **results}, shown)


if __name__ == "__main__":
    main()
