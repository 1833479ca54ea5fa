"""Record the singular values of momentum at several widths, and the error that deflation leaves.

Trains the example's transformer with Muon, keeps Nesterov's look-ahead momentum, and records the singular values
of every matrix of the blocks. `--save` writes them in the format of benchmarks/data/momentum_spectra.npz, so that
claims based on that file can be checked on another model.
"""

import argparse
import pathlib
from typing import Any

import jax
import numpy as np
import train_transformer
from text_data import Text

from benchmarks.common import measure
from muonjax import NewtonSchulz
from muonjax._newton_schulz.coefficients import evaluate

DECAY = 0.95
DIRECTIONS = (0, 16, 32, 64, 128)


def record(width: int, layers: int, steps: int, every: int) -> dict[str, np.ndarray]:
    """Singular values, by step and path, largest first."""
    sizes = f"--width {width} --heads {width // 32} --layers {layers} --steps {steps}"
    args = train_transformer.parse(["--optimizer", "muon", *sizes.split()])
    text, trainer = Text(None), train_transformer.Trainer(args)
    params, opt_state = trainer.params, trainer.opt_state

    def loss(params, tokens):
        return train_transformer.cross_entropy(trainer.forward(params, tokens[:, :-1])[0], tokens)

    gradient, spectra = jax.jit(jax.grad(loss)), {}
    momentum = jax.tree.map(lambda p: 0 * p, params["blocks"])
    for step in range(steps):
        tokens = text.batch(args.seed, step, args.batch, args.context)
        grads = gradient(params, tokens)["blocks"]
        momentum = jax.tree.map(lambda m, g: DECAY * m + g, momentum, grads)
        if (step + 1) % every == 0:
            ahead = jax.tree.map(lambda m, g: DECAY * m + g, momentum, grads)
            for path, leaf in jax.tree_util.tree_leaves_with_path(ahead):
                if leaf.ndim > 1:
                    matrix = np.asarray(leaf, np.float64)
                    matrix = (
                        matrix.reshape(width, -1) if leaf.shape[0] == width else matrix.reshape(-1, width)
                    )
                    name = f"step {step + 1} {jax.tree_util.keystr(path)}"
                    spectra[name] = np.linalg.svd(matrix, compute_uv=False)
        params, opt_state, *_ = trainer.step(params, opt_state, tokens)
    return spectra


def describe(spectra: list[np.ndarray]) -> dict[str, Any]:
    """Statistics of the spectra, and each preset's error if the k largest values are reduced to the next one."""
    spectra = [s / s[0] for s in spectra]
    row: dict[str, Any] = {
        "matrices": len(spectra),
        "stable_rank": float(np.mean([np.sum(s**2) for s in spectra])),
        "median": float(np.median([np.median(s) for s in spectra])),
        "tenth_percentile": float(np.median([np.quantile(s, 0.1) for s in spectra])),
    }
    for name, preset in (("fast", NewtonSchulz.fast()), ("balanced", NewtonSchulz.balanced())):
        for k in DIRECTIONS:
            cut = [np.minimum(s, s[k]) / s[k] for s in spectra if k < len(s)]
            errors = [np.sqrt(np.mean((evaluate(preset.steps, s) - 1) ** 2)) for s in cut]
            row[f"{name}, k = {k}"] = float(np.mean(errors))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[192, 384, 768])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument(
        "--save", type=pathlib.Path, help="folder for the singular values, one npz file per width"
    )
    args = parser.parse_args()
    rows = []
    for width in args.widths:
        spectra = record(width, args.layers, args.steps, args.every)
        rows.append({"width": width, **describe(list(spectra.values()))})
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(args.save / f"spectra_{width}.npz", allow_pickle=False, **spectra)
    sizes = {name: getattr(args, name) for name in ("layers", "steps", "every")}
    measure.write("spectra", {**sizes, "widths": rows}, rows)


if __name__ == "__main__":
    main()
