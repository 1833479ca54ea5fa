"""Check this device: accuracy, kernels and speed, with a verdict.

    python -m muonjax [--quick]

One to three minutes. The exit status is 1 if any result is not finite, or off by more than is stated. Every result is
compared with float64: the root mean square error of polar factors on recorded momentum, their largest singular value
also on matrices that break bounds, and the relative error of symmetric products. The times are milliseconds, and in
parentheses in units of Optax's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muonjax import MuonDimensionNumbers, NewtonSchulz, __version__, muon, newton_schulz
from muonjax._common.platform_policy import policy_of
from pallas_kernels import symmetric_product
from pallas_kernels._symmetric_product import IMPLEMENTATIONS

PRESETS = {
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
    "accurate": NewtonSchulz.accurate(),
}
# The mean polar error that a preset may have on recorded momentum, by the bits of the products' operands.
STATED = {
    ("fast", 32): 0.27,
    ("fast", 16): 0.45,
    ("balanced", 32): 0.20,
    ("balanced", 16): 0.30,
    ("accurate", 32): 0.012,
}
# The largest singular value that a result may have on any matrix.
LARGEST = 1.2

# Singular values of seven momentum matrices of a small transformer, as -log10, and which of 192 they are, the largest
# first: every eleventh spectrum of benchmarks/data/momentum_spectra.npz, from the sixth on.
PLACES = (0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 176, 186, 190, 191)
RECORDED = np.loadtxt(
    """
