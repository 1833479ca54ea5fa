"""Measure memory, time and accuracy of the gradients of LoHa adapters.

24 layers of 1024 × 1024 with rank-16 adapters, float32, x ← tanh(x · (W + ΔW)): temporary memory from the
compiler, for layers under `lax.scan` and unrolled layers, and time interleaved with plain differentiation.

    python -m benchmarks.adapters.hadamard             # everything, some minutes on two cores
    python -m benchmarks.adapters.hadamard accuracy    # a part, and the picture again
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import measure
from muonjax import hadamard_dot, hadamard_linear, hadamard_weight

LAYERS, WIDTH, RANK = 24, 1024, 16
TOKENS = (16, 64, 256, 1024, 4096)
MIB = 2**20


def product(a, b, c, d):
    return (a @ b) * (c @ d)


VARIANTS = {
    "plain": lambda x, w, *f: x @ (w + product(*f)),
    "jax.checkpoint": jax.checkpoint(lambda x, w, *f: x @ (w + product(*f))),
    "hadamard_weight": lambda x, w, *f: x @ (w + hadamard_weight(*f)),
    "hadamard_linear, rows": functools.partial(hadamard_linear, form="rows"),
    "hadamard_linear, kronecker": functools.partial(hadamard_linear, form="kronecker"),
    "hadamard_linear, auto": hadamard_linear,
}


def shapes(tokens):
    """(adapters, kernels, x), stacked over layers."""
    factors = [(WIDTH, RANK), (RANK, WIDTH)] * 2
    return (
        [jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for shape in factors],
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32),
    )


def gradient(linear, layout):
    """The gradient with respect to the adapters.

    "scan": a loop over stacked layers. "unrolled": unrolled layers with one array per parameter, as in most models.
    "unrolled, cut": unrolled layers whose parameters are slices of the stack.
    """

    def loss(adapters, kernels, x):
        if layout == "scan":
            x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(linear(x, *layer)), None), x, (kernels, *adapters))
            return jnp.mean(x**2)
        for i in range(LAYERS):
            x = jnp.tanh(linear(x, kernels[i], *(a[i] for a in adapters)))
        return jnp.mean(x**2)

    return jax.grad(loss)


def unstack(adapters, kernels, x):
    """The arguments of "unrolled": lists of layers instead of stacks."""
    cut = functools.partial(jax.tree.map, lambda a: [a[i] for i in range(LAYERS)])
    return cut(adapters), cut(kernels), x


def memory(tokens_list=TOKENS):
    rows = []
    for layout in ("scan", "unrolled", "unrolled, cut"):
        for tokens in tokens_list:
            row = {"layers": layout, "tokens": tokens}
            given = shapes(tokens) if layout != "unrolled" else jax.eval_shape(unstack, *shapes(tokens))
            for name, linear in VARIANTS.items():
                compiled = jax.jit(gradient(linear, layout)).lower(*given).compile()
                row[name] = compiled.memory_analysis().temp_size_in_bytes / MIB
            rows.append(row)
            print(row, flush=True)
    return rows


def random_values(tokens):
    rng = np.random.default_rng(0)
    adapters, kernels, x = (
        jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), part)
        for part in shapes(tokens)
    )
    return [0.1 * a for a in adapters], kernels / WIDTH**0.5, x


def times(tokens_list=(64, 1024), rounds=7):
    rows = []
    for tokens in tokens_list:
        for layout in ("scan", "unrolled"):
            given = random_values(tokens) if layout == "scan" else unstack(*random_values(tokens))
            compiled = {
                name: jax.jit(gradient(linear, layout)).lower(*given).compile()
                for name, linear in VARIANTS.items()
            }
            seconds = measure.interleave(
                {name: functools.partial(run, *given) for name, run in compiled.items()}, rounds=rounds
            )
            for name, measured in seconds.items():
                row = {"layers": layout, "tokens": tokens, "variant": name}
                rows.append(row | measure.summary(measured, seconds["plain"]))
                print(rows[-1], flush=True)
    return rows


def relative(got, want):
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def accuracy():
    """One layer in float32 against the same derivative of the plain product in float64."""
    rows = []
    rng = np.random.default_rng(1)
    m, n = WIDTH, 768
    given = [rng.standard_normal(s) for s in [(64, m), (m, n), (m, RANK), (RANK, n), (m, RANK), (RANK, n)]]
    given[2:] = [f / RANK**0.5 for f in given[2:]]
    target = rng.standard_normal((64, n))
    calls = {
        "plain": lambda s, x, w, *f: x @ (w + s * product(*f)),
        "hadamard_weight": lambda s, x, w, *f: x @ (w + hadamard_weight(*f, scale=s)),
        "hadamard_dot, rows": lambda s, x, w, *f: x @ w + hadamard_dot(x, *f, scale=s, form="rows"),
        "hadamard_dot, kronecker": lambda s, x, w, *f: x @ w + hadamard_dot(x, *f, scale=s, form="kronecker"),
        "hadamard_linear, rows": lambda s, x, w, *f: hadamard_linear(x, w, *f, scale=s, form="rows"),
        "hadamard_linear, kronecker": lambda s, x, w, *f: hadamard_linear(
            x, w, *f, scale=s, form="kronecker"
        ),
    }

    def gradients(call, dtype):
        arrays = [jnp.asarray(a, dtype) for a in (0.5, *given, target)]

        def loss(*arrays):
            return 0.5 * jnp.mean((call(*arrays[:-1]) - arrays[-1]) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 3, 4, 5, 6)))(*arrays)

    with jax.enable_x64(True):
        truth = [np.asarray(g) for g in gradients(calls["plain"], jnp.float64)]
    for name, call in calls.items():
        errors = [relative(g, t) for g, t in zip(gradients(call, jnp.float32), truth, strict=True)]
        names = ("scale", "x", "w1a", "w1b", "w2a", "w2b")
        rows.append({"variant": name} | dict(zip(names, errors, strict=True)))
    return rows


def plot(results, to):
    """Memory against tokens, one panel per layout."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"scan": "layers under lax.scan", "unrolled": "unrolled layers"}
    figure, all_axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", sharey=True)
    styles = ["k--", "C7:", "C1s-", "C0o-", "C2^-"]
    for axes, (layout, title) in zip(all_axes, panels.items(), strict=True):
        rows = [row for row in results["memory"] if row["layers"] == layout]
        names = [name for name in VARIANTS if name != "hadamard_linear, auto"]
        for name, style in zip(names, styles, strict=True):
            axes.plot([r["tokens"] for r in rows], [r[name] for r in rows], style, label=name, markersize=5)
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axes.set_xticks([r["tokens"] for r in rows], [str(r["tokens"]) for r in rows], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("temporary memory (MiB)")
    ticks = [10, 30, 100, 300, 1000]
    all_axes[0].set_yticks(ticks, [str(t) for t in ticks])
    all_axes[1].legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"Gradient of {LAYERS} layers of {WIDTH} × {WIDTH} with LoHa adapters of rank {RANK}, float32"
    )
    figure.savefig(to, dpi=120)


if __name__ == "__main__":
    measure.run_parts(__doc__, "hadamard", {"accuracy": accuracy, "memory": memory, "time": times})
    plot(measure.read("hadamard"), measure.RESULTS.parents[1] / "docs" / "images" / "hadamard_memory.png")
