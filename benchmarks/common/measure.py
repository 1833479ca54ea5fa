"""Read numbers from a command line, time calls in turn, record device and versions, print tables, write a JSON file."""

import argparse
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


def provenance() -> dict[str, Any]:
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
    return (
        git("describe", "--always", "--exclude=*") + "-dirty" * bool(changed)
        or "unknown"
    )


def options(document: str | None, **defaults: float | str) -> argparse.Namespace:
    """The command line of a benchmark: `--compiled-layers` for `compiled_layers`, of its default's type."""
    parser = argparse.ArgumentParser(description=(document or "").split("\n\n")[0])
    for name, default in defaults.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default
        )
    return parser.parse_args()


def run_parts(
    document: str | None,
    name: str,
    parts: Mapping[str, Callable[[], list[dict[str, Any]]]],
) -> None:
    """The command line of a benchmark of several parts: write those that it names, or all, and keep the others."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    chosen = parser.parse_args().parts or parts
    known = read(name)
    for part in chosen:
        known[part] = parts[part]()
        write(name, {part: known[part] for part in parts if part in known}, known[part])


def interleave(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 9,
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


def compilations(
    calls: Mapping[str, tuple[Any, ...]], **settings: Any
) -> dict[str, list[float]]:
    """Seconds to trace and compile functions for their arguments, without what JAX has in its caches.

    Args:
      calls: For each name the function and its arguments.
      settings: For `interleave`.
    """

    def compiled(f: Callable[..., Any], *arguments: Any) -> Any:
        return jax.jit(f).lower(*arguments).compile()

    every = {name: functools.partial(compiled, *call) for name, call in calls.items()}
    return interleave(every, before=jax.clear_caches, **settings)


def failure(error: Exception) -> dict[str, str]:
    """The result of what raised, where others are still worth knowing."""
    return {"error": f"{type(error).__name__}: {error}"[:1000]}


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


def table(rows: list[dict[str, Any]] | dict[str, dict[str, Any]]) -> str:
    """Rows as aligned columns, floats to three significant digits; a mapping's keys come first."""
    if isinstance(rows, dict):
        rows = [{"": name, **row} for name, row in rows.items()]
    heads = list(rows[0])
    lines = [heads]
    for row in rows:
        values = [row.get(head, "") for head in heads]
        lines.append([f"{x:.3g}" if isinstance(x, float) else str(x) for x in values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [map(str.ljust, line, widths) for line in lines]
    return "\n".join("  ".join(line) for line in aligned)


def write(
    name: str,
    content: dict[str, Any],
    *shown: Any,
    device: str | None = None,
    **versions: str,
) -> None:
    """Write `content` and its provenance to benchmarks/results/<name>.json, and print what is `shown` as tables.

    Args:
      device: What the provenance says; None: the device that is here.
      versions: Of more tools.
    """
    path = RESULTS / f"{name}.json"
    made = provenance()
    made["device"] = device or made["device"]
    made["versions"] |= versions
    save(path, {"provenance": made, **content})
    for rows in shown:
        print(f"{table(rows)}\nin {path}")


def save(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write a JSON file under another name first, so that a killed process leaves the file before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(unfinished, path)


def read(name: str) -> dict[str, Any]:
    """What benchmarks/results/<name>.json holds; nothing if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
