"""The optimizers that clip attention logits: one that is given, then `qk_clip`."""

from typing import Any, TypedDict, Unpack

import jax
import optax

from muonjax._clip.qk_clip import clip_logits, qk_clip
from muonjax._clip.sites import Sites
from muonjax._common.arguments import (
    WIDE_FLOATS,
    check_flag,
    check_mask,
    check_order,
    check_range,
    check_rates,
    errors_of,
    given_dtype,
    other_state,
    refuse_positional,
    require_params,
)
from muonjax._common.keywords import explains_keywords
from muonjax._inspect.program import Program
from muonjax._matrices.matrix_view import DimensionNumbersTree
from muonjax._mesh.state import offload
from muonjax._optimizers.muon import MuonSettings, muon
from muonjax._optimizers.partition import check_program


class AdamWSettings(TypedDict, total=False):
    """Keywords of `optax.adamw`."""

    b1: float
    b2: float
    eps: float
    eps_root: float
    mu_dtype: jax.typing.DTypeLike | None
    weight_decay: float
    mask: Any
    nesterov: bool


@explains_keywords("muonclip", muon, qk_clip)
def muonclip(
    learning_rate: optax.ScalarOrSchedule,
    program: Sites | None = None,
    *,
    threshold: optax.ScalarOrSchedule = 100.0,
    every_k: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    dimension_numbers: DimensionNumbersTree | None = None,
    **settings: Unpack[MuonSettings],
) -> optax.GradientTransformationExtraArgs:
    """MuonClip, the optimizer of Kimi K2: `muon`, then `qk_clip`.

    With S the largest attention logit of a head and gamma = min(1, threshold / S), the head's query and key that `muon`
    arrives at are scaled so that the same inputs give at most `threshold`: each by sqrt(gamma) where the head has a key
    of its own, otherwise as `qk_clip` says.

    Args:
      program: What `muonjax.inspect` returns: it says which leaves are matrices and where attention is. Or, for an
        attention inside of a kernel, sites by hand, such as `mha_site()`.
      threshold: The largest pre-softmax logit allowed, after the 1/sqrt(d) scale and the mask; > 0.
      every_k: As in `qk_clip`.
      dimension_numbers: With sites by hand, which leaves are matrices: what `muon` takes as `program`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `update(grads, state, params, max_logits=statistics)`; the
      statistics, [*layers, heads] for each module, are those of `qk_clip`. The last entry of its state is a
      `QKClipState`.

    Raises:
      ValueError: No program or sites; while tracing, if `max_logits` is missing or does not fit them; otherwise as
        `muon` and `qk_clip`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> tx = muonjax.muonclip(1e-3, muonjax.mha_site(), threshold=100.0)
      >>> statistics = {"attention": jnp.array([400.0, 50.0])}  # one logit per head
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=statistics)
      >>> state[-1].factors["attention"]
      Array([0.25, 1.  ], dtype=float32)

    Source: Kimi Team, "Kimi K2", 2025, section 2.1; J. Su, kexue.fm/archives/11126.
    """
    if dimension_numbers is None and isinstance(program, Program):
        dimension_numbers = program
    check_program("muonclip", "dimension_numbers", dimension_numbers)
    with errors_of("muonclip"):
        optimizer = muon(learning_rate, dimension_numbers, **settings)
    return _then_clip("muonclip", optimizer, threshold, program, every_k, axis_name)


@explains_keywords("adamclip", optax.adamw, muonclip)
def adamclip(
    learning_rate: optax.ScalarOrSchedule,
    program: Sites | None = None,
    *,
    threshold: optax.ScalarOrSchedule = 100.0,
    every_k: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    **settings: Unpack[AdamWSettings],
) -> optax.GradientTransformationExtraArgs:
    """AdamW, then `qk_clip`: with AdamW too, attention logits can grow until training fails.

    Args:
      learning_rate: A number or an Optax schedule.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `update(grads, state, params, max_logits=statistics)`.

    Raises:
      ValueError, TypeError: A setting out of its range; otherwise as `qk_clip`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> tx = muonjax.adamclip(1e-3, muonjax.mha_site(), threshold=100.0, b2=0.95)
      >>> statistics = {"attention": jnp.array([50.0, 25.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=statistics)
      >>> int(state[-1].num_clipped)
      0

    Source: J. Su, kexue.fm/archives/11126.
    """
    _check_adamw(learning_rate=learning_rate, **settings)
    optimizer = offload(optax.adamw(learning_rate, **settings))
    return _then_clip("adamclip", optimizer, threshold, program, every_k, axis_name)


def _check_adamw(mask: Any = None, nesterov: Any = False, mu_dtype: Any = None, **numbers: Any) -> None:
    check_mask("adamclip", "mask", mask)
    check_flag("adamclip", "nesterov", nesterov)
    if mu_dtype is not None:
        given_dtype("adamclip", "mu_dtype", mu_dtype, WIDE_FLOATS, "a float type of 16 bits or more")
    for name in numbers.keys() & {"b1", "b2"}:
        check_range("adamclip", name, numbers.pop(name), "in [0, 1)", ".")
    check_rates("adamclip", **numbers)


def _then_clip(
    call: str,
    optimizer: optax.GradientTransformation,
    threshold: Any,
    sites: Any,
    every_k: Any,
    axis_name: Any,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer and its clip as a chain, which knows the state of another optimizer."""
    clip = clip_logits(call, threshold, sites, every_k, axis_name)
    chain = optax.chain(optimizer, clip)
    own: Any = optimizer.init({})

    def update(updates: optax.Updates, state: Any, params: Any = None, *unnamed: Any, **extra_args: Any):
        refuse_positional(unnamed)
        require_params(call, params)
        check_order(call, updates, state, params)
        pair = isinstance(state, (tuple, list)) and len(state) == 2 and hasattr(state[1], "factors")
        if not (pair and len(state[0]) == len(own)):
            raise ValueError(other_state(call, state))
        return chain.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(chain.init, update)


# A doctest is not found behind a decorator.
__test__ = {f.__name__: f for f in (muonclip, adamclip)}
