r"""Run 20,000 steps and compare weights and attention logits with analytic bounds.

Weights: a step is W <- (1 - a l) W - a U with rate a, weight decay l, and U of root mean square r' = r (1 + e):
r is the `rms` of `match_rms`, e the polynomials' error. So, for any gradients, the root mean square of W
never exceeds max(|W_0|, r'/l), and

- gradients of one direction end at W = -U / l, with RMS r'/l;
- independent ones (no momentum) add in squares, and end at r' sqrt(a / (l (2 - a l)));
- "adversarial" ones, -W, increase W at every step: they come as close to the bound as any gradients can.

Logits: the loss is minus the largest logits, so that every gradient raises them. With the clip each S <- gamma S plus
what one step adds. |x^T (Wq + Uq)(Wk + Uk)^T y| <= |x||y| (|Wq| + |Uq|)(|Wk| + |Uk|) in spectral norms, so one step
adds at most g = |x||y| (|Uq||Wk| + |Wq||Uk| + |Uq||Uk|) / sqrt(d), and S never passes threshold + g.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from benchmarks.common import measure

STEPS = 20_000
RATE, RMS, WEIGHT_DECAY = 0.02, 0.2, 0.1
SHAPES = {"wide": (16, 48), "tall": (48, 16), "stack": (2, 16, 16)}
NUMBERS = jax.tree.map(
    lambda _: muonjax.MuonDimensionNumbers(-2, -1), SHAPES, is_leaf=lambda s: isinstance(s, tuple)
)
# dtype of the parameters, and of the momentum.
PRECISIONS = {
    "float32": ("float32", None),
    "bfloat16 momentum": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", None),
}
POLAR_ERROR = 1e-3  # an upper bound for NewtonSchulz.accurate() in float32
THRESHOLD, HEADS, SIZE, POSITIONS = 5.0, 2, 8, 6


def rms(tree: Any) -> tuple[jax.Array, jax.Array]:
    """The root mean square of all leaves together, and the largest of a single leaf."""
    means = jnp.stack([jnp.mean(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)])
    return jnp.sqrt(means.mean()), jnp.sqrt(means.max())


def is_finite(tree: Any) -> bool:
    return all(
        bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)
    )


def normal(shapes: Any, seed: int, dtype: Any) -> Any:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


@functools.cache
def weight_norms(gradients: str, precision: str, *, steps: int = STEPS) -> dict[str, Any]:
    """The norms of three matrices under gradients of one kind, and their analytic values."""
    dtype, mu_dtype = PRECISIONS[precision]
    accurate = muonjax.NewtonSchulz.accurate()
    tx = muonjax.muon(
        RATE,
        decay=0.0 if gradients == "random" else 0.95,
        rms=RMS,
        weight_decay=WEIGHT_DECAY,
        mu_dtype=mu_dtype,
        program=NUMBERS,
        newton_schulz=accurate,
    )
    constant = normal(SHAPES, 1, dtype)

    def gradient(params: Any, step: jax.Array) -> Any:
        if gradients == "constant":
            return constant
        if gradients == "adversarial":
            return jax.tree.map(jnp.negative, params)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), len(params))
        return {
            name: jax.random.normal(key, p.shape, dtype)
            for (name, p), key in zip(params.items(), keys, strict=True)
        }

    def step(carry: Any, index: jax.Array):
        params, state = carry
        updates, state = tx.update(gradient(params, index), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), rms(params)

    @jax.jit
    def run(params: Any):
        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))

    start = jax.tree.map(lambda x: (0.02 * x).astype(dtype), normal(SHAPES, 0, "float32"))
    end, history = run(start)
    mean, largest = map(np.asarray, history)
    reach = RATE / (WEIGHT_DECAY * (2 - RATE * WEIGHT_DECAY))
    return {
        "gradients": gradients,
        "precision": precision,
        "steps": steps,
        "fixed_point": RMS * math.sqrt(reach) if gradients == "random" else RMS / WEIGHT_DECAY,
        "bound": (1 + POLAR_ERROR) * RMS / WEIGHT_DECAY,
        "half_way_rms": float(mean[steps // 4 : steps // 2].mean()),
        "final_rms": float(mean[-steps // 4 :].mean()),
        "largest_rms": float(largest.max()),
        "finite": is_finite(end),
    }


@functools.cache
def logits(clip: bool, precision: str, *, steps: int = STEPS) -> dict[str, Any]:
    """The largest attention logit of a run whose gradients only increase it."""
    dtype, mu_dtype = PRECISIONS[precision]
    site = muonjax.mha_site()
    settings = {"rms": RMS, "weight_decay": WEIGHT_DECAY, "mu_dtype": mu_dtype}
    tx = muonjax.muon(RATE, **settings)
    tx = muonjax.muonclip(RATE, site, threshold=THRESHOLD, **settings) if clip else tx
    width = HEADS * SIZE
    x = np.random.default_rng(0).standard_normal((1, POSITIONS, width))
    x = jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), jnp.float32)
    shapes = dict.fromkeys(("query", "key"), (width, HEADS, SIZE))
    params = {name: {"kernel": 0.1 * w} for name, w in normal(shapes, 1, "float32").items()}
    params = {"attention": jax.tree.map(lambda w: w.astype(dtype), params)}

    def heads(params: Any) -> jax.Array:
        """The largest logit of each head, differentiable."""
        q, k = (
            jnp.einsum("bti,ihd->bthd", x, params["attention"][name]["kernel"].astype(jnp.float32))
            for name in ("query", "key")
        )
        return jnp.einsum("bthd,bshd->hbts", q, k).max((1, 2, 3)) / math.sqrt(SIZE)

    def spectral(tree: Any) -> list[jax.Array]:
        """The largest spectral norm of all heads, of the query's and of the key's kernel."""
        kernels = [tree["attention"][name]["kernel"].astype(jnp.float32) for name in ("query", "key")]
        return [jnp.linalg.norm(w.transpose(1, 0, 2), 2, axis=(-2, -1)).max() for w in kernels]

    plain = muonjax.muon(RATE, **settings)

    def step(carry: Any, _):
        params, state = carry
        gradients = jax.grad(lambda p: -heads(p).sum())(params)
        statistics = {"attention": heads(params)}
        updates, after = tx.update(gradients, state, params, max_logits=statistics)
        unclipped = plain.update(gradients, state[0] if clip else state, params)[0]
        (wq, wk), (uq, uk) = spectral(params), spectral(unclipped)
        growth = (uq * wk + wq * uk + uq * uk) / math.sqrt(SIZE)
        return (optax.apply_updates(params, updates), after), (statistics["attention"].max(), growth)

    @jax.jit
    def run(params: Any):
        return jax.lax.scan(step, (params, tx.init(params)), length=steps)

    end, (largest, growth) = run(params)
    # Rounding to bfloat16 after the clip can raise a logit by one unit in the last place of each of its two factors.
    rounding = (1 + float(jnp.finfo(dtype).eps)) ** 2 if clip else 1.0
    return {
        "clip": clip,
        "precision": precision,
        "steps": steps,
        "threshold": THRESHOLD,
        "bound": (THRESHOLD + float(growth.max())) * rounding,
        "largest_logit": float(largest.max()),
        "final_logit": float(largest[-1]),
        "finite": is_finite(end),
    }


def main() -> None:
    weights = [
        weight_norms(gradients, precision)
        for gradients in ("constant", "random", "adversarial")
        for precision in PRECISIONS
    ]
    attention = [logits(clip, precision) for clip in (False, True) for precision in PRECISIONS]
    settings = {"rate": RATE, "rms": RMS, "weight_decay": WEIGHT_DECAY, "steps": STEPS}
    measure.write("long_runs", {**settings, "weights": weights, "logits": attention}, weights, attention)


if __name__ == "__main__":
    main()
