"""Scale updates by the learning rate; of a schedule the state keeps the last value, for a log."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LearningRateState(NamedTuple):
    """State of `scale_by_learning_rate` with a schedule.

    Attributes:
      count: Updates so far, int32.
      learning_rate: The rate of the last update, a float; before the first update, the rate that it will have.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from muonjax._transforms.learning_rate import scale_by_learning_rate
      >>> tx = scale_by_learning_rate(optax.linear_schedule(0.5, 0.0, 2))
      >>> _, state = tx.update(jnp.ones(()), tx.init(None))
      >>> int(state.count), float(state.learning_rate)
      (1, 0.5)
    """

    count: jax.Array
    learning_rate: jax.Array


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate`, with the same updates; for a schedule the state is a `LearningRateState`."""
    if not callable(learning_rate):
        return optax.scale_by_learning_rate(learning_rate)
    schedule = learning_rate

    def rate_at(count: jax.Array) -> jax.Array:
        # A copy, because a schedule may return the same array twice, and a buffer in two places can't be donated.
        return jnp.array(schedule(count), jnp.result_type(float))

    def init(params) -> LearningRateState:
        del params
        count = jnp.zeros([], jnp.int32)
        return LearningRateState(count, rate_at(count))

    def update(updates, state, params=None):
        del params
        rate = rate_at(state.count)
        # In the update's dtype, as Optax multiplies.
        updates = jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates)
        # Increments stop at the largest int32.
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, LearningRateState(count, rate)

    return optax.GradientTransformation(init, update)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """`optax.adamw`, with the same updates; for a schedule the state has a `LearningRateState`."""
    # The members of Optax's own chain; only the last one has another state.
    return optax.chain(
        optax.scale_by_adam(**settings),
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
