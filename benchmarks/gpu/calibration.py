"""Fit the roofline's constants to public measurements on GPUs, and print measured / modelled for each of them.

    python -m benchmarks.gpu.calibration

benchmarks/data/README.md names the sources. Writes benchmarks/results/calibration.json, which the roofline reads:

- The pessimistic end is PyTorch's compiled standard steps, 65 shapes on each GPU: three constants, namely the share of
  the peak, the seconds of a round of tiles, and those between two kernels. Products of one round show what any kernel
  takes at least. They are fitted to the logarithms of all 65 ratios, and once more to those of every second shape,
  which tells how well the others are predicted. A fourth one is for QuACK's symmetric products.
- The optimistic end, of the H100, is Marin's products in JAX: one constant. With a cost for each round the share of the
  peak would be above what any product is known to reach.
"""

import csv
import math
import pathlib
import statistics
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from benchmarks.common import measure
from benchmarks.common.hlo_launches import Launch
from benchmarks.common.roofline import gpu

DATA = pathlib.Path(__file__).parents[1] / "data"

# A batched Cholesky factorization in PyTorch on an L40S, 256 of 32 x 32 and 64 of 128 x 128: ml-explore/mlx, pull
# request 4262. Nothing of the kind is public for an H100.
FACTORIZATION = {"optimistic": 58e-6, "pessimistic": 134e-6}
# What a short kernel takes in a CUDA graph or a full stream, from the start of one to the start of the next; and what
# remains of it between long ones.
LAUNCH, GAP = 3e-6, 1e-6
START = {"efficiency": 0.7, "round": 3e-6, "gap": 1e-6}


class Measured(NamedTuple):
    """A public time, and the launches of the program that took it."""

    case: dict
    launches: list[Launch]
    milliseconds: float

    def modelled(self, model) -> float:
        """Milliseconds."""
        return 1e3 * sum(launch.count * model.seconds(launch) for launch in self.launches)


def _launch(count, moved, flops=0.0, result=(), kind="bf16"):
    # bfloat16: two bytes for each element.
    return Launch(
        "",
        "",
        count,
        {kind: flops} if flops else {},
        (result,) if result else (),
        2.0 * moved,
        False,
        None,
        "",
    )


def steps(
    batch: int, m: int, n: int, count: int, *, fused: bool = True, symmetric: bool = False
) -> list[Launch]:
    """The launches of `count` standard steps: X X^T, b A + c A A, a X + B X.

    Args:
      fused: Whether the additions are part of the products, as in PyTorch's `baddbmm`; else no additions at all.
      symmetric: Whether a kernel makes half of the first two.
    """
    m, n = sorted((m, n))
    small, large, result = m * m, m * n, (batch, m, m)
    kind, half = ("symmetric", (m + 128) / (2 * m)) if symmetric else ("bf16", 1.0)
    flops = 2.0 * batch * m * m
    return [
        _launch(count, batch * (large + small), half * flops * n, result, kind),
        _launch(count, batch * 2 * small, half * flops * m, result, kind),
        _launch(count, batch * (small + (2 + fused) * large), flops * n, (batch, m, n)),
    ]


def additions(batch: int, m: int, n: int, count: int) -> list[Launch]:
    """b A + c A A and a X + B X as passes of their own: two arrays read, one written."""
    return [_launch(count, 3 * batch * m * m), _launch(count, 3 * batch * m * n)]


def normalization(batch: int, m: int, n: int) -> list[Launch]:
    """The norm, and the division by it."""
    return [_launch(1, batch * m * n), _launch(1, 2 * batch * m * n)]


