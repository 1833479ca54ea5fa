"""EMA-Nesterov: gradients are taken ahead of the weights,
along the running mean of their changes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._common.arguments import check_range, check_transformation, errors_of
from muonjax._common.linalg import at_least_float32, scaled
from muonjax._common.trees import dtype_of, without_box
from muonjax._mesh.host_memory import leaf_by_leaf


class EmaNesterovState(NamedTuple):
    """State of `ema_nesterov`.

    Attributes:
      inner: The state of the transformation inside.
      count: Updates so far, int32.
      beta: How far the parameters of the training loop are ahead of the weights,
        in units of `ema`; a float.
      ema: The mean of the changes of the weights, like the parameters, in float32 or wider.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
      >>> state = muonjax.ema_nesterov(optax.sgd(0.1), 0.5).init(params)
      >>> state.ema["w"].dtype, int(state.count)
      (dtype('float32'), 0)
    """

    inner: Any
    count: jax.Array
    beta: jax.Array
    ema: Any


def ema_nesterov(
    inner: optax.GradientTransformation,
    beta: optax.ScalarOrSchedule,
    *,
    decay: float = 0.99,
) -> optax.GradientTransformationExtraArgs:
    r"""EMA-Nesterov around any optimizer: it steps from a point ahead of the weights,
    where the gradient was taken.

    With weights θ, the mean m of their changes and a step A of `inner`,

        y <- θ + beta m               what the model sees, and where its gradient is taken
        θ' <- A(y)
        m <- decay m + (1 - decay) (θ' - θ)

    The parameters of the training loop are y. For evaluation and for a checkpoint of the model take
    `ema_nesterov_params(state, params)`, which are θ; where `beta` is 0 both are the same. The
    state has one copy of the parameters more than that of `inner`.

    A clip has to see what the model sees, so it comes after:
    `chain(ema_nesterov(muon(1e-3), beta), qk_clip(100.0, program))`.
    `optax.MultiSteps` goes around.

    Args:
      inner: Any transformation with learning rate and weight decay included, such as `muon(1e-3)`.
        In host memory, one that is not muonjax's needs `offload(inner)`.
      beta: A number in [0, 1), or a schedule; at the step `t`, counted from 0, the gradient is
        taken at `beta(t)`. The authors' record has 0.3 to 0.6 times the learning rate over its
        maximum, and 0 in the first tenth or so of the steps and in the last quarter: with 3125
        steps `jnp.where((500 <= t) & (t < 2400), 0.6 * rate(t) / top, 0.0)`.
      decay: The decay of m, in [0, 1).

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is an `EmaNesterovState`.

    Raises:
      ValueError: `beta` or `decay` out of range; from `init`, a clip or `optax.MultiSteps` inside.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> tx = muonjax.ema_nesterov(optax.sgd(1.0), 0.5, decay=0.0)
      >>> params = {"w": jnp.zeros(())}
      >>> updates, state = tx.update({"w": jnp.ones(())}, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> float(params["w"]), float(muonjax.ema_nesterov_params(state, params)["w"])
      (-1.5, -1.0)

    Source: Yau et al., "EMA-Nesterov", 2026 (arXiv:2605.25395); modded-nanogpt, track 3,
    records 39 and 40.
    """
    with errors_of("ema_nesterov"):
        check_transformation("inner", inner)
        why = ": m would grow by itself; 0.3 is usual."
        check_range("beta", beta, "in [0, 1)", why, schedule=True)
        check_range("decay", decay, "in [0, 1)", ": it is a mean's; 0.99 is usual.")
    inner = optax.with_extra_args_support(inner)

    def beta_at(count: jax.Array) -> jax.Array:
        """beta at this step, counted from 0, as an array."""
        return jnp.asarray(
            beta(count) if callable(beta) else beta, jnp.result_type(float)
        )

    def init(params) -> EmaNesterovState:
        inner_state = inner.init(params)
        # `inner` makes the weights θ, and the model sees the parameters y = θ + beta m, where m,
        # the state's `ema`, is the mean of the changes of θ. A clip inside would bound the logits
        # at θ and not at y. `optax.MultiSteps` inside returns zeros between its steps, and m would
        # count them as changes.
        if _nodes(inner_state, _is_clip_or_accumulation):
            raise ValueError(
                "ema_nesterov(inner): a clip or optax.MultiSteps is inside; put the clip after it, "
                "optax.chain(ema_nesterov(...), qk_clip(...)), and optax.MultiSteps around it."
            )
        count = jnp.zeros([], jnp.int32)
        # A step adds (1 - decay) of its change, usually a hundredth: in bfloat16 that would often
        # be below the last bit of the mean, and be lost.
        ema = jax.tree.map(
            lambda p: jnp.zeros_like(p, at_least_float32(dtype_of(p))), params
        )
        # The state keeps the beta of the step `count`, by which y is ahead of θ until the next
        # update. So θ is known: `update` takes its change, and `ema_nesterov_params` returns
        # y - beta m.
        return EmaNesterovState(inner_state, count, beta_at(count), ema)

    def update(updates, state, params=None, **extra_args):
        # `params` are y = θ + beta m: θ are the weights that `inner` has made, and m is the mean of
        # their changes. With θ' = A(y), the step A of `inner` returns u = θ' - y.
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        # The next gradient is taken at the parameters that this update makes: they are ahead by the
        # beta of the next step. The state keeps it, for `ema_nesterov_params` to step back by.
        count = jnp.asarray(optax.safe_increment(state.count))
        next_beta = beta_at(count)

        def step(u: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
            """y' - y and the new m of one leaf."""
            # A parameter may be a Python number.
            u = jnp.asarray(u)
            wide = u.astype(m.dtype)
            # θ' - θ = (θ' - y) + (y - θ) = u + beta m
            change = wide + scaled(m, state.beta)
            # m <- decay m + (1 - decay) (θ' - θ)
            m = scaled(m, decay) + scaled(change, 1 - decay)
            # y' - y = (θ' - y) + (y' - θ') = u + beta' m', by the new mean m' and the next beta.
            # No difference of weights is taken, which would round.
            return (wide + scaled(m, next_beta)).astype(u.dtype), m

        # A mean in host memory is copied to the device leaf by leaf, each for its step, and back.
        updates, ema = leaf_by_leaf(step, updates, state.ema)
        return updates, EmaNesterovState(inner_state, count, next_beta, ema)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_clip_or_accumulation(node: Any) -> bool:
    """Whether a node is the state of a clip or of `optax.MultiSteps`:
    they tell by their fields and their class."""
    return hasattr(node, "maxima") or isinstance(node, optax.MultiStepsState)


def ema_nesterov_params(state: Any, params: optax.Params) -> Any:
    """The weights θ behind the parameters y of the training loop: for evaluation, and to keep.

    Args:
      state: An optimizer's state with an `EmaNesterovState` in it,
        alone or in a chain at any depth.
      params: The parameters of the training loop after the update that returned `state`.

    Returns:
      params - beta m, where m is the state's mean of the weights' changes,
      with the dtypes of `params`.

    Raises:
      ValueError: The state does not have exactly one `EmaNesterovState`,
        or has one of other parameters.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"w": jnp.eye(4)}
      >>> tx = muonjax.ema_nesterov(muonjax.muon(1e-3), 0.5)
      >>> bool((muonjax.ema_nesterov_params(tx.init(params), params)["w"] == params["w"]).all())
      True

    Source: as `ema_nesterov`; compare `optax.contrib.schedule_free_eval_params`.
    """
    with errors_of("ema_nesterov_params"):
        states = _nodes(state, lambda node: isinstance(node, EmaNesterovState))
        if len(states) != 1:
            raise ValueError(
                f"(state, params) needs one ema_nesterov, not {len(states)}."
            )
        # A parameter may be a Python number.
        leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, params))
        means = jax.tree.leaves(states[0].ema)
        if [y.shape for y in leaves] != [m.shape for m in means]:
            raise ValueError(
                "(state, params): params have other shapes than the state."
            )
    # The last update stored the beta of the next gradient: by it the parameters are ahead.
    # `nnx.Optimizer` boxes each leaf of a state.
    beta = without_box(states[0].beta)
    weights = []
    for y, m in zip(leaves, means, strict=True):
        # θ = y - beta m
        weight = y.astype(m.dtype) - scaled(m, beta)
        weights.append(weight.astype(y.dtype))
    return treedef.unflatten(weights)


def _nodes(state: Any, fits: Callable[[Any], bool]) -> list[Any]:
    """The outermost nodes of a state that fit."""
    leaves = jax.tree.leaves(state, is_leaf=fits)
    return list(filter(fits, leaves))
