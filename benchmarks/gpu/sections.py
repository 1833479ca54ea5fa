"""The sections of benchmarks/gpu/run.py, each a process. A result is one line of JSON on standard output.

python -m benchmarks.gpu.sections SECTION [--dry-run]
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import traceback

# Standard output belongs to the results; whatever else prints goes to the log.
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

# The kernels, each of which is named or refuses. The first one is what the tuning sections are about.
KERNELS = ["hopper", "quack"]
# Whole updates of these matrices: benchmarks/common/accelerator_model.py has their modelled figures.
TREES = ["GPT-2-small", "Llama-8B, 4 layers"]

# Stacks of a transformer of 1.3 billion parameters (24 layers, d = 2048): attention and feed-forward.
MODEL = [(96, 2048, 2048), (48, 2048, 8192)]
# What time cuts off is last.
CHECKS = [(64, 64), (200, 136), (130, 67), (3, 320, 192), (1000, 1000), (4096, 4096), (4, 2048, 2048)]
CHECKS += [(8, 1024, 1024), (2048, 512), (8192, 1024), (1024, 4096), (2, 37, 5)]
PRODUCTS = [(8192, 8192), (4096, 4096), (8, 4096, 4096), (8, 2048, 2048), (4096, 16384), (2048, 8192)]
PRODUCTS += [(2048, 2048), (8, 1024, 1024), (1024, 1024), *MODEL]
FUSIONS = [(4096, 4096), (8, 2048, 2048)]
TILES = [(1, 4096, 4096), (8, 2048, 2048), (1, 8192, 8192), (1, 2048, 8192), (8, 1024, 1024)]


def dry_run():
    """Sizes for a CPU, and an implementation that runs there."""
    KERNELS[:] = ["blocked"]
    TREES[:] = ["small"]
    for shapes in (CHECKS, PRODUCTS, FUSIONS, TILES):
        small = {(*(min(n, 2) for n in batch), max(8, m // 64), max(8, k // 64)) for *batch, m, k in shapes}
        shapes[:] = sorted(small, key=len)[:4]


def record(**row):
    print(json.dumps(row, default=str), file=OUT, flush=True)


def measured(**case):
    """Runs a function now and records what it returns, or its error."""

    def run(function):
        print("begins:", case, file=sys.stderr, flush=True)  # a case that hangs is the log's last
        try:
            result = function()
        except Exception as error:
            result = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "where": traceback.format_exc()[-1500:],
            }
        record(**case, **result)

    return run


def draw(shape, dtype, seed):
    import jax

    # On the device, where it is fast. Normal, never constant: a product of zeros takes less time.
    return jax.random.normal(jax.random.key(seed), shape, "float32").astype(dtype)


def op(implementation, **settings):
    """The compiled symmetric product of X, and of Y and C where they are given."""
    import jax

    from pallas_kernels import symmetric_product

    return jax.jit(
        lambda x, y=None, c=None: symmetric_product(x, y=y, c=c, implementation=implementation, **settings)
    )


def timed(calls, *, rounds=5, iterations=5, model=True):
    """Milliseconds of each (compiled function, *arguments), in turn; the first is the others' baseline.

    By two clocks: the device's own, the sum of its kernels' times (CUPTI), and the host's around calls back to
    back, which counts launches and gaps too and works anywhere.
    """
    import jax
    from jax.experimental.mosaic.gpu import profiler

    def device(function, *arguments):
        _, times = profiler.measure(function, iterations=iterations)(*arguments)
        return statistics.median(times)

    def host(function, *arguments):
        begin = time.perf_counter()
        for _ in range(iterations):
            out = function(*arguments)
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / iterations * 1e3

    clocks = {"device": device, "host": host}
    seen = {(name, clock): [] for name in calls for clock in clocks}
    errors = {}
    for name, (function, *arguments) in calls.items():
        try:
            jax.block_until_ready(function(*arguments))
        except Exception as error:
            errors |= dict.fromkeys(
                [(name, clock) for clock in clocks], f"{type(error).__name__}: {error}"[:500]
            )
    for _ in range(rounds):
        for name, call in calls.items():
            for clock, measure in clocks.items():
                if (name, clock) in errors:
                    continue
                try:
                    seen[name, clock].append(measure(*call))
                except Exception as error:
                    errors[name, clock] = f"{type(error).__name__}: {error}"[:500]
    baseline = next(iter(calls))
    times: dict[str, dict] = {
        name: {"modelled_ms": modelled(*call)} if model else {} for name, call in calls.items()
    }
    for (name, clock), own in seen.items():
        if (name, clock) in errors:
            times[name][f"{clock}_error"] = errors[name, clock]
        elif (baseline, clock) in errors:
            times[name][f"{clock}_ms"] = own
        else:
            ratios = sorted(a / b for a, b in zip(own, seen[baseline, clock], strict=True))
            times[name][clock] = {
                "median_ms": statistics.median(own),
                "ratio": statistics.median(ratios),
                "ratio_range": [ratios[0], ratios[-1]],
            }
    return {"baseline": baseline, "times": times}


def modelled(function, *arguments):
    """Milliseconds of the compiled program at both ends of the roofline; None where its text can't be counted."""
    from benchmarks.common import hlo_launches, roofline

    try:
        text = function.lower(*arguments).compile().as_text()
        return [1e3 * seconds for seconds in roofline.total_seconds("H100", hlo_launches.launches(text))]
    except Exception:
        return None


