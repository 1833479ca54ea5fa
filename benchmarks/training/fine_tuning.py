"""Fine-tune small transformers on a second text, and measure what they gain there and forget of the first.

    python -m benchmarks.training.fine_tuning                 # everything; can be stopped and continued
    python -m benchmarks.training.fine_tuning --minutes 10    # starts no run after ten minutes

The small transformer of `variants` trains on the documentation, by AdamW and by Muon, and then on the source of
Python's standard library, by each method at several rates. Rates are in units of the optimizer's own rate of the first
training.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import muonjax
from benchmarks.training.book import Book, command_line
from benchmarks.training.int8_momentum import best_rates, text
from benchmarks.training.small_models import Model, loss
from benchmarks.training.small_runs import SIZES, Recipe, Trainer

FIRST, SECOND = "documentation", "source"
RANK, ALPHA = 8, 16.0
TABLES = ("embedding", "position_embedding", "final_norm", "head")


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to fine-tune.

    Attributes:
      before: What trained the model on the first text.
      optimizer: What fine-tunes it.
      trained: All parameters; those of the blocks, so that embeddings and head stay; or adapters of rank 8 of all
        matrices of the blocks, W + 2 A B with A random and B zero at first.
      weight_decay: Of what is trained.
      shares: Rates, in units of the optimizer's rate of the first training.
    """

    before: Literal["AdamW", "Muon"]
    optimizer: Literal["AdamW", "Muon"]
    trained: Literal["all", "blocks", "adapters"] = "all"
    weight_decay: float = 0.0
    shares: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03)


METHODS = {
    "AdamW": Method("AdamW", "AdamW"),
    "Muon": Method("AdamW", "Muon"),
    "Muon, decay 0.1": Method("AdamW", "Muon", weight_decay=0.1, shares=(1.0, 0.3)),
    "Muon, embeddings and head frozen": Method("AdamW", "Muon", "blocks"),
    "LoRA by AdamW": Method("AdamW", "AdamW", "adapters", shares=(3.0, 1.0, 0.3, 0.1)),
    "LoRA by Muon": Method("AdamW", "Muon", "adapters", shares=(3.0, 1.0, 0.3, 0.1)),
    "Muon after Muon": Method("Muon", "Muon"),
    "AdamW after Muon": Method("Muon", "AdamW"),
}


