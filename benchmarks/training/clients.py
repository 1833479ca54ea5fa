"""Compare AdamW, Optax's Muon and muonjax in the trainers of other libraries, each at its best of three rates.

    python -m benchmarks.training.clients haiku keras equinox    # those that this environment has installed

Each client has an environment of its own (.github/workflows/nightly.yml), so the JSON is written row by row. A run is
the recipe `examples/recipes/with_<client>.py`, with its own tiny model; the loss is the mean of the last tenth of the
steps, all of which see text that is new.
"""

import argparse
import importlib
import importlib.metadata
import json
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
RATES = {"AdamW": (3e-3, 1e-2, 3e-2), "Optax's Muon": (1e-2, 3e-2, 1e-1), "muonjax": (3e-3, 1e-2, 3e-2)}


def run(recipe: Any, name: str, rate: float, steps: int) -> float:
    """The mean loss of the last tenth of the steps."""
    others = {
        "AdamW": lambda rate, *_: optax.adamw(rate),
        "Optax's Muon": lambda rate, *_: optax.contrib.muon(rate),
        "muonjax": recipe.optimizer,
    }
    losses, _ = recipe.train(others[name], rate, steps)
    return statistics.mean(losses[-max(1, steps // 10) :])


def row(client: str, steps: int) -> dict[str, Any]:
    """All runs of a client."""
    recipe = importlib.import_module(f"with_{client}")
    optimizers = {}
    for name, rates in RATES.items():
        losses = {}
        for rate in rates:
            losses[rate] = run(recipe, name, rate, steps)
            print(f"{client} {name} {rate:g}: {losses[rate]:.4f}", flush=True)
        best = min(losses, key=losses.__getitem__)
        optimizers[name] = {
            "learning_rate": best,
            "loss": losses[best],
            "losses": {f"{rate:g}": loss for rate, loss in losses.items()},
            "bracketed": best not in (min(rates), max(rates)),
        }
    package = PACKAGES[client]
    return {
        "client": client,
        "package": package,
        "version": importlib.metadata.version(package),
        "steps": steps,
        "optimizers": optimizers,
        "provenance": measure.provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("clients", nargs="+", choices=PACKAGES)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    sys.path[:0] = [str(RECIPES), str(RECIPES.parent)]
    path = measure.RESULTS / "clients.json"
    for client in args.clients:
        new = row(client, args.steps)
        rows = {r["client"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {}
        rows[client] = new
        measure.write("clients", {"rows": [rows[name] for name in PACKAGES if name in rows]})


if __name__ == "__main__":
    main()
