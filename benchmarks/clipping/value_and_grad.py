"""Measure what `muonjax.inspect` and `muonjax.value_and_grad` add to JAX's own tracing, flops and temporary memory.

    python -m benchmarks.clipping.value_and_grad    # about three minutes on one core

An unrolled decoder with the shapes of Llama-3-8B, from shapes alone, with and without `jax.checkpoint` around each
layer. Traced with 80 layers; compiled for a CPU with four, where each layer counts alike. Times are processor seconds.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import muonjax
from benchmarks.common import measure

WIDTH, HEADS, KEY_HEADS, SIZE, HIDDEN, VOCABULARY = 4096, 32, 8, 128, 14336, 128256


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def rotate(x):
    frequency = 1e4 ** (-jnp.arange(SIZE // 2) / (SIZE // 2))
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(w, x):
    y = norm(x, w["attention_norm"])
    q, k, v = (jnp.einsum("btd,dhs->bths", y, w[name]) for name in ("wq", "wk", "wv"))
    y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = x + jnp.einsum("bths,hsd->btd", y, w["wo"])
    y = norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def make_loss(wrap: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """A new function at each call, so that nothing is found in JAX's caches."""

    def loss(params, tokens):
        block = wrap(lambda w, x: layer(w, x))
        x = params["embedding"][tokens]
        for w in params["layers"]:
            x = block(w, x)
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    return loss


def shapes(layers: int) -> Any:
    """Parameters of a model, without values."""
    leaf = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    one = {
        "attention_norm": leaf((WIDTH,)),
        "wq": leaf((WIDTH, HEADS, SIZE)),
        "wk": leaf((WIDTH, KEY_HEADS, SIZE)),
        "wv": leaf((WIDTH, KEY_HEADS, SIZE)),
        "wo": leaf((HEADS, SIZE, WIDTH)),
        "mlp_norm": leaf((WIDTH,)),
        "gate": leaf((WIDTH, HIDDEN)),
        "up": leaf((WIDTH, HIDDEN)),
        "down": leaf((HIDDEN, WIDTH)),
    }
    ends = {"embedding": leaf((VOCABULARY, WIDTH)), "head": leaf((WIDTH, VOCABULARY))}
    return {"layers": [one] * layers, **ends}


def trace_ratios(
    wrap: Callable[[Any], Any], layers: int, rounds: int
) -> dict[str, Any]:
    """Processor seconds of inspecting and tracing, as ratios to JAX's own in the same round."""
    arguments = shapes(layers), jax.ShapeDtypeStruct((1, 128), jnp.int32)
    calls: dict[str, Callable[[Any], Any]] = {
        "make_jaxpr": lambda loss: jax.make_jaxpr(loss)(*arguments),
        "inspect": lambda loss: muonjax.inspect(loss, *arguments),
        "jax": lambda loss: jax.jit(jax.value_and_grad(loss)).trace(*arguments),
        "muonjax": lambda loss: jax.jit(muonjax.value_and_grad(loss)).trace(*arguments),
    }
    fresh = {
        name: lambda call=call: call(make_loss(wrap)) for name, call in calls.items()
    }
    seconds = measure.interleave(fresh, rounds=rounds, clock=time.process_time)
    return {
        "inspect": measure.summary(seconds["inspect"], seconds["make_jaxpr"]),
        "tracing": measure.summary(seconds["muonjax"], seconds["jax"]),
    }


def compiled_ratios(wrap: Callable[[Any], Any], layers: int) -> dict[str, float]:
    """Flops and temporary memory of the compiled program, as ratios to JAX's own."""
    arguments = shapes(layers), jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    flops, temporary = [], []
    for value_and_grad in (jax.value_and_grad, muonjax.value_and_grad):
        program: Any = (
            jax.jit(value_and_grad(make_loss(wrap))).lower(*arguments).compile()
        )
        flops.append(program.cost_analysis()["flops"])
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    return {"flops": flops[1] / flops[0], "temporary": temporary[1] / temporary[0]}


def main() -> None:
    args = measure.options(__doc__, layers=80, compiled_layers=4, rounds=7)
    rows = []
    for name, wrap in (
        ("as they are", lambda f: f),
        ("under `jax.checkpoint`", jax.checkpoint),
    ):
        row = {"layers": name, **trace_ratios(wrap, args.layers, args.rounds)}
        rows.append(row | compiled_ratios(wrap, args.compiled_layers))
        print(rows[-1], flush=True)
    measure.write("value_and_grad", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
