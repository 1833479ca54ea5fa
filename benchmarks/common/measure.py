"""Time calls in turn, record device and versions, and read and write the JSON files of results."""

import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
import optax

RESULTS = pathlib.Path(__file__).parents[1] / "results"
IMAGES = RESULTS.parents[1] / "docs" / "images"

Row = dict[str, Any]  # of a table of results, or a whole file of them


def provenance() -> Row:
    """Device, commit, date and versions of a measurement."""
    device = jax.devices()[0]
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    on_cpu = f"CPU, {cores} core{'s' * (cores > 1)}"
    return {
        "device": on_cpu if device.platform == "cpu" else device.device_kind,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
            "flax": flax.__version__,
        },
    }


def _commit() -> str:
    """The commit; "-dirty" if Python code differs from it (new results do not count)."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(
            command, cwd=RESULTS, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)*.py")
    commit = git("describe", "--always", "--exclude=*")
    return commit + "-dirty" * bool(changed) or "unknown"


def interleave(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call, called in turn `rounds` times, after one round that is not counted.

    Args:
      before: Is called before each call, and not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(rounds + 1):
        for name, call in calls.items():
            if before:
                before()
            start = clock()
            jax.block_until_ready(call())
            if count:
                seconds[name].append(clock() - start)
    return seconds


def summary(seconds: list[float], baseline: list[float]) -> dict[str, float]:
    """Median seconds; median and quartiles of the ratios to the baseline of the same round."""
    ratios = sorted(s / b for s, b in zip(seconds, baseline, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "seconds": statistics.median(seconds),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def summaries(seconds: Mapping[str, list[float]]) -> dict[str, Row]:
    """The summary of each call that `interleave` timed; the first is the baseline."""
    baseline = next(iter(seconds.values()))
    return {name: summary(times, baseline) for name, times in seconds.items()}


def compare(
    functions: Mapping[str, Callable[..., Any]], *arguments: Any, rounds: int = 7
) -> dict[str, Row]:
    """The time of functions of the same arguments, each compiled before; the first is the baseline."""
    calls = {}
    for name, f in functions.items():
        calls[name] = functools.partial(jax.jit(f), *arguments)
    return summaries(interleave(calls, rounds=rounds))


def compare_compilation(
    functions: Mapping[str, Callable[..., Any]], *arguments: Any
) -> dict[str, Row]:
    """The time to trace and compile functions of the same arguments, without what JAX has in its caches."""

    def compiled(f: Callable[..., Any]) -> Any:
        return jax.jit(f).lower(*arguments).compile()

    calls = {name: functools.partial(compiled, f) for name, f in functions.items()}
    return summaries(interleave(calls, before=jax.clear_caches))


def failure(error: Exception) -> dict[str, str]:
    """The result of what raised, where others are still worth knowing."""
    return {"error": f"{type(error).__name__}: {error}"[:1000]}


def write(
    name: str,
    content: Row,
    *,
    device: str | None = None,
    folder: pathlib.Path | None = None,
) -> None:
    """Write `content` and its provenance to <name>.json.

    Args:
      device: What the provenance says; None: the device that is here.
      folder: Of the file; None: benchmarks/results.
    """
    made = provenance()
    made["device"] = device or made["device"]
    path = (folder or RESULTS) / f"{name}.json"
    text = json.dumps({"provenance": made, **content}, indent=1) + "\n"
    replace(path, text.encode())
    print(path, flush=True)


def replace(path: pathlib.Path, content: bytes) -> None:
    """Write a file under another name first, so that a killed process leaves the file before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def read(name: str, folder: pathlib.Path | None = None) -> Row:
    """What <name>.json in `folder` or benchmarks/results holds; nothing if there is no such file."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def matching(rows: list[Row], **key: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if key.items() <= row.items()]


def replaced(rows: list[Row], key: Row, row: Row) -> list[Row]:
    """The rows, with `row` in the place of the one that has this key, or at the end."""
    rows = list(rows)
    for place, other in enumerate(rows):
        if key.items() <= other.items():
            rows[place] = key | row
            return rows
    return [*rows, key | row]