class Tuner:
    """One method, compiled once for all rates and seeds."""

    def __init__(self, method: Method, model: Model, steps: int, batch: int):
        self.method, self.model, self.steps, self.batch = method, model, steps, batch
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.text = text(SECOND)

    def trainable(self, params: Any) -> Any:
        """What is trained, at first."""
        blocks = {name: block for name, block in params.items() if name not in TABLES}
        if self.method.trained != "adapters":
            return params if self.method.trained == "all" else blocks
        keys = itertools.count()

        def factors(path: Any, kernel: jax.Array) -> dict[str, jax.Array] | None:
            if kernel.ndim < 2:
                return None
            rows = kernel.size // kernel.shape[-1] if path[-2].key == "out" else kernel.shape[0]
            a = jax.random.normal(jax.random.key(next(keys)), (rows, RANK)) / math.sqrt(rows)
            return {"lora_a": a, "lora_b": jnp.zeros((RANK, kernel.size // rows))}

        return jax.tree.map_with_path(factors, blocks)

    def merged(self, params: Any, trained: Any) -> Any:
        """The model's parameters."""
        if self.method.trained != "adapters":
            return {**params, **trained}

        def add(kernel: jax.Array, factors: Any) -> jax.Array:
            if factors is None:
                return kernel
            return kernel + ALPHA / RANK * (factors["lora_a"] @ factors["lora_b"]).reshape(kernel.shape)

        blocks = {name: params[name] for name in trained}
        is_end = lambda node: node is None or "lora_a" in node  # noqa: E731
        leaves, treedef = jax.tree.flatten(blocks)
        added = [*map(add, leaves, jax.tree.leaves(trained, is_leaf=is_end))]
        return {**params, **treedef.unflatten(added)}

    def _optimizer(self, rate: Any, adam_rate: Any) -> Any:
        warmup = max(1, self.steps // 10)
        shape = optax.warmup_cosine_decay_schedule(1 / warmup, 1.0, warmup, max(self.steps, warmup + 1), 0.1)
        decay = self.method.weight_decay
        adam = optax.adamw(
            lambda count: adam_rate * shape(count),
            b2=0.95,
            weight_decay=decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )
        if self.method.optimizer == "AdamW":
            return adam
        return muonjax.muon(lambda count: rate * shape(count), weight_decay=decay, adam=adam)

    def _step(self, trained: Any, state: Any, params: Any, windows: jax.Array, rate: Any, adam_rate: Any):
        grads = jax.grad(lambda trained: loss(self.model, self.merged(params, trained), windows))(trained)
        updates, state = self._optimizer(rate, adam_rate).update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    def run(self, params: Any, rate: float, adam_rate: float, seed: int) -> Any:
        """The model's parameters after fine-tuning."""
        trained = jax.tree.map(jnp.copy, self.trainable(params))  # the copy is donated, `params` stay
        state = jax.jit(self._optimizer(1.0, 1.0).init)(trained)
        for step in range(self.steps):
            windows = self.text.batch(seed, step, self.batch, self.model.context)
            rates = jnp.float32(rate), jnp.float32(adam_rate)
            trained, state = self.step(trained, state, params, windows, *rates)
        return self.merged(params, trained)


def clip_costs(model: Model, params: Any, shares: Sequence[float] = (1.0, 0.75, 0.5, 0.25)) -> dict[str, Any]:
    """What QK-Clip at once adds to the loss on the first text, at thresholds relative to the largest first logit."""
    windows = text(FIRST).held_out_windows(model.context, most=128)
    value = functools.partial(loss, model)
    (before, maxima), _ = jax.jit(muonjax.value_and_grad(value))(params, windows)
    sites, largest = muonjax.inspect(value, params, windows), max(float(m.max()) for m in maxima.values())
    added = [
        float(jax.jit(value)(muonjax.apply_qk_clip(params, maxima, sites, share * largest), windows) - before)
        for share in shares
    ]
    return {"largest": largest, "added": dict(zip(map(str, shares), added, strict=True))}


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method and rate: gained on the second text and forgotten of the first, over the seeds."""
    start = {(r["method"], r["seed"]): r for r in runs if r["share"] == 0}
    rows = []
    for method, share in dict.fromkeys((r["method"], r["share"]) for r in runs if r["share"]):
        mine = [r for r in runs if (r["method"], r["share"]) == (method, share)]
        befores = [start[METHODS[method].before, r["seed"]] for r in mine]
        row: dict[str, Any] = {"method": method, "share": share, "seeds": len(mine)}
        for name, text_name, sign in (("gained", SECOND, -1), ("forgotten", FIRST, 1)):
            found = [sign * (r[text_name] - b[text_name]) for r, b in zip(mine, befores, strict=True)]
            row[name], row[f"{name}_spread"] = statistics.mean(found), statistics.pstdev(found)
        rows.append(row)
    return rows


def at_equal_gain(rows: Sequence[dict[str, Any]], part: float = 0.9) -> list[dict[str, Any]]:
    """For each method, what it forgets where it gains a part of the most that every method can, between two rates."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["share"]):
        by_method.setdefault(row["method"], []).append(row)
    goal = part * min(max(row["gained"] for row in mine) for mine in by_method.values())
    found = []
    for method, mine in by_method.items():
        row = {"method": method, "goal": goal, "share": None, "forgotten": None}
        for low, high in itertools.pairwise(mine):
            if low["gained"] < goal <= high["gained"]:
                t = (goal - low["gained"]) / (high["gained"] - low["gained"])
                row["share"] = math.exp((1 - t) * math.log(low["share"]) + t * math.log(high["share"]))
                row["forgotten"] = (1 - t) * low["forgotten"] + t * high["forgotten"]
                break
        found.append(row)
    return found


def main(arguments: list[str] | None = None) -> None:
    sizes = SIZES | {"first_steps": 500, "steps": 120, "batch": 8}
    args = command_line(__doc__, "fine_tuning", **sizes).parse_args(arguments)
    muon_rate, adam_rate = best_rates()
    rates = {"muon_rate": muon_rate, "adam_rate": adam_rate, "rank": RANK, "alpha": ALPHA}
    settings = {name: getattr(args, name) for name in sizes} | rates
    book = Book(args.name, settings, args.minutes)
    model = Model("MHA", args.layers, args.width, args.head_size, args.context)
    recipes = {"AdamW": Recipe(size="adamw"), "Muon": Recipe()}
    value = jax.jit(functools.partial(loss, model))

    def losses(params: Any) -> dict[str, float]:
        found = {}
        for name in (SECOND, FIRST):
            held_out = float(value(params, text(name).held_out_windows(args.context, most=128)))
            found[name] = round(held_out, 5) if math.isfinite(held_out) else 10.0
        return found

    @functools.cache
    def trainer(optimizer: str) -> Trainer:
        return Trainer(model, recipes[optimizer], args.first_steps, args.batch, text(FIRST))

    @functools.cache
    def trained(optimizer: str, seed: int) -> Any:
        rate = adam_rate if optimizer == "AdamW" else muon_rate
        return trainer(optimizer).train(rate, adam_rate, seed)[0]

    @functools.cache
    def tuner(name: str) -> Tuner:
        return Tuner(METHODS[name], model, args.steps, args.batch)

    def start(optimizer: str, seed: int) -> dict[str, Any]:
        params = trained(optimizer, seed)
        return {**losses(params), "clip": clip_costs(model, params)}

    def tune(name: str, share: float, seed: int) -> dict[str, Any]:
        params = trained(METHODS[name].before, seed)
        return losses(tuner(name).run(params, share * muon_rate, share * adam_rate, seed))

    for seed in args.seeds:
        for optimizer in recipes:
            key = {"method": optimizer, "share": 0, "seed": seed}
            book.ensure(key, functools.partial(start, optimizer, seed))
        for name, method in METHODS.items():
            for share in method.shares:
                key = {"method": name, "share": share, "seed": seed}
                book.ensure(key, functools.partial(tune, name, share, seed))
        trained.cache_clear()
    rows = summary(book.rows)
    before = [row for row in book.rows if row["share"] == 0]
    book.write(rows, methods=rows, equal_gain=at_equal_gain(rows), before=before)


if __name__ == "__main__":
    main()
