"""The optimizers: compositions only. Each line is a member of `optax.chain` that can be had on its
own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax

from muonjax._clip.clip_by_statistic import ClipByStatistic
from muonjax._clip.qk_clip import clip_of_logits
from muonjax._clip.site import Sites
from muonjax._common.arguments import (
    WIDE_FLOATS,
    check_range,
    check_rates,
    check_transformation,
    check_update,
    errors_of,
    explains_keywords,
    fitted_mask,
    given_dtype,
    message_for_other_state,
)
from muonjax._common.explicit_axes import sharded_like
from muonjax._inspect.program import Program
from muonjax._matrices.matrix_view import DimensionNumbersTree
from muonjax._mesh.distribution import Distribution
from muonjax._mesh.host_memory import offload
from muonjax._names.routes import decays
from muonjax._newton_schulz.settings import NewtonSchulz
from muonjax._optimizers.partition import check_program, partition_by_route
from muonjax._transforms.adamw import adamw
from muonjax._transforms.hyperball import hyperball
from muonjax._transforms.learning_rate import scale_by_learning_rate
from muonjax._transforms.match_rms import match_rms
from muonjax._transforms.momentum import momentum_dtype, trace
from muonjax._transforms.normalize_neurons import normalize_neurons
from muonjax._transforms.orthogonalize import orthogonalize

Member = Callable[[DimensionNumbersTree], optax.GradientTransformation]
"""Makes a member of a chain from the dimension numbers of the matrices."""


class MatrixSettings(TypedDict, total=False):
    """Keywords that `muon`, `normuon` and `muonh` have in common; described in `muon`."""

    decay: optax.ScalarOrSchedule
    nesterov: bool
    mu_dtype: jax.typing.DTypeLike | None
    newton_schulz: NewtonSchulz | None
    adam_learning_rate: optax.ScalarOrSchedule | None
    adam: optax.GradientTransformation | None
    distribution: Distribution | None


class MuonSettings(MatrixSettings, total=False):
    """The keywords of `muon`, to annotate functions that hand them on.

    Example:
      >>> import muonjax, optax
      >>> from typing import Unpack
      >>> from muonjax._optimizers.muon import MuonSettings
      >>> def warmed_up(peak: float, **settings: Unpack[MuonSettings]):
      ...     return muonjax.muon(optax.warmup_constant_schedule(0.0, peak, 100), **settings)
      >>> tx = warmed_up(2e-3, decay=0.9)
    """

    weight_decay: optax.ScalarOrSchedule
    weight_decay_mask: Any
    rms: float | None


def _orthogonalized(
    call: str,
    members: Sequence[Member],
    program: DimensionNumbersTree | None,
    adam_rate: optax.ScalarOrSchedule,
    adam_decay: optax.ScalarOrSchedule,
    adam_mask: Any,
    *,
    decay: optax.ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    mu_dtype: jax.typing.DTypeLike | None = None,
    newton_schulz: NewtonSchulz | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam: optax.GradientTransformation | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """For matrices momentum, its polar factor, then `members`; for all other leaves AdamW,
    or `adam`.

    Args:
      call: Names the optimizer in errors.
      members: What follows the polar factor in the chain.
      program: As in `muon`.
      adam_rate: AdamW's learning rate, unless `adam_learning_rate` is given.
      adam_decay: AdamW's weight decay.
      adam_mask: The leaves that AdamW decays, as `weight_decay_mask` in `muon`.

    All other arguments are as in `muon`; `decay` is that of the momentum.
    """
    # `trace` would name its own argument, accumulator_dtype, in an error.
    mu_dtype = momentum_dtype("mu_dtype", mu_dtype)
    check_program("program", program)
    if adam_learning_rate is not None:
        check_rates(adam_learning_rate=adam_learning_rate)
        if adam is not None:
            raise ValueError(
                "(adam_learning_rate=..., adam=...) takes one of them: `adam` has a rate of its "
                "own."
            )
        adam_rate = adam_learning_rate

    def matrices(numbers: DimensionNumbersTree) -> optax.GradientTransformation:
        momentum = trace(decay, nesterov, mu_dtype, distribution=distribution)
        polar = orthogonalize(
            dimension_numbers=numbers,
            newton_schulz=newton_schulz,
            distribution=distribution,
        )
        # A state may be in host memory. `trace` copies its own leaf by leaf, and `orthogonalize`
        # has none; `offload` copies the states of all others, such as `normalize_neurons`.
        others = [offload(member(numbers)) for member in members]
        return optax.chain(momentum, polar, *others)

    if adam is None:
        # Without a mask, names tell biases and norms, which do not decay.
        # A program tells vectors of any name.
        vectors = getattr(program, "vectors", ())
        adam = adamw(
            adam_rate,
            b2=0.95,
            weight_decay=adam_decay,
            mask=adam_mask or functools.partial(decays, vectors=vectors),
            # Adam's first moment has no 8-bit form.
            mu_dtype=None if mu_dtype == jnp.int8 else mu_dtype,
        )
    else:
        check_transformation("adam", adam)

    # This chain is thrown away: the members check their settings where they are made, so that a
    # mistake shows before the first step. They read dimension numbers only when they get a tree,
    # so None will do.
    matrices(None)
    return partition_by_route(call, matrices, adam, program)


def _muon_like(
    call: str,
    members: Sequence[Member],
    learning_rate: optax.ScalarOrSchedule,
    program: DimensionNumbersTree | None,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.1,
    weight_decay_mask: Any = None,
    rms: float | None = 0.2,
    **settings: Unpack[MatrixSettings],
) -> optax.GradientTransformationExtraArgs:
    """`muon`, with `members` between the polar factor and its scale.

    Args:
      call: Names the optimizer in errors.
      members: Empty in `muon`, and `normalize_neurons` in `normuon`.

    All other arguments are as in `muon`.
    """
    # `optax.add_decayed_weights` and the rate check nothing, and a mask that does not fit would be
    # Optax's error, about trees.
    check_rates(learning_rate=learning_rate, weight_decay=weight_decay)
    mask = fitted_mask("weight_decay_mask", weight_decay_mask)
    # W <- W - learning_rate (O + weight_decay W) for the scaled polar factor O of a matrix.
    # AdamW, for all other leaves, gets this rate, weight decay and mask too, in the last line;
    # `settings` may have another rate for it.
    all_members = [
        *members,
        lambda numbers: match_rms(rms, dimension_numbers=numbers),
        lambda _: optax.add_decayed_weights(weight_decay, mask),
        lambda _: scale_by_learning_rate(learning_rate),
    ]
    return _orthogonalized(
        call, all_members, program, learning_rate, weight_decay, mask, **settings
    )


@explains_keywords("muon", _muon_like, _orthogonalized)
def muon(
    learning_rate: optax.ScalarOrSchedule,
    program: DimensionNumbersTree | None = None,
    **settings: Unpack[MuonSettings],
) -> optax.GradientTransformationExtraArgs:
    r"""Muon, as Moonlight trains with it: orthogonalized momentum for matrices, AdamW for the rest.

    A matrix W with gradient G moves by

        M <- decay M + G
        W <- W - learning_rate (rms sqrt(max(m, n)) msign(G + decay M) + weight_decay W)

    Args:
      learning_rate: A number or an Optax schedule, >= 0;
        with `rms=0.2` begin at two to four times AdamW's.
      program: Which leaves are matrices, and how: what `muonjax.inspect` returns, a tree of
        `MuonDimensionNumbers` or None, a prefix, or a function of the parameters. None reads it off
        names and shapes (`muonjax.tabulate` shows how).
      decay: Coefficient of the momentum, a number in [0, 1) or an Optax schedule.
      nesterov: Look one step ahead, G + decay M; False takes M itself.
      mu_dtype: Dtype of the momentum, such as `jnp.bfloat16` or `jnp.int8` (see `trace`); None is
        the parameter's. A float type is that of AdamW's first moment too.
      newton_schulz: Settings of the orthogonalization; None is `NewtonSchulz.balanced()`.
      adam_learning_rate: Rate of AdamW for all other leaves, a number or a schedule, >= 0;
        None is `learning_rate`.
      adam: In place of AdamW (`optax.adamw` with b2 = 0.95), a transformation with a learning rate
        of its own. It says itself which leaves decay.
      distribution: How the parameters are sharded (see `orthogonalize`).
      weight_decay: A number or a schedule, times the learning rate, >= 0; for the matrices,
        and for AdamW's leaves.
      weight_decay_mask: Leaves that decay: a tree of booleans, a prefix, or a function of the
        parameters. None: all but those of one axis, those whose names say bias or scale, and those
        that the program finds added along a layer's columns alone, as a query's bias [heads, size].
        Axes of layers and axes of size 1 do not count for a program.
      rms: Root mean square of an update before the learning rate (see `match_rms`). None scales by
        sqrt(max(1, fan_out / fan_in)) instead, as optax.contrib.muon does by default.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `update` needs `params`.

    Raises:
      ValueError, TypeError: A setting is out of its range; while tracing, a leaf can't be viewed as
        matrices, or the state is that of other parameters.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> tx = muonjax.muon(1e-3)
      >>> updates, state = tx.update(params, tx.init(params), params)

    Source: Jordan et al., "Muon", 2024; Liu et al., "Muon is scalable for LLM training", 2025
    (arXiv:2502.16982).
    """
    # There are no members between the polar factor and its scale. The decorator puts the keywords
    # of `_muon_like` and `_orthogonalized`, with their defaults, in the place of `settings` in
    # `help`, and explains an unknown one.
    return _muon_like("muon", [], learning_rate, program, **settings)


@explains_keywords("normuon", muon)
def normuon(
    learning_rate: optax.ScalarOrSchedule,
    program: DimensionNumbersTree | None = None,
    *,
    neuron_decay: float = 0.95,
    **settings: Unpack[MuonSettings],
) -> optax.GradientTransformationExtraArgs:
    """NorMuon: `muon`, with `normalize_neurons` directly after `orthogonalize`.

    Args:
      learning_rate: A number or an Optax schedule, >= 0;
        with `rms=0.2` begin at two to four times AdamW's.
      neuron_decay: Decay of the running mean square of each neuron, in [0, 1).

    All other arguments are as in `muon`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `update` needs `params`.

    Raises:
      ValueError, TypeError: As `muon` and `normalize_neurons`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> tx = muonjax.normuon(1e-3)
      >>> updates, state = tx.update(params, tx.init(params), params)

    Source: Li et al., "NorMuon: making Muon more efficient and scalable", 2025 (arXiv:2510.05491).
    """
    # `normalize_neurons` would name its own argument, decay, in an error.
    check_range("neuron_decay", neuron_decay, "in [0, 1)", "; 0.95 is usual.")
    # `_muon_like` makes a chain with these between the polar factor and its scale, for the
    # dimension numbers of the matrices.
    members = [
        lambda numbers: normalize_neurons(neuron_decay, dimension_numbers=numbers)
    ]
    return _muon_like("normuon", members, learning_rate, program, **settings)


@explains_keywords("muonh", _orthogonalized)
def muonh(
    learning_rate: optax.ScalarOrSchedule,
    program: DimensionNumbersTree | None = None,
    **settings: Unpack[MatrixSettings],
) -> optax.GradientTransformationExtraArgs:
    """MuonH: orthogonalized momentum, and each weight matrix keeps its Frobenius norm (see
    `hyperball`).

    There is no weight decay and no RMS matching: the norms of the weights are fixed, in bfloat16 to
    one rounding, and a step is an angle. Matrices must not start from zero.

    Args:
      learning_rate: For matrices: the length of a step in units of the weight's norm, a number or a
        schedule, >= 0; 0.01 to 0.02 is usual.
      adam_learning_rate: For all other leaves, by `optax.adamw` with b2 = 0.95 and no weight decay,
        since `learning_rate` has another unit. Give either it or `adam`.

    All other arguments are as in `muon`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `update` needs `params`.

    Raises:
      ValueError, TypeError: Without `adam_learning_rate` and `adam`;
        otherwise as `muon` and `hyperball`.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
      >>> tx = muonjax.muonh(0.02, adam_learning_rate=1e-3)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(optax.apply_updates(params, updates)["dense"]["kernel"])), 4)
      2.0

    Source: Wen et al., "Fantastic pretraining optimizers and where to find them II: hyperball
    optimization", 2026 (arXiv:2606.16899).
    """
    if settings.get("adam_learning_rate") is None and settings.get("adam") is None:
        raise ValueError(
            "(adam_learning_rate=None) needs a rate for all but matrices, such as 1e-3, or adam=."
        )
    members = [lambda numbers: hyperball(learning_rate, dimension_numbers=numbers)]
    # 0.0, 0.0 and None are AdamW's rate, weight decay and mask. The rate is not used, as one of
    # those two settings replaces it; nothing decays in MuonH, so no mask is needed.
    return _orthogonalized("muonh", members, program, 0.0, 0.0, None, **settings)


class AdamWSettings(TypedDict, total=False):
    """Keywords of `optax.adamw`."""

    b1: float
    b2: float
    eps: float
    eps_root: float
    mu_dtype: jax.typing.DTypeLike | None
    weight_decay: optax.ScalarOrSchedule
    mask: Any
    nesterov: bool


@explains_keywords("muonclip", muon)
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

    With S the largest attention logit of a head and gamma = min(1, threshold / S), the head's query
    and key that `muon` arrives at are scaled so that the same inputs give at most `threshold`: each
    by sqrt(gamma) where the head has a key of its own, otherwise as `qk_clip` says.

    Inside of `optax.MultiSteps` it would see the logits of the last micro-batch alone: chain `muon`
    in `MultiSteps` with `qk_clip`, as `qk_clip` says.

    Args:
      program: What `muonjax.inspect` returns: it says which leaves are matrices and where attention
        is. Or, for an attention inside of a kernel, sites by hand, such as `mha_site()`.
      threshold: The largest pre-softmax logit allowed, after the 1/sqrt(d) scale and the mask; > 0.
      every_k: As in `qk_clip`.
      dimension_numbers: Which leaves are matrices, in place of the program's answer: what `muon`
        takes as `program`. None: the program decides, or with sites by hand the names.

    All other arguments are as in `muon` and `qk_clip`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with
      `update(grads, state, params, max_logits=statistics)`; the statistics, [*layers, heads] for
      each module, are those of `qk_clip`. The last entry of its state is a `QKClipState`.

    Raises:
      ValueError: No program or sites; while tracing, if `max_logits` is missing or does not fit
        them; otherwise as `muon` and `qk_clip`.

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
    # A program says which leaves are matrices too. Sites by hand don't:
    # without dimension numbers, names decide.
    if dimension_numbers is None and isinstance(program, Program):
        dimension_numbers = program
    # `muon` checks them too, and would call them its "program".
    check_program("dimension_numbers", dimension_numbers)
    optimizer = muon(learning_rate, dimension_numbers, **settings)
    # A chain of both
    return _clipped(
        optimizer, clip_of_logits("muonclip", threshold, program, every_k, axis_name)
    )


@explains_keywords("adamclip", optax.adamw)
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
      program: As in `muonclip`; without it an error shows how to get one.

    All other arguments are as in `qk_clip`, `muonclip` and `optax.adamw`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with
      `update(grads, state, params, max_logits=statistics)`.

    Raises:
      ValueError, TypeError: As `qk_clip`. Optax does not check its numbers, such as b1 and
        `weight_decay`.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> tx = muonjax.adamclip(1e-3, muonjax.mha_site(), threshold=100.0, b2=0.95)
      >>> statistics = {"attention": jnp.array([50.0, 25.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=statistics)
      >>> muonjax.metrics(state)["qk_clip/num_clipped"]
      0.0

    Source: J. Su, kexue.fm/archives/11126.
    """
    check_rates(learning_rate=learning_rate)
    # int8 is for Muon's momentum, which has scales. Optax would cast Adam's first moment to it, and
    # round it away; float8 has too few digits as well.
    mu_dtype = settings.get("mu_dtype")
    if mu_dtype is not None:
        given_dtype(
            "mu_dtype", mu_dtype, WIDE_FLOATS, "a float type of 16 bits or more"
        )
    # Optax's error for a mask that does not fit would speak of trees; this one names the argument.
    settings["mask"] = fitted_mask("mask", settings.get("mask"))
    # muonjax's `adamw` is Optax's, computed in float32 or wider. Its moments may be in host memory,
    # as Muon's momentum may.
    optimizer = offload(adamw(learning_rate, **settings))
    return _clipped(
        optimizer, clip_of_logits("adamclip", threshold, program, every_k, axis_name)
    )