def device():
    import jax

    first = jax.devices()[0]
    names = "compute_capability", "core_count", "platform"
    record(
        device=first.device_kind,
        versions={"jax": jax.__version__, "python": platform.python_version()},
        **{name: getattr(first, name, None) for name in names},
    )

    if first.platform != "gpu":
        return  # a dry run

    @measured(what="target description")
    def _():
        from jax._src.lib import xla_client

        return {"target_config": str(xla_client.get_topology_for_devices(jax.devices()).target_config)}


def check():
    """Against float64, with fresh random inputs, outputs poisoned with NaN, and every launch repeated."""
    import jax.numpy as jnp
    import numpy as np

    def exact(x):
        return np.asarray(x.astype("float32"), np.float64)

    def case(shape, dtype, implementation, *, y, c, seed):
        *batch, m, _ = shape
        x = draw(shape, dtype, seed)
        second = draw(shape, dtype, seed + 1) if y else None
        addend = draw((*batch, m, m), dtype, seed + 2) if c else None
        alpha, beta = 0.7, -1.3
        run, reference = (op(name, alpha=alpha, beta=beta) for name in (implementation, "reference"))
        outs = []
        for _ in range(4):
            # Leaves NaN in the memory that the next output of this size is likely to get.
            jnp.full((*batch, m, m), jnp.nan, dtype).block_until_ready()
            outs.append(run(x, second, addend))
        plain = reference(x, second, addend)
        # A sample of rows in float64; symmetry and repeatability of every entry.
        rows = np.unique(np.random.default_rng(seed).integers(0, m, 64))
        below = rows[:, None] >= np.arange(m)  # above the diagonal the result is the mirror image
        left, right = x, x if second is None else second
        want = alpha * exact(left[..., rows, :]) @ exact(right).swapaxes(-1, -2)
        if second is not None:
            mirror = alpha * exact(left) @ exact(right[..., rows, :]).swapaxes(-1, -2)
            want = np.where(below, want, mirror.swapaxes(-1, -2))
        if addend is not None:
            mirror = exact(addend[..., :, rows]).swapaxes(-1, -2)
            want = want + beta * np.where(below, exact(addend[..., rows, :]), mirror)
        error, plain_error = (
            float(np.linalg.norm(exact(out[..., rows, :]) - want) / np.linalg.norm(want))
            for out in (outs[0], plain)
        )
        same = all(bool((out == outs[0]).all()) for out in outs)
        symmetric = bool((outs[0] == outs[0].mT).all())
        return {
            "relative_error": error,
            "reference_error": plain_error,
            "repeats_bit_for_bit": same,
            "symmetric": symmetric,
            "ok": error <= 2 * plain_error + 1e-6 and same and symmetric,
        }

    cases = [("bfloat16", False, False), ("bfloat16", True, True), ("float16", False, True)]
    for index, shape in enumerate(CHECKS):
        for offset, (dtype, y, c) in enumerate(cases):
            settings = {"y": y, "c": c, "seed": 100 * index + 10 * offset}
            for name in ("reference", "blocked", *KERNELS):
                run = functools.partial(case, shape, dtype, name, **settings)
                measured(implementation=name, shape=shape, dtype=dtype, **settings)(run)

    @measured(what="every candidate of tiles", shape=(2, 1096, 640))
    def _():
        import jax

        from benchmarks.gpu.tiles import candidates
        from pallas_kernels import _mosaic_gpu_sm90

        x, c = draw((2, 1096, 640), "bfloat16", 1), draw((2, 1096, 1152), "bfloat16", 2)
        scale = jnp.asarray([[0.7, -1.3], [2.0, 0.5]])
        want = op("reference", alpha=scale[:, 0], beta=scale[:, 1])(x, None, c[..., :1096]).astype("float32")
        worst = {}
        for tiles in candidates():
            try:
                cores = jax.devices()[0].core_count
                out = _mosaic_gpu_sm90.launch(x, None, c, scale, tiles=tiles, cores=cores)[..., :1096]
                worst[str(tiles)] = float(jnp.abs(out.astype("float32") - want).max() / jnp.abs(want).max())
            except Exception as error:
                worst[str(tiles)] = f"{type(error).__name__}: {error}"[:300]
        return {"largest_relative_difference": worst}


