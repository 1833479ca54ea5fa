"""Time one optimizer step of GPT-2-small against optax.contrib.muon, in the same process.

12 layers, d = 768: attention kernels (768, 12, 64) and (12, 64, 768), MLP 768 x 3072, embedding 50,304 x 768, norms;
unscanned. Momentum has recorded spectra of a transformer in training, so that the polar error is meaningful. Both
optimizers get the same routing: matrices to Muon, the rest to AdamW.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from benchmarks.common import measure, momentum

PRESETS = {
    "fast": muonjax.NewtonSchulz.fast(),
    "balanced": muonjax.NewtonSchulz.balanced(),
}


def gpt2(
    layers: int, width: int, vocabulary: int, rng: np.random.Generator
) -> tuple[dict, dict]:
    """Gradients with recorded spectra, and the exact polar factors of the first layer's matrices."""
    spectra = momentum.spectra()
    heads = width // 64
    tree, polar = (
        {"wte": {"embedding": rng.standard_normal((vocabulary, width), np.float32)}},
        {},
    )
    shapes = {
        "query": (width, heads, 64),
        "key": (width, heads, 64),
        "value": (width, heads, 64),
        "out": (heads, 64, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    for layer in range(layers):
        block = {"norm": {"scale": rng.standard_normal(width).astype(np.float32)}}
        for index, (name, shape) in enumerate(shapes.items()):
            m = shape[0] * (64 if name == "out" else 1)
            n = int(np.prod(shape)) // m
            if layer == 0:
                x, polar[name] = momentum.matrix(spectra[11 * index + 5], m, n, rng)
            else:  # the same spectra, permuted: saves the factorization of 72 matrices
                first = tree["block_0"][name]["kernel"].reshape(m, n)
                x = first[rng.permutation(m)][:, rng.permutation(n)]
            block[name] = {"kernel": x.reshape(shape)}
        tree[f"block_{layer}"] = block
    return jax.tree.map(jnp.asarray, tree), polar


def main() -> None:
    args = measure.options(__doc__, layers=12, width=768, vocabulary=50_304, rounds=7)
    grads, polar = gpt2(
        args.layers, args.width, args.vocabulary, np.random.default_rng(0)
    )
    numbers = muonjax.dimension_numbers(grads)
    adam = optax.adamw(1e-3)
    optimizers = {
        "optax": optax.contrib.muon(
            1e-3, consistent_rms=0.2, muon_weight_dimension_numbers=numbers
        ),
        **{
            name: muonjax.muon(
                1e-3, newton_schulz=preset, program=numbers, adam=adam, weight_decay=0.0
            )
            for name, preset in PRESETS.items()
        },
    }
    rows, calls, compilations = {}, {}, {}

    def compile_anew(tx: optax.GradientTransformation, state: optax.OptState) -> Any:
        jax.clear_caches()
        return jax.jit(tx.update).lower(grads, state, grads).compile()

    for name, tx in optimizers.items():
        state = jax.jit(tx.init)(grads)
        compilations[name] = lambda tx=tx, state=state: compile_anew(tx, state) and None
        compiled = compile_anew(tx, state)
        updates, _ = compiled(grads, state, grads)
        errors, cosines = [], []
        for leaf, exact in polar.items():
            y = -np.asarray(updates["block_0"][leaf]["kernel"], np.float64).reshape(
                exact.shape
            )
            y = y / (1e-3 * 0.2 * max(exact.shape) ** 0.5)
            errors.append(momentum.polar_error(y, exact))
            cosines.append(momentum.cosine(y, exact))
        rows[name] = {
            "temporary_mib": round(
                compiled.memory_analysis().temp_size_in_bytes / 2**20, 1
            ),
            "state_mib": round(
                sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20, 1
            ),
            "polar_error_mean": round(float(np.mean(errors)), 4),
            "cosine_worst": round(float(np.min(cosines)), 4),
        }
        calls[name] = lambda compiled=compiled, state=state: compiled(
            grads, state, grads
        )
    compiling = measure.interleave(compilations, rounds=args.rounds)
    seconds = measure.interleave(calls, rounds=args.rounds)
    for name in rows:
        rows[name] = measure.summary(seconds[name], seconds["optax"]) | rows[name]
        base = rows["optax"]
        compile_row = measure.summary(compiling[name], compiling["optax"])
        rows[name] |= {f"compile_{key}": value for key, value in compile_row.items()}
        rows[name]["temporary_ratio"] = (
            rows[name]["temporary_mib"] / base["temporary_mib"]
        )
    measure.write("muon_step", {**vars(args), "optimizers": rows}, rows)


if __name__ == "__main__":
    main()