def _clipped(
    optimizer: optax.GradientTransformation, clip: ClipByStatistic
) -> optax.GradientTransformationExtraArgs:
    """A chain of the optimizer and its clip, whose update refuses a state that another optimizer
    made."""
    chain = optax.chain(optimizer, clip.transformation())
    # The length of its state tells the optimizer from another one. AdamW's has an entry for each of
    # the three members of its chain, and that of `muon` has one, a dict with the states of the
    # matrices and of all other leaves. `init` of an empty tree makes no arrays but counters.
    num_states = len(optimizer.init({}))  # pyright: ignore[reportArgumentType]

    @errors_of(clip.call)
    def update(updates, state, params=None, *unnamed, **extra_args):
        check_update(params, unnamed)
        # The optimizer's state, and the clip's, which the clip itself checks.
        # A restored state may be a list.
        is_pair = isinstance(state, (tuple, list)) and len(state) == 2
        if not is_pair or len(state[0]) != num_states:
            raise ValueError(message_for_other_state(state))
        updates, state = chain.update(updates, state, params, **extra_args)
        # With explicit axis types AdamW's updates come on the shards of its state. Where that is
        # divided and the parameters are replicated, as in ZeRO, the parameters would be divided.
        return jax.tree.map(sharded_like, updates, params), state

    return optax.GradientTransformationExtraArgs(
        errors_of(clip.call)(chain.init), update
    )


# A doctest is not found behind a decorator.
__test__ = {f.__name__: f for f in (muon, normuon, muonh, muonclip, adamclip)}
