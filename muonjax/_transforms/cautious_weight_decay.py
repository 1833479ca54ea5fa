"""Weight decay that spares a weight which moves away from zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from muonjax._common.arguments import (
    check_rates,
    errors_of,
    fitted_mask,
    require_params,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Num


def cautious_weight_decay(
    weight_decay: optax.ScalarOrSchedule = 0.1, mask: Any = None
) -> optax.GradientTransformation:
    r"""Decay each weight only where update and weight have the same sign.

        u <- u + weight_decay 1[u w >= 0] w

    It takes the place of `optax.add_decayed_weights`, before `optax.scale_by_learning_rate`: u is
    still to be subtracted, so equal signs mean that it moves the weight toward zero.

    Args:
      weight_decay: A number or a schedule, >= 0; the learning rate multiplies it.
      mask: Leaves that decay, as in `optax.add_decayed_weights`: a tree of booleans, a prefix, or a
        function of the parameters. None: all.

    Returns:
      An `optax.GradientTransformation` with the state of `optax.add_decayed_weights`;
      `update` needs `params`.

    Raises:
      ValueError: If `weight_decay` is negative or infinite, or `update` gets no `params`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> tx = muonjax.cautious_weight_decay(0.5)
      >>> params, updates = jnp.array([2.0, 2.0]), jnp.array([1.0, -1.0])
      >>> tx.update(updates, tx.init(params), params)[0]
      Array([ 2., -1.], dtype=float32)

    Source: Chen et al., "Cautious weight decay", 2025 (arXiv:2510.12402), eq. (2).
    """
    with errors_of("cautious_weight_decay"):
        check_rates(weight_decay=weight_decay)
        # A mask that does not fit the parameters raises in `init`.
        decay = optax.add_decayed_weights(weight_decay, fitted_mask("mask", mask))

    def agreeing(
        u: Num[Array, "*leaf"] | None, w: Num[Array, "*leaf"]
    ) -> Num[Array, "*leaf"] | None:
        """The weight where its sign is the update's or the update is 0, else 0;
        None, as in Optax, where there is no update."""
        if u is None:
            return None
        # Signs, because a product of two small numbers underflows.
        product = jnp.sign(u).conj() * jnp.sign(w)
        return jnp.where(product.real >= 0, w, jnp.zeros_like(w))

    @errors_of("cautious_weight_decay")
    def update(updates, state, params=None):
        require_params(params)
        # `decay` adds `weight_decay` times the weights that it is given, in the leaves of `mask`
        # alone. It is given 0 for each entry that does not decay. None counts as a leaf: an update
        # of None has an array in `params`.
        weights = jax.tree.map(agreeing, updates, params, is_leaf=lambda x: x is None)
        return decay.update(updates, state, weights)

    return optax.GradientTransformation(
        errors_of("cautious_weight_decay")(decay.init), update
    )
