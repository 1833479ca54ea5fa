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
    makers = {
        "AdamW": lambda rate, *_: optax.adamw(rate),
        "Optax's Muon": lambda rate, *_: optax.contrib.muon(rate),
        "muonjax": recipe.optimizer,
    }
    losses, _ = recipe.train(makers[name], rate, steps)
    return statistics.mean(losses[-max(1, steps // 10) :])


def next_rate(losses: dict[float, float], usual: tuple[float, ...]) -> float | None:
    """The next rate to run: the usual ones, then others until the best has worse ones on both sides."""
    for rate in usual:
        if rate not in losses:
            return rate
    best = min(losses, key=losses.__getitem__)
    beyond = {min(losses): best / 3.2, max(losses): best * 3.2}
    return float(f"{beyond[best]:.1g}") if best in beyond else None


def measure_client(client: str, steps: int) -> None:
    """All runs that the JSON has not; each is written when it ends."""
    recipe = importlib.import_module(f"with_{client}")
    rows = {row["client"]: row for row in measure.read("clients").get("rows", [])}
    known = rows.get(client, {})
    optimizers = known.get("optimizers", {}) if known.get("steps") == steps else {}
    for name, usual in RATES.items():
        by_rate = optimizers.get(name, {"losses": {}})["losses"]
        losses = {float(rate): loss for rate, loss in by_rate.items()}
        while (rate := next_rate(losses, usual)) is not None:
            losses[rate] = run(recipe, name, rate, steps)
            print(f"{client} {name} {rate:g}: {losses[rate]:.4f}", flush=True)
            best = min(losses, key=losses.__getitem__)
            by_rate = {f"{rate:g}": losses[rate] for rate in sorted(losses)}
            optimizers[name] = {
                "learning_rate": best,
                "loss": losses[best],
                "losses": by_rate,
            }
            rows[client] = {
                "client": client,
                "package": PACKAGES[client],
                "version": importlib.metadata.version(PACKAGES[client]),
                "steps": steps,
                "optimizers": optimizers,
                "provenance": measure.provenance(),
            }
            content = [rows[name] for name in PACKAGES if name in rows]
            measure.write("clients", {"rows": content})


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
