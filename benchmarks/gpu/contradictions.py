"""Say which constants and choices a measurement on a GPU contradicts, from the report of benchmarks/gpu/run.py."""

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.common.roofline import ROOFLINES

# A ratio between a measured and an assumed figure that is no contradiction, either way.
TOLERANCE = 1.15


def contradictions(report: dict[str, Any]) -> list[str]:
    """A sentence for each constant of the roofline, each order of methods and each choice that does not hold."""
    sections = report["sections"]

    def rows(name):
        return [row for row in sections.get(name, {}).get("results", []) if "error" not in row]

    return [
        *_constants(rows("constants"), ROOFLINES["H100"]),
        *_orders(rows("step")),
        *_choices(rows("product")),
    ]


def milliseconds(times: dict[str, Any]) -> float | None:
    """By the host's clock, which counts the gaps between kernels as the model does, or by the device's."""
    return next((times[clock]["median_ms"] for clock in ("host", "device") if clock in times), None)


def _constants(rows: list[dict[str, Any]], ends: Any) -> Iterator[str]:
    for row in rows:
        ((_, times),) = row["times"].items()
        own = milliseconds(times)
        if own is None:
            continue
        seconds = own / 1e3
        if row["what"] == "efficiency":
            name = f"efficiency of {row['kind']} products"
            assumed = [model.efficiency[row["kind"]] for model in ends]
            found = row["flops"] / seconds / ends[0].peak[row["kind"]]
        elif row["what"] == "memory":
            name, assumed = "share of the memory's bandwidth", [model.memory_efficiency for model in ends]
            found = row["bytes"] / seconds / ends[0].memory
        else:
            name, assumed = "seconds per launch", [model.launch for model in ends]
            found = seconds / row["launches"]
        least, most = sorted(assumed)
        if found < least / TOLERANCE or found > most * TOLERANCE:
            shown = " to ".join(f"{one:.3g}" for one in sorted({least, most}))
            yield f"benchmarks/results/calibration.json: {name} is {shown}, measured {found:.3g}."


def _orders(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Pairs of methods that the model puts in one order and the measurement, clearly, in the other."""
    for row in rows:
        known = {
            name: (times["ahead_of_time_ms"], own)
            for name, times in row["times"].items()
            if "ahead_of_time_ms" in times and (own := milliseconds(times)) is not None
        }
        for (a, (model_a, own_a)), (b, (model_b, own_b)) in itertools.combinations(known.items(), 2):
            first = {x < y for x, y in zip(model_a, model_b, strict=True) if _differ(x, y)}
            if first == {own_b < own_a} and _differ(
                own_a, own_b
            ):  # both ends of the model against the measurement
                faster, slower = (a, b) if own_b < own_a else (b, a)
                yield (
                    f"{row['tree']}: the model has {faster!r} before {slower!r}, measured the other way "
                    f"({min(own_a, own_b):.3g} and {max(own_a, own_b):.3g} ms): see the rules in muonjax/_policy.py."
                )


def _choices(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Shapes at which a kernel that nothing chooses is clearly faster than what is chosen."""
    for row in rows:
        own = {name: milliseconds(times) for name, times in row["times"].items()}
        chosen = own.get("reference")
        for name, value in own.items():
            if name in ("plain", "reference") or value is None or chosen is None:
                continue
            if value * TOLERANCE < chosen:
                yield (
                    f"pallas_kernels/_api.py: {row['dtype']} {tuple(row['shape'])}: {name!r} takes {value:.3g} ms, "
                    f'"reference", which None chooses on a GPU, {chosen:.3g}.'
                )


def _differ(a: float, b: float) -> bool:
    return max(a, b) > TOLERANCE * min(a, b)
