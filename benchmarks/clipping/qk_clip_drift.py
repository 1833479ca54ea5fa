"""Simulate how weights drift when query heads share a key and one of them is clipped at every step.

Four query heads on one key head. The optimizer increases the first by 1 % per step; the others' logits are 20. For
each rule for shared keys: the logits after 1,000 steps, and by how much the weights have grown or shrunk.
"""

import jax
import jax.numpy as jnp
import optax

import muonjax
from benchmarks.common import measure


def drift(shared_keys: str, steps: int, threshold: float) -> dict[str, float | str]:
    """One weight per head: the query's weight times the key's is the logit."""
    start = {
        "query": {"kernel": jnp.asarray([[[threshold], [20.0], [20.0], [20.0]]])},
        "key": {"kernel": jnp.ones((1, 1, 1))},
    }
    tx = muonjax.qk_clip(threshold, muonjax.mha_site(), shared_keys=shared_keys)
    push = jnp.asarray([0.01, 0.0, 0.0, 0.0])[:, None]

    def logits(params):
        return params["query"]["kernel"][0, :, 0] * params["key"]["kernel"][0, 0, 0]

    def step(carry, _):
        params, state = carry
        updates = jax.tree.map(jnp.zeros_like, params)
        updates["query"]["kernel"] = push * params["query"]["kernel"]
        # The largest logit of this step's forward pass, with the weights before the update.
        updates, state = tx.update(updates, state, params, max_logits={"max_logits": logits(params)})
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=steps)[0])
    params, state = run((start, tx.init(start)))
    final = logits(params)
    return {
        "shared_keys": shared_keys,
        "hot_logit": float(final[0]),
        "calm_logit": float(final[1]),
        "key_weight": float(params["key"]["kernel"][0, 0, 0]),
        "calm_query_weight": float(params["query"]["kernel"][0, 1, 0] / 20),
        "clips": int(state.total_clipped),
    }


def main() -> None:
    args = measure.options(__doc__, steps=1000, threshold=100.0)
    rows = [drift(shared_keys, args.steps, args.threshold) for shared_keys in ("query", "balanced", "group")]
    measure.write("qk_clip_drift", {**vars(args), "rows": rows}, rows)


if __name__ == "__main__":
    main()
