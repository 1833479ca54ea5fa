"""Bytes that one optimizer step sends against the number of devices: ours, Optax's and MaxText's Muon.

    git clone https://github.com/AI-Hypercomputer/maxtext
    python -m benchmarks.optimizer.mesh_traffic --maxtext maxtext/src

Counted in the compiled program, as in `benchmarks.optimizer.sharding`; nothing is timed. The parameters are 24 scanned
layers of a wide and a tall matrix each, [24, 512, 2048] and [24, 2048, 512] in float32. Writes
results/mesh_traffic.json and docs/images/mesh_traffic.png; rows that are measured again replace the old ones.
"""

import argparse
import importlib
import pathlib
import sys
import types
from typing import Any

import jax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.common import hlo_counts, measure
from benchmarks.optimizer import sharding

DEVICES = (8, 16, 32, 64, 128, 256)
LAYERS, ROWS, COLUMNS = 24, 512, 2048
PICTURE = pathlib.Path(__file__).parents[2] / "docs" / "images" / "mesh_traffic.png"


def layouts(devices: int) -> dict[str, sharding.Case]:
    """FSDP over all devices, FSDP over eight in each replica, and nothing sharded."""

    def case(title: str, mesh_shape: dict[str, int], spec: P) -> sharding.Case:
        wide, tall = (LAYERS, ROWS, COLUMNS), (LAYERS, COLUMNS, ROWS)
        return sharding.Case(title, mesh_shape, {"wide": (wide, spec), "tall": (tall, spec)})

    found = {
        "FSDP": case("FSDP", {"fsdp": devices}, P(None, "fsdp")),
        "replicated": case("replicated", {"data": devices}, P()),
    }
    if devices > 8:
        found["HSDP"] = case("HSDP", {"replica": devices // 8, "fsdp": 8}, P(None, "fsdp"))
    return found


def load_maxtext(source: str) -> Any:
    """MaxText's Muon from a checkout, without the rest of the package, which imports much more."""
    package = types.ModuleType("maxtext")
    package.__path__ = [f"{source}/maxtext"]
    sys.modules["maxtext"] = package
    return importlib.import_module("maxtext.optimizers.muon")


def optimizers(case: sharding.Case, maxtext: Any) -> dict[str, optax.GradientTransformation]:
    """All of them, with their own word for rows and columns."""
    found = {
        "muonjax": sharding.muon(case, AxisType.Auto),
        "Optax": optax.contrib.muon(
            1e-3, program=dict.fromkeys(case.leaves, muonjax.MuonDimensionNumbers(1, 2))
        ),
    }
    if maxtext is not None:
        mesh = case.mesh()
        numbers = {
            name: maxtext.MuonDimensionNumbers(1, 2, NamedSharding(mesh, spec))
            for name, spec in case.specs.items()
        }
        found["MaxText"] = maxtext.muon(1e-3, muon_weight_dimension_numbers=numbers)
    return found


def run(devices: int, maxtext: Any, only: str | None) -> list[dict[str, Any]]:
    """A row for each layout and optimizer."""
    rows = []
    for layout, case in layouts(devices).items():
        for name, tx in optimizers(case, maxtext).items():
            if only in (None, name):
                compiled = sharding.compile_step(tx, case, AxisType.Auto)
                counts = hlo_counts.count(compiled, devices=devices, unknown_trips=5)
                rows.append(
                    {
                        "devices": devices,
                        "layout": layout,
                        "optimizer": name,
                        "mebibytes": counts.mebibytes,
                        "collectives": counts.total_collectives,
                        "gigaflops": counts.flops / 1e9,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """A panel for each layout, a line for each optimizer."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    titles, counted = ("FSDP", "HSDP", "replicated"), sorted({row["devices"] for row in rows})
    figures = {"mebibytes": "MiB sent", "gigaflops": "GFLOP of products"}
    figure, panels = plt.subplots(2, 3, figsize=(10, 5.4), sharex=True, sharey="row", layout="constrained")
    for line, (key, label) in zip(panels, figures.items(), strict=True):
        for title, panel in zip(titles, line, strict=True):
            for name, marker in (("muonjax", "o"), ("MaxText", "s"), ("Optax", "^")):
                own = sorted(
                    (row["devices"], row[key])
                    for row in rows
                    if (row["layout"], row["optimizer"]) == (title, name)
                )
                panel.plot(*zip(*own, strict=True), marker=marker, label=name) if own else None
            panel.set_xscale("log", base=2)
            panel.set_yscale("symlog", linthresh=1) if key == "mebibytes" else panel.set_yscale("log")
            panel.set_xticks(counted, [str(d) for d in counted])
            panel.yaxis.set(major_formatter="{x:g}", minor_formatter="")
            panel.grid(alpha=0.3)
        if key == "gigaflops":
            line[0].set_yticks((20, 50, 100, 200, 500))
        line[0].set_ylabel(label)
    for title, above, below in zip(titles, *panels, strict=True):
        above.set_title(title if title != "HSDP" else "HSDP, replicas of 8 devices")
        below.set_xlabel("devices")
    panels[0][0].legend()
    figure.suptitle("Per device and step")
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maxtext", help="the folder src of a checkout of AI-Hypercomputer/maxtext")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--optimizer", choices=["muonjax", "Optax", "MaxText"])
    parser.add_argument("--draw", action="store_true", help="only draw the picture again")
    arguments = parser.parse_args()
    rows = measure.read("mesh_traffic").get("rows", [])
    if not arguments.draw:
        jax.config.update("jax_num_cpu_devices", max(arguments.devices))
        maxtext = load_maxtext(arguments.maxtext) if arguments.maxtext else None
        found = {(row["layout"], row["optimizer"], row["devices"]): row for row in rows}
        for devices in arguments.devices:
            for row in run(devices, maxtext, arguments.optimizer):
                found[row["layout"], row["optimizer"], row["devices"]] = row
            rows = [found[key] for key in sorted(found)]
            measure.write("mesh_traffic", {"rows": rows})
    draw(rows)


if __name__ == "__main__":
    main()
