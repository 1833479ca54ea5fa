"""Scale updates by the learning rate; of a schedule the state keeps the last value, for a log."""

from typing import Any

import jax.numpy as jnp
import optax


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate`, with the same updates.
    For a schedule the state keeps the last rate.

    The state is then that of `optax.inject_hyperparams`. Its `hyperparams["learning_rate"]` is a
    float; before the first update, the rate that it will have.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = scale_by_learning_rate(optax.linear_schedule(0.5, 0.0, 2))
      >>> _, state = tx.update(jnp.ones(()), tx.init(jnp.ones(())))
      >>> int(state.count), float(state.hyperparams["learning_rate"])
      (1, 0.5)
    """
    if not callable(learning_rate):
        return optax.scale_by_learning_rate(learning_rate)

    def scale_by(learning_rate: Any) -> optax.GradientTransformation:
        """The transformation at one step, where the rate is a number."""
        # In the update's dtype, as Optax multiplies
        return optax.stateless_with_tree_map(
            lambda u, _: -learning_rate.astype(jnp.result_type(u)) * u
        )

    # Optax keeps the count, and at each step calls `scale_by` with the rate at it, which has a
    # dtype already. Without `hyperparam_dtype` it would look for the highest dtype of the
    # parameters, and raise for bfloat16 next to float16.
    wide = jnp.result_type(float)
    with_schedule = optax.inject_hyperparams(scale_by, hyperparam_dtype=wide)
    # A copy, because a schedule may return the same array twice, as for the state of the matrices
    # and that of AdamW, and a buffer in two places can't be donated.
    return with_schedule(lambda count: jnp.array(learning_rate(count), wide))
