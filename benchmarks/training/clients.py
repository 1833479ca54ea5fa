"""Compare AdamW, Optax's Muon and muonjax in the trainers of other libraries, each at the best of its rates.

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


def row(client: str, steps: int, old: dict[str, Any]) -> dict[str, Any]:
    """All runs of a client that `old` has not: three rates, and more until the best has worse ones on both sides."""
    recipe = importlib.import_module(f"with_{client}")
    optimizers = {}
    for name, rates in RATES.items():
        known = old["optimizers"][name]["losses"] if old.get("steps") == steps else {}
        losses = {float(rate): loss for rate, loss in known.items()}
        todo = [rate for rate in rates if rate not in losses]
        while True:
            for rate in todo:
                losses[rate] = run(recipe, name, rate, steps)
                print(f"{client} {name} {rate:g}: {losses[rate]:.4f}", flush=True)
            best = min(losses, key=losses.__getitem__)
            further = {min(losses): best / 3.2, max(losses): best * 3.2}
            if best not in further:
                break
            todo = [float(f"{further[best]:.1g}")]
        by_rate = {f"{rate:g}": losses[rate] for rate in sorted(losses)}
        optimizers[name] = {"learning_rate": best, "loss": losses[best], "losses": by_rate}
    package = PACKAGES[client]
    return {
        "client": client,
        "package": package,
        "version": importlib.metadata.version(package),
        "steps": steps,
        "optimizers": optimizers,
        "provenance": measure.provenance(),
    }


def read() -> dict[str, Any]:
    """The rows of the JSON by client."""
    path = measure.RESULTS / "clients.json"
    return {r["client"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("clients", nargs="+", choices=PACKAGES)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    sys.path[:0] = [str(RECIPES), str(RECIPES.parent)]
    for client in args.clients:
        new = row(client, args.steps, read().get(client, {}))
        rows = read() | {client: new}  # another process may have written its own
        measure.write("clients", {"rows": [rows[name] for name in PACKAGES if name in rows]})


if __name__ == "__main__":
    main()
