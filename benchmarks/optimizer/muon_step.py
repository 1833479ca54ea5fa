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


def gpt2(
    layers: int, width: int, vocabulary: int, rng: np.random.Generator
) -> tuple[dict, dict]:
    """Gradients with recorded spectra, and the exact polar factors of the first layer's matrices."""
    spectra, heads = momentum.spectra(), width // 64
    embedding = rng.standard_normal((vocabulary, width), np.float32)
    tree, polar, first = {"wte": {"embedding": embedding}}, {}, {}
    shapes = {
        "query": (width, heads, 64),
        "key": (width, heads, 64),
        "value": (width, heads, 64),
        "out": (heads, 64, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    for index, (name, shape) in enumerate(shapes.items()):
        m = width if name == "out" else shape[0]
        n = math.prod(shape) // m
        first[name], polar[name] = momentum.matrix(spectra[11 * index + 5], m, n, rng)
    for layer in range(layers):
        block = {"norm": {"scale": rng.standard_normal(width).astype(np.float32)}}
        for name, shape in shapes.items():
            x = first[name]
            if (
                layer
            ):  # the same spectra, permuted: saves the factorization of 72 matrices
                x = rng.permutation(rng.permutation(x, axis=0), axis=1)
            block[name] = {"kernel": x.reshape(shape)}
        tree[f"block_{layer}"] = block
    return jax.tree.map(jnp.asarray, tree), polar


def optimizers(numbers: Any) -> dict[str, optax.GradientTransformation]:
    """Optax's and ours by preset, with one routing."""
    adam = optax.adamw(1e-3)
    rows: dict[str, optax.GradientTransformation] = {
        "optax": optax.contrib.muon(
            1e-3, consistent_rms=0.2, muon_weight_dimension_numbers=numbers
        )
    }
    for name in ("fast", "balanced"):
        settings = {"newton_schulz": PRESETS[name], "adam": adam, "weight_decay": 0.0}
        rows[name] = muonjax.muon(1e-3, numbers, **settings)
    return rows


def main() -> None:
    args = measure.options(__doc__, layers=12, width=768, vocabulary=50_304, rounds=7)
    grads, polar = gpt2(
        args.layers, args.width, args.vocabulary, np.random.default_rng(0)
    )
    rows: dict[str, Any] = {}
    calls, compilations = {}, {}
    for name, tx in optimizers(muonjax.dimension_numbers(grads)).items():
        state = jax.jit(tx.init)(grads)
        arguments = grads, state, grads
        compilations[name] = (tx.update, *arguments)
        compiled = jax.jit(tx.update).lower(*arguments).compile()
        calls[name] = functools.partial(compiled, *arguments)
        updates = calls[name]()[0]["block_0"]
        results = [
            -np.asarray(updates[leaf]["kernel"], np.float64).reshape(exact.shape)
            / (1e-3 * 0.2 * max(exact.shape) ** 0.5)
            for leaf, exact in polar.items()
        ]
        errors = momentum.errors(results, list(polar.values()))
        rows[name] = {
            "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
            "state_mib": sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20,
            "polar_error_mean": errors["mean"],
            "cosine_worst": errors["worst_cosine"],
        }
    compiling = measure.compilations(compilations, rounds=args.rounds)
    seconds = measure.interleave(calls, rounds=args.rounds)
    for name, row in rows.items():
        row |= measure.summary(seconds[name], seconds["optax"])
        row["compile_ratio"] = measure.summary(compiling[name], compiling["optax"])[
            "ratio"
        ]
        row["temporary_ratio"] = row["temporary_mib"] / rows["optax"]["temporary_mib"]
    measure.write("muon_step", {**vars(args), "optimizers": rows}, rows)


if __name__ == "__main__":
    main()
