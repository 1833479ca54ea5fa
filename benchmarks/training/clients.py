"""Compare AdamW, Optax's Muon and muonjax in the trainers of other libraries, each at the best of its rates.

    python -m benchmarks.training.clients haiku keras equinox    # those that this environment has installed

Each client has an environment of its own (.github/workflows/nightly.yml), so the JSON is written row by row. A run is
the recipe `examples/recipes/with_<client>.py`, with its own tiny model; the loss is the mean of the last tenth of the
steps, all of which see text that is new.
"""

import argparse
import importlib
import importlib.metadata
import statistics
import sys
from typing import Any

import optax

from benchmarks.common import measure

RECIPES = measure.RESULTS.parents[1] / "examples" / "recipes"
PACKAGES = {
    "maxtext": "maxtext",
    "levanter": "marin-levanter",
    "tunix": "google-tunix",
    "keras": "keras",
    "haiku": "dm-haiku",
    "equinox": "equinox",
}
RATES = {
    "AdamW": (3e-3, 1e-2, 3e-2),
    "Optax's Muon": (1e-2, 3e-2, 1e-1),
    "muonjax": (3e-3, 1e-2, 3e-2),
}


def run(recipe: Any, name: str, rate: float, steps: int) -> float:
    """The mean loss of the last tenth of the steps."""
    others = {
        "AdamW": lambda rate, *_: optax.adamw(rate),
        "Optax's Muon": lambda rate, *_: optax.contrib.muon(rate),
        "muonjax": recipe.optimizer,
    }
    losses, _ = recipe.train(others[name], rate, steps)
    return statistics.mean(losses[-max(1, steps // 10) :])


def measure_client(client: str, steps: int) -> None:
    """All runs that the JSON has not: three rates, and more until the best has worse ones on both sides."""
    recipe = importlib.import_module(f"with_{client}")
    old = read().get(client, {})
    known = old["optimizers"] if old.get("steps") == steps else {}
    optimizers = {name: known.get(name, {"losses": {}}) for name in RATES}
    for name, rates in RATES.items():
        losses = {
            float(rate): loss for rate, loss in optimizers[name]["losses"].items()
        }
        todo = [rate for rate in rates if rate not in losses]
        while True:
            for rate in todo:
                losses[rate] = run(recipe, name, rate, steps)
                print(f"{client} {name} {rate:g}: {losses[rate]:.4f}", flush=True)
                best = min(losses, key=losses.__getitem__)
                by_rate = {f"{rate:g}": losses[rate] for rate in sorted(losses)}
                optimizers[name] = {
                    "learning_rate": best,
                    "loss": losses[best],
                    "losses": by_rate,
                }
                write(client, steps, optimizers)
            further = {min(losses): min(losses) / 3.2, max(losses): max(losses) * 3.2}
            best = min(losses, key=losses.__getitem__)
            if best not in further:
                break
            todo = [float(f"{further[best]:.1g}")]


def write(client: str, steps: int, optimizers: dict[str, Any]) -> None:
    """Write the client's row, beside those that other processes may have written."""
    row = {
        "client": client,
        "package": PACKAGES[client],
        "version": importlib.metadata.version(PACKAGES[client]),
        "steps": steps,
        "optimizers": optimizers,
        "provenance": measure.provenance(),
    }
    rows = read() | {client: row}
    measure.write(
        "clients", {"rows": [rows[name] for name in PACKAGES if name in rows]}
    )


def read() -> dict[str, Any]:
    """The rows of the JSON by client."""
    return {row["client"]: row for row in measure.read("clients").get("rows", [])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("clients", nargs="+", choices=PACKAGES)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    sys.path[:0] = [str(RECIPES), str(RECIPES.parent)]
    for client in args.clients:
        measure_client(client, args.steps)


if __name__ == "__main__":
    main()