0.00 0.19 0.44 0.79 1.01 1.25 1.57 2.03 2.43 2.80 3.24 3.60 4.05 4.60 5.60
0.00 0.53 0.78 0.95 1.31 1.60 1.88 2.28 2.57 2.79 2.99 3.11 3.19 3.25 3.27
0.00 0.18 0.31 0.43 0.53 0.73 0.96 1.32 1.65 1.99 2.44 2.78 3.22 3.84 4.22
0.00 0.56 0.71 0.85 1.05 1.36 1.71 2.18 2.54 2.85 3.27 3.57 4.11 4.59 4.83
0.00 0.10 0.15 0.23 0.38 0.55 0.77 1.11 1.43 1.83 2.34 2.77 3.33 3.79 4.07
0.00 0.20 0.23 0.34 0.49 0.67 1.02 1.44 1.66 1.85 2.03 2.13 2.21 2.24 2.26
0.00 0.40 0.44 0.55 0.74 0.99 1.31 1.79 2.16 2.51 2.92 3.23 3.74 4.37 5.96
""".strip().splitlines()
)


# A line for the user, and whether the result is right
Check = tuple[str, bool]


def checks(quick: bool) -> Iterator[Check]:
    """Everything that is checked, in the order in which it is printed."""
    shapes = [(128, 192)] if quick else [(256, 256), (256, 768)]
    for shape in shapes:
        for preset in PRESETS:
            yield from polar_errors(preset, shape)
    for implementation in IMPLEMENTATIONS:
        for dtype in ("float32", "bfloat16"):
            yield product_error(implementation, dtype, 64 if quick else 256)
    yield from times(quick)


def hostile_matrices(m: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Matrices [count, m, n] that break factorizations and bounds."""
    normal = rng.standard_normal((m, n))
    matrices = [
        np.zeros((m, n)),
        np.outer(normal[:, 0], normal[0]),  # rank 1
        normal[:, :3] @ normal[:3],  # rank 3
        np.full((m, n), 0.37),
        1 + 1e-3 * normal,
        np.outer(np.ones(m), normal[0]),  # equal rows
        normal[np.arange(m) // 2],  # each row twice
        normal * (rng.random(m) < 0.05)[:, None],  # most rows are zero
        np.eye(m)[:, :1] * np.eye(n)[:1],  # one entry
        np.eye(m, n),
        rng.choice([-1.0, 1.0], (m, n)),
    ]
    # In float32 the squares of some of these norms overflow, and others underflow.
    for scale in (1, 1e-30, 1e-20, 1e20, 1e30, 1e37):
        matrices.append(scale * normal)
    return np.stack(matrices)


def recorded_momenta(m: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Matrices [count, m, n] with the singular values of recorded momentum, and random singular vectors."""
    count = len(RECORDED)
    # The singular vectors are random, and each spectrum is stretched to m values.
    u, _ = np.linalg.qr(rng.standard_normal((count, m, m)))
    v, _ = np.linalg.qr(rng.standard_normal((count, n, m)))
    places = np.linspace(0, PLACES[-1], m)
    s = np.stack([10 ** -np.interp(places, PLACES, spectrum) for spectrum in RECORDED])
    # U diag(s) V^T
    return (u * s[:, None]) @ v.mT


def polar_errors(preset: str, shape: tuple[int, int]) -> list[Check]:
    """How far results of a preset are from the polar factor on recorded momentum, and their largest singular value."""
    settings = PRESETS[preset]
    dtype = policy_of(jnp.zeros(())).compute_dtype(jnp.float32, settings.compute_dtype)
    bits = jnp.finfo(dtype).bits
    rng = np.random.default_rng(0)
    m, n = shape
    adversaries = hostile_matrices(m, n, rng)
    momenta = recorded_momenta(m, n, rng)
    # One program for all matrices, [matrices, m, n], the momenta first
    x = np.concatenate([momenta, adversaries]).astype(np.float32)
    y = jax.jit(lambda x: newton_schulz(x, settings))(x)
    y = np.asarray(y, np.float64)
    errors = list(map(_polar_error, x[: len(momenta)], y))

    # NumPy's SVD refuses a NaN.
    largest = np.nan
    if np.isfinite(y).all():
        largest = np.linalg.norm(y, ord=2, axis=(-2, -1)).max()

    what = f"{preset}, {m} x {n}"
    return [
        _compared(f"{what}, recorded", float(np.mean(errors)), STATED[preset, bits]),
        _compared(f"{what}, largest singular value", largest, LARGEST),
    ]


def _compared(what: str, error: float, stated: float) -> Check:
    """The line of a result, which is right if its error is at most what is stated; NaN is not right."""
    return f"{what}: {error:.2g} (at most {stated:.2g})", bool(error <= stated)


def _polar_error(x: np.ndarray, y: np.ndarray) -> float:
    """The polar error |Y - U V^T|_F / sqrt(m) of a result Y for X = U S V^T [m, n] of full rank, in float64."""
    u, _, vh = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return float(np.linalg.norm(y - u @ vh) / len(x) ** 0.5)


def product_error(name: str, dtype: str, m: int) -> Check:
    """alpha X X^T + beta C by one implementation: its error, or the reason why it can't run here."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((2, m, m + 64)), dtype)
    c = symmetric_product(x, implementation="reference")
    what = f"{name!r}, {dtype}"
    try:
        s = symmetric_product(x, c=c, alpha=1.5, beta=-0.5, implementation=name)
    except NotImplementedError as reason:
        return f"{what}: {reason}", True
    except Exception as error:
        # A kernel that does not compile is what this is to find.
        return f"{what}: {type(error).__name__}: {error}"[:300], False
    s = np.asarray(s, np.float64)
    x = np.asarray(x, np.float64)
    exact = 1.5 * x @ x.mT - 0.5 * np.asarray(c, np.float64)
    error = float(np.linalg.norm(s - exact) / np.linalg.norm(exact))
    if not (s == s.mT).all():
        # The result has to be symmetric bit for bit.
        error = np.nan
    # A product in TF32 would be off by more than this.
    float32_eps = float(jnp.finfo(jnp.float32).eps)
    stated = max(float(jnp.finfo(dtype).eps), 16 * float32_eps)
    return _compared(what, error, stated)


def times(quick: bool) -> list[Check]:
    """The median time of an update of GPT-2-small's matrices by each preset, and by Optax: one line.

    What is checked is that the updates are finite.
    """
    width = 64 if quick else 768
    # A CPU takes seconds for all layers.
    on_cpu = jax.default_backend() == "cpu"
    layers = 1 if quick or on_cpu else 12
    # Query, key, value and output; up and down
    shapes = 4 * [(width, width)] + [(width, 4 * width), (4 * width, width)]
    draw = np.random.default_rng(2).standard_normal
    params = [jnp.asarray(draw(shape), "float32") for shape in layers * shapes]
    methods = {"Optax": optax.contrib.muon(1e-3)}
    for name in ("fast", "balanced"):
        # One entry for the whole tree: every leaf is a matrix.
        methods[name] = muon(1e-3, MuonDimensionNumbers(), newton_schulz=PRESETS[name])

    # The first call of each compiles it.
    steps = {}
    is_finite = True
    for name, method in methods.items():
        state = jax.jit(method.init)(params)
        # The gradients are the parameters: only times are measured.
        step = partial(jax.jit(method.update), params, state, params)
        updates, _ = step()
        is_finite &= bool(jnp.isfinite(optax.tree.norm(updates)))
        steps[name] = step

    # The methods take turns, so that what slows the device down slows all of them down.
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(3 if quick else 10):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - start)

    cells = []
    median_of_optax = statistics.median(seconds["Optax"])
    for name, values in seconds.items():
        median = statistics.median(values)
        cells.append(f"{name} {1e3 * median:.1f} ({median / median_of_optax:.2f})")
    what = f"an update of {layers} of 12 layers of width {width}, float32"
    return [(f"{what}: {', '.join(cells)}", is_finite)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m muonjax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="small matrices, whose times mean nothing"
    )
    quick = parser.parse_args(arguments).quick

    device = jax.devices()[0]
    policy = policy_of(jnp.zeros(()))
    kind = device.device_kind
    packages = ("jax", "jaxlib", "optax", "flax")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    print(f"{kind} ({policy.platform}); muonjax {__version__}, {versions}")

    num_wrong = 0
    for line, is_right in checks(quick):
        print(line if is_right else f"WRONG: {line}", flush=True)
        num_wrong += not is_right
    if num_wrong:
        print(f"{num_wrong} checks FAILED: please open an issue with these lines.")
        return 1
    print("Everything is right.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
