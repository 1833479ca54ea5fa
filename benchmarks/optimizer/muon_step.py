"""Time one optimizer step of GPT-2-small against optax.contrib.muon, in the same process.

12 layers, d = 768: attention kernels (768, 12, 64) and (12, 64, 768), MLP 768 x 3072, embedding 50,304 x 768, norms;
unscanned. Momentum has recorded spectra of a transformer in training, so that the polar error is meaningful. Both
optimizers get the same routing: matrices to Muon, the rest to AdamW.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from benchmarks.common import measure, momentum
from benchmarks.common.accelerator_model import PRESETS

LAYERS = 12
WIDTH = 768
HEADS = 12
VOCABULARY = 50_304
RATE = 1e-3
RMS = 0.2
SHAPES = {
    "query": (WIDTH, HEADS, 64),
    "key": (WIDTH, HEADS, 64),
    "value": (WIDTH, HEADS, 64),
    "out": (HEADS, 64, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def gradients(rng: np.random.Generator) -> tuple[dict, dict]:
    """Gradients with recorded spectra, and the exact polar factors of the first layer's matrices."""
    spectra = momentum.spectra()
    embedding = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
    tree: dict[str, Any] = {"wte": {"embedding": embedding}}
    matrices = {}
    polars = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        m = WIDTH if name == "out" else shape[0]
        n = math.prod(shape) // m
        spectrum = spectra[11 * index + 5]
        matrices[name], polars[name] = momentum.matrix(spectrum, m, n, rng)
    for layer in range(LAYERS):
        block = {"norm": {"scale": rng.standard_normal(WIDTH).astype(np.float32)}}
        for name, shape in SHAPES.items():
            x = matrices[name]
            if layer > 0:
                # The same spectra, permuted: this saves the factorization of 72 matrices.
                x = rng.permutation(rng.permutation(x, axis=0), axis=1)
            block[name] = {"kernel": x.reshape(shape)}
        tree[f"block_{layer}"] = block
    return jax.tree.map(jnp.asarray, tree), polars


def optimizers(numbers: Any) -> dict[str, optax.GradientTransformation]:
    """Optax's and ours by preset, with one routing."""
    theirs = optax.contrib.muon(
        RATE, consistent_rms=RMS, muon_weight_dimension_numbers=numbers
    )
    rows: dict[str, optax.GradientTransformation] = {"optax": theirs}
    for name in ("fast", "balanced"):
        rows[name] = muonjax.muon(
            RATE,
            numbers,
            newton_schulz=PRESETS[name],
            adam=optax.adamw(RATE),
            weight_decay=0.0,
        )
    return rows


def errors(block: Any, polars: dict[str, np.ndarray]) -> dict[str, float]:
    """Polar error and cosine of the updates of a layer."""
    factors = []
    for name, polar in polars.items():
        update = np.asarray(block[name]["kernel"], np.float64).reshape(polar.shape)
        # update = -rate * rms * sqrt(max(m, n)) * U V^T
        factors.append(-update / (RATE * RMS * max(polar.shape) ** 0.5))
    result = momentum.errors(factors, list(polars.values()))
    return {
        "polar_error_mean": result["mean"],
        "cosine_worst": result["worst_cosine"],
    }


def compiled(update: Any, arguments: tuple[Any, ...]) -> Any:
    """The program of an update."""
    return jax.jit(update).lower(*arguments).compile()


def main() -> None:
    grads, polars = gradients(np.random.default_rng(0))
    steps = {}
    compilations = {}
    rows = {}
    for name, tx in optimizers(muonjax.dimension_numbers(grads)).items():
        arguments = grads, jax.jit(tx.init)(grads), grads
        compilations[name] = functools.partial(compiled, tx.update, arguments)
        program = compilations[name]()
        steps[name] = functools.partial(program, *arguments)
        updates, _ = steps[name]()
        rows[name] = errors(updates["block_0"], polars)
        rows[name]["temporary"] = program.memory_analysis().temp_size_in_bytes
    compiling = measure.summaries(
        measure.interleave(compilations, before=jax.clear_caches)
    )
    times = measure.summaries(measure.interleave(steps))
    for name, row in rows.items():
        row |= times[name]
        row["compile_ratio"] = compiling[name]["ratio"]
        row["temporary_ratio"] = row["temporary"] / rows["optax"]["temporary"]
    measure.write("muon_step", {"optimizers": rows})


if __name__ == "__main__":
    main()