def product():
    """X Xᵀ: what the op costs against XLA's plain product, which is not mirrored."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def plain(x):
        return jnp.einsum("...ik,...jk->...ij", x, x, preferred_element_type="float32").astype(x.dtype)

    for shape in PRODUCTS:
        for dtype in ("bfloat16", "float16") if shape == (4096, 4096) else ("bfloat16",):

            @measured(shape=shape, dtype=dtype)
            def _(shape=shape, dtype=dtype):
                x = draw(shape, dtype, 0)
                calls = {name: (op(name), x) for name in (*KERNELS, "reference", "blocked")}
                return timed({"plain": (plain, x), **calls})


def public():
    """Five standard steps (Optax's) and the presets, beside what others measured (benchmarks/data)."""
    import jax

    import muonjax
    from benchmarks.common import accelerator_model
    from benchmarks.gpu import calibration

    def ours(settings):
        return jax.jit(functools.partial(muonjax.newton_schulz, settings=settings))

    five = muonjax.NewtonSchulz(coefficients=muonjax.JORDAN, num_steps=5, deflation=0)
    presets = {"fast": muonjax.NewtonSchulz.fast(), "balanced": muonjax.NewtonSchulz.balanced()}
    kernels = {f"standard, {name}": dataclasses.replace(five, implementation=name) for name in KERNELS}
    methods = {"standard": jax.jit(jax.vmap(accelerator_model.optax_update))}
    methods |= {name: ours(settings) for name, settings in (presets | kernels).items()}
    cases = {shape: {"H100, JAX, both stacks together": calibration.MARIN_MS} for shape in calibration.MARIN}
    # What time cuts off is last: single matrices and the largest batches tell most.
    for row in sorted(calibration.public(), key=lambda row: [1, 16, 4, 2, 8].index(int(row["batch"]))):
        shape = tuple(int(row[name]) for name in ("batch", "m", "n"))
        cases.setdefault(shape, {})[f"{row['gpu']}, {row['provider']}"] = float(row["milliseconds"])
    if TREES == ["small"]:  # a dry run
        cases = {(2, 16, 40): cases[2, 1024, 2560]}
    for shape, others in cases.items():

        @measured(shape=shape)
        def _(shape=shape, others=others):
            x = draw(shape, "bfloat16", 0)
            result = timed({name: (f, x) for name, f in methods.items()}, rounds=2, iterations=3)
            return {**result, "public_ms": others}


def step():
    """A whole update of a model's matrices, by each method, beside its modelled milliseconds."""
    import jax

    from benchmarks.common import accelerator_model

    path = pathlib.Path(__file__).parents[1] / "results" / "gpu_model.json"
    known = json.loads(path.read_text())["results"] if path.exists() else []
    available = accelerator_model.methods()
    chosen = ["Optax, bfloat16", "Optax, float32", "fast", "balanced"]
    for name in KERNELS:
        available |= accelerator_model.kernel_methods(name)
        chosen.append(f'balanced, "{name}"')
    for tree in TREES:

        @measured(tree=tree)
        def _(tree=tree):
            ((shapes, _),) = accelerator_model.parts(tree, "balanced", "gpu")
            arrays = {
                dtype: {key: draw(shape, dtype, i) for i, (key, shape) in enumerate(shapes.items())}
                for dtype in ("bfloat16", "float32")
            }
            calls = {
                name: (jax.jit(update), arrays[jax.numpy.dtype(dtype).name])
                for name, (update, dtype) in ((name, available[name]) for name in chosen)
            }
            result = timed(calls, rounds=3, iterations=2, model=False)
            for row in known:
                if row["tree"] == tree and row["method"] in result["times"] and "milliseconds" in row:
                    # Compiled ahead of time, beside the figure of the program that was just measured.
                    result["times"][row["method"]]["ahead_of_time_ms"] = row["milliseconds"]
            return result


def constants():
    """What the roofline assumes: a large product's speed in each type, the memory's, and short launches."""
    import jax
    import jax.numpy as jnp

    size, length = (8192, 2**28) if TREES != ["small"] else (256, 2**16)

    def product(precision=None):
        return jax.jit(lambda x: jnp.matmul(x, x, precision=precision))

    for kind, dtype, precision in (
        ("bf16", "bfloat16", None),
        ("f16", "float16", None),
        ("f32 default", "float32", None),
        ("f32 highest", "float32", "highest"),
    ):

        @measured(what="efficiency", kind=kind)
        def _(dtype=dtype, precision=precision):
            result = timed({"product": (product(precision), draw((size, size), dtype, 0))})
            return {**result, "flops": 2.0 * size**3}

    @measured(what="memory")
    def _():
        x = draw((length,), "float32", 0)
        return {**timed({"copy": (jax.jit(lambda x: x + 1), x)}), "bytes": 8.0 * length}

    @measured(what="launch")
    def _():
        """A hundred products of 64² that wait for each other: XLA can neither join nor reorder them."""
        count = 100

        @jax.jit
        def chain(x):
            for _ in range(count):
                x = jnp.matmul(x, x)
            return x

        return {**timed({"chain": (chain, draw((64, 64), "bfloat16", 0) / 64)}), "launches": count}


def fusion():
    """Does plain XLA fuse the additions, and what does the kernel's own addition cost?"""
    import jax
    import jax.numpy as jnp

    def matmul(a, b):
        return jnp.matmul(a, b, preferred_element_type="float32")

    for shape in FUSIONS:

        @measured(what="b·A + c·A·A", shape=shape)
        def _(shape=shape):
            a = draw(shape, "bfloat16", 0) * 0.01
            a = (a + a.mT).astype("bfloat16")
            plain = jax.jit(lambda a: (-2.0 * a.astype("float32") + 1.5 * matmul(a, a)).astype(a.dtype))
            fused = {name: (op(name, alpha=1.5, beta=-2.0), a, None, a) for name in (KERNELS[0], "reference")}
            return timed({"plain": (plain, a), **fused, f"{KERNELS[0]} without C": (op(KERNELS[0]), a)})

        @measured(what="a·X + B·X in plain XLA", shape=shape)
        def _(shape=shape):
            x, b = draw(shape, "bfloat16", 0), draw((*shape[:-1], shape[-2]), "bfloat16", 1)
            product = jax.jit(lambda b, x: matmul(b, x).astype(x.dtype))
            both = jax.jit(lambda b, x: (3.0 * x.astype("float32") + matmul(b, x)).astype(x.dtype))
            text = both.lower(b, x).compile().as_text()
            result = timed({"B·X": (product, b, x), "a·X + B·X": (both, b, x)})
            return {**result, "custom_calls": text.count("custom-call("), "fusions": text.count(" fusion(")}


def tiles():
    """Every candidate of tiles, at the shapes that a table of winners is for."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.tiles import candidates
    from pallas_kernels import _mosaic_gpu_sm90
    from pallas_kernels._mosaic_gpu_tiles import CORES

    cores = getattr(jax.devices()[0], "core_count", None) or CORES
    plain = jax.jit(lambda x: jnp.einsum("bik,bjk->bij", x, x))

    def with_tiles(tiles):
        return jax.jit(
            lambda x, scale: _mosaic_gpu_sm90.launch(x, None, None, scale, tiles=tiles, cores=cores)
        )

    for shape in TILES:

        @measured(shape=shape)
        def _(shape=shape):
            x, scale = draw(shape, "bfloat16", 0), jnp.ones((shape[0], 2), "float32")
            calls = {str(tiles): (with_tiles(tiles), x, scale) for tiles in candidates()}
            return timed({"plain": (plain, x), **calls}, rounds=2)


def tests():
    """The kernels' tests, which take the GPU where there is one."""
    root = pathlib.Path(__file__).parents[2]
    # Not the project's own options: they need plugins that a GPU machine may lack.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--maxfail=20", "tests/pallas_kernels" + ("/test_tiles.py" if KERNELS[0] != "hopper" else "")]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    record(returncode=result.returncode, tail=result.stdout[-4000:], log=result.stderr[-1000:])


SECTIONS = {
    function.__name__: function
    for function in (device, check, public, step, constants, product, fusion, tiles, tests)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if arguments.dry_run:
        dry_run()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
    SECTIONS[arguments.section]()
