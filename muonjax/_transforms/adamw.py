"""AdamW for the leaves that are no matrices, computed in float32 or wider."""

from typing import Any

import jax
import optax

from muonjax._common.linalg import at_least_float32, common_dtype
from muonjax._transforms.learning_rate import scale_by_learning_rate


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """`optax.adamw`, computed in float32 or wider; for a schedule the state keeps the last rate.
    `settings` are those of `optax.scale_by_adam`."""
    # Optax's own chain with another first and last member. The first computes in float32 or wider
    # and keeps the second moments so: in float16 the squares of small gradients would be 0, and
    # bfloat16 would round their changes of a thousandth away. The last one keeps the rate of a
    # schedule's last step in its state, for a log.
    return optax.chain(
        _scale_by_adam(**settings),
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def _scale_by_adam(**settings: Any) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, computed in float32 or wider; the state keeps its dtypes,
    whatever the gradients have.

    In float16 the square of a gradient of 1e-4 and an eps of 1e-8 are 0, and in bfloat16 the sum
    0.999 v + 0.001 g^2 is rounded to v. The first moment has `mu_dtype`, or the parameter's dtype,
    and the second one at least float32.
    """
    adam = optax.scale_by_adam(**settings)

    def widened(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), tree)

    def init(params: optax.Params) -> optax.OptState:
        state: Any = adam.init(params)
        # Optax's second moment has the parameter's dtype.
        return state._replace(nu=widened(state.nu))

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, new_state = adam.update(widened(updates), state, params)
        # An update has the wider dtype of its gradient and its parameter, as in Optax. Each array
        # of the state keeps the dtype that it had: that of `init`, or of a restored checkpoint.
        directions = jax.tree.map(
            lambda x, g, p: x.astype(common_dtype(g.dtype, p.dtype)),
            directions,
            updates,
            params,
        )
        return directions, optax.tree.cast_like(new_state, state)

    return optax.GradientTransformation(init, update)
