"""Scale updates by the learning rate; of a schedule the state keeps the last value, for a log."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from muonjax._common.linalg import at_least_float32


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate`, with the same updates; of a schedule the state keeps the last rate.

    The state is then that of `optax.inject_hyperparams`. Its `hyperparams["learning_rate"]` is a float; before the
    first update, the rate that it will have.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = scale_by_learning_rate(optax.linear_schedule(0.5, 0.0, 2))
      >>> _, state = tx.update(jnp.ones(()), tx.init(jnp.ones(())))
      >>> int(state.count), float(state.hyperparams["learning_rate"])
      (1, 0.5)
    """
    if not callable(learning_rate):
        return optax.scale_by_learning_rate(learning_rate)
    schedule = learning_rate

    def rate_at(count: jax.Array) -> jax.Array:
        # A copy, because a schedule may return the same array twice, and a buffer in two places can't be donated.
        return jnp.array(schedule(count), jnp.result_type(float))

    def scale_by(learning_rate: Any) -> optax.GradientTransformation:
        """The transformation at one step, where the rate is a number."""

        def step(u: Any, _: Any) -> jax.Array:
            # In the update's dtype, as Optax multiplies.
            return -learning_rate.astype(u.dtype) * u

        return optax.stateless_with_tree_map(step)

    # Optax keeps the count, and at each step calls `scale_by` with the rate at it.
    with_schedule = optax.inject_hyperparams(
        scale_by, hyperparam_dtype=jnp.result_type(float)
    )
    return with_schedule(rate_at)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """`optax.adamw`, computed in float32 or wider; for a schedule the state keeps the last rate."""
    # The members of Optax's own chain; the first and the last one have another state.
    return optax.chain(
        _scale_by_adam(**settings),
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def _scale_by_adam(**settings: Any) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, computed in float32 or wider; the state keeps its dtypes, whatever the gradients have.

    In float16 the square of a gradient of 1e-4 and an eps of 1e-8 are 0, and in bfloat16 the sum 0.999 v + 0.001 g^2
    is rounded to v. The first moment has `mu_dtype`, or the parameter's dtype, and the second one at least float32.
    """
    adam = optax.scale_by_adam(**settings)

    def widened(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), tree)

    def init(params: optax.Params) -> optax.OptState:
        state: Any = adam.init(params)
        return state._replace(nu=widened(state.nu))

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, new_state = adam.update(widened(updates), state, params)
        # Each update has the dtype of its gradient.
        directions = optax.tree.cast_like(directions, updates)
        return directions, optax.tree.cast_like(new_state, state)

    return optax.GradientTransformation(init, update)
