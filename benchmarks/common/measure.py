"""Time calls in turn, record device and versions, print a table, write a JSON file."""

import json
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


def provenance() -> dict[str, Any]:
    """Device, commit, date and versions of a measurement."""
    device = jax.devices()[0]
    cores = _cores()
    name = device.device_kind if device.platform != "cpu" else f"CPU, {cores} core{'s' * (cores > 1)}"
    return {
        "device": name,
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
        here = pathlib.Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)*.py")
    return git("describe", "--always", "--exclude=*") + "-dirty" * bool(changed) or "unknown"


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interleave(calls: Mapping[str, Callable[[], Any]], *, rounds: int = 9) -> dict[str, list[float]]:
    """Seconds of each call, called in turn `rounds` times, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if count:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float], baseline: list[float]) -> dict[str, float]:
    """Median seconds; median and quartiles of the ratios to the baseline of the same round."""
    ratios = sorted(s / b for s, b in zip(seconds, baseline, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"seconds": statistics.median(seconds), "ratio": middle, "ratio_low": low, "ratio_high": high}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned columns, floats to three significant digits."""

    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    heads = list(rows[0])
    lines = [heads, *([cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines
    )


def write(name: str, content: dict[str, Any]) -> pathlib.Path:
    """Write `content` and its provenance to benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"provenance": provenance(), **content}, indent=1) + "\n")
    return path
