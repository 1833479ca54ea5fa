"""Check that what callers give is a tree of parameters."""

from collections.abc import Mapping
from typing import Any

from muonjax._common import trees
from muonjax._common.arguments import warn_once

INSPECT = (
    "Better: program = muonjax.inspect(loss_fn, params, batch), then muonjax.muon(2e-3, "
    "program)."
)
# Flax's other collections of variables.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")


def check_parameters(params: Any) -> None:
    """Raise TypeError unless this is a tree of arrays, or of their shapes,
    as a module or a `Program` is not.

    Warns of collections next to the parameters, as `model.init` of Flax returns them.
    """
    if callable(getattr(params, "dimension_numbers", None)):
        raise TypeError(
            "(params) got what inspect returned; give it second, after the parameters."
        )
    leaves = trees.flatten_paths(params)
    for path, leaf in leaves.items():
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        # A type such as jnp.float32 has a dtype too.
        is_array = is_number and not callable(leaf)
        # Shapes, numbers, and what Optax has masked may be leaves too.
        if not (is_array or trees.is_masked(leaf)):
            raise TypeError(
                f"(params) got {type(leaf).__name__} for the array {path!r}: give arrays alone, as "
                "model.init(key, x)['params'] or eqx.filter(model, eqx.is_inexact_array)."
            )
    # Names alone don't tell that batch_stats/norm/mean is a running mean and no parameter:
    # it would go to AdamW.
    if isinstance(params, Mapping) and "params" in params:
        beside = ", ".join(str(name) for name in params if name in _COLLECTIONS)
        if beside:
            warn_once(
                f"The parameters have {beside} too: give variables['params'] alone."
            )