def public(name: str = "newton_schulz_h100_b200") -> list[dict[str, str]]:
    """The rows of a CSV."""
    with (DATA / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def greyhound(chip: str, provider: str = "torch-compile") -> list[Measured]:
    """All shapes of the CSV on one GPU."""
    found = []
    for row in public():
        if (row["gpu"], row["provider"]) != (chip, provider):
            continue
        shape = int(row["batch"]), int(row["m"]), int(row["n"])
        launches = normalization(*shape) + steps(*shape, 5, symmetric="quack" in provider)
        case = {"source": f"{chip}, {provider}", "shape": list(shape)}
        found.append(Measured(case, launches, float(row["milliseconds"])))
    return found


def marin(what: str) -> list[Measured]:
    """Marin's two stacks, by the number of steps."""
    found = []
    for row in public("newton_schulz_marin"):
        if row["what"] != what:
            continue
        count, launches = int(row["steps"]), []
        for shape in MARIN:
            launches += steps(*shape, count, fused=False)
            if what == "newton_schulz":
                launches += normalization(*shape) + additions(*shape, count)
        case = {"source": f"H100, JAX, {what}", "steps": count}
        found.append(Measured(case, launches, float(row["milliseconds"])))
    return found


# Their stacks on each GPU, and the time of five steps on both.
MARIN, MARIN_MS = [(32, 2560, 2560), (32, 1280, 2560)], 31.03


def rms(model, rows: list[Measured]) -> float:
    """Of log(measured / modelled)."""
    return math.sqrt(statistics.fmean(math.log(row.milliseconds / row.modelled(model)) ** 2 for row in rows))


def fit(chip: str, rows: list[Measured], **fixed: float) -> dict[str, float]:
    """The constants of `START` that are not fixed, and the others of `roofline.gpu`, with the least rms."""
    names = [name for name in START if name not in fixed]

    def constants(logarithms):
        found = {
            **fixed,
            **{name: START[name] * math.exp(x) for name, x in zip(names, logarithms, strict=True)},
        }
        # No kernel takes less than one of the products that fit into one round.
        return {
            "launch": found["round"] + found["gap"],
            "factorization": FACTORIZATION["pessimistic"],
            **found,
        }

    def loss(logarithms):
        return rms(gpu(chip, **constants(logarithms)), rows)

    best = minimize(loss, np.zeros(len(names)), method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-7})
    return {name: round(value, 4 if value > 0.01 else 9) for name, value in constants(best.x).items()}


def predicted_rms(chip: str, rows: list[Measured]) -> float:
    """The rms over the shapes m x n of each half, with constants that are fitted to the other half."""
    shapes = sorted({tuple(row.case["shape"][1:]) for row in rows})
    halves: tuple[list[Measured], list[Measured]] = ([], [])
    for row in rows:
        halves[shapes.index(tuple(row.case["shape"][1:])) % 2].append(row)
    squares = [
        rms(gpu(chip, **fit(chip, other)), own) ** 2 * len(own) for own, other in (halves, reversed(halves))
    ]
    return math.sqrt(sum(squares) / len(rows))


def large(rows: list[Measured]) -> list[Measured]:
    """Of m >= 2560 and at least four matrices, where the host's part of a call does not count."""
    return [row for row in rows if min(row.case["shape"][1:]) >= 2560 and row.case["shape"][0] >= 4]


def main() -> None:
    """Fits, prints and writes."""
    constants, summaries, shown = {}, [], []

    def summarize(name, model, rows, **more):
        ratios = [row.milliseconds / row.modelled(model) for row in rows]
        summaries.append(
            {
                "name": name,
                "rows": len(rows),
                "rms": rms(model, rows),
                "least": min(ratios),
                "most": max(ratios),
                **more,
            }
        )
        shown.extend(
            {**row.case, "measured_ms": row.milliseconds, "modelled_ms": row.modelled(model), "ratio": ratio}
            for row, ratio in zip(rows, ratios, strict=True)
        )

    for chip in ("H100", "B200"):
        rows = greyhound(chip)
        found = fit(chip, rows)
        kernels = large(greyhound(chip, "greyhound + quack"))
        plain = gpu(chip, **found)
        # What the constants of plain products leave of QuACK's time.
        products = statistics.median(row.modelled(plain) / row.milliseconds for row in kernels)
        found["symmetric"] = round(products, 3)
        constants[chip] = {"optimistic": found, "pessimistic": found}
        summarize(f"{chip}, PyTorch", plain, rows, predicted_rms=predicted_rms(chip, rows))
        summarize(f"{chip}, QuACK, m ≥ 2560, batch ≥ 4", gpu(chip, **found), kernels)
    found = fit("H100", marin("products"), round=0.0, gap=GAP, launch=LAUNCH)
    constants["H100"]["optimistic"] = found | {"factorization": FACTORIZATION["optimistic"]}
    best = gpu("H100", **found)
    summarize("H100, JAX, products", best, marin("products"))
    summarize("H100, JAX, Newton–Schulz", best, marin("newton_schulz"))
    print(
        measure.table([{"shape": row.get("shape", ""), "steps": row.get("steps", 5), **row} for row in shown])
    )
    print(measure.table(summaries))
    measure.write("calibration", {"constants": constants, "summaries": summaries, "rows": shown})


if __name__ == "__main__":
    main()
