"""Measure what `muonjax.inspect` and `muonjax.value_and_grad` add to JAX's own tracing, flops and temporary memory.

    python -m benchmarks.clipping.value_and_grad    # about three minutes on one core

An unrolled decoder with the shapes of Llama-3-8B, from shapes alone, with and without `jax.checkpoint` around each
layer. Traced with 80 layers; compiled for a CPU with four, where each layer counts alike. Times are processor seconds.
"""

import functools
import statistics
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
    angle = jnp.arange(x.shape[1])[:, None] / 1e4 ** (
        jnp.arange(SIZE // 2) / (SIZE // 2)
    )
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
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
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(rounds + 1):  # the first is not counted
        for name, call in calls.items():
            loss, start = make_loss(wrap), time.process_time()
            call(loss)
            if count:
                seconds[name].append(time.process_time() - start)
    return {
        "inspect": measure.summary(seconds["inspect"], seconds["make_jaxpr"]),
        "tracing": measure.summary(seconds["muonjax"], seconds["jax"]),
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
    }


def compiled_ratios(wrap: Callable[[Any], Any], layers: int) -> dict[str, float]:
    """Flops and temporary memory of the compiled program, as ratios to JAX's own."""
    arguments = shapes(layers), jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    found = []
    for value_and_grad in (jax.value_and_grad, muonjax.value_and_grad):
        program = jax.jit(value_and_grad(make_loss(wrap))).lower(*arguments).compile()
        cost: Any = program.cost_analysis()
        memory: Any = program.memory_analysis()
        found.append((cost["flops"], memory.temp_size_in_bytes))
    (flops, temporary), (our_flops, our_temporary) = found
    return {"flops": our_flops / flops, "temporary": our_temporary / temporary}


def main() -> None:
    args = measure.options(__doc__, layers=80, compiled_layers=4, rounds=7)
    rows = []
    for name, wrap in (
        ("as they are", lambda f: f),
        ("under `jax.checkpoint`", jax.checkpoint),
    ):
        ratios = trace_ratios(wrap, args.layers, args.rounds) | compiled_ratios(
            wrap, args.compiled_layers
        )
        rows.append({"layers": name, **ratios})
        print(rows[-1], flush=True)
    measure.write("value_and_grad", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
