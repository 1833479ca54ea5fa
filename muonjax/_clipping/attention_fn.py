"""Wrap an attention function so that it also reports each head's largest logit."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp

from muonjax._clipping.errors import errors_of
from muonjax._clipping.largest import larger
from muonjax._clipping.max_logits import max_logits

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

# Arguments that say which pairs the softmax sees: these are measured so, others of such names are refused.
HONOURED = ("mask", "bias", "is_causal", "local_window_size", "query_seq_lengths", "key_value_seq_lengths")
HIDES = r"(^|_)(mask|masks|bias|segment_ids|lengths|lens|window|window_size)$"


# The name's ending of what is sown beside a statistic. It is one longer on the axis of heads: whichever axes `scan` and
# `vmap` give to layers, the two shapes tell heads from layers, also where there are as many of both.
AXES = "_axes"


def needs_parentheses(call: str) -> Callable[[Callable], Callable]:
    """Say what is wrong where Flax is given the function that makes attention functions, and calls it as one."""

    def decorate(make: Callable) -> Callable:
        @functools.wraps(make)
        def attention_fn(*args: Any, **settings: Any):
            if len(args) > 1:
                raise TypeError(
                    f"{call} makes an attention function: write attention_fn={call}(), with parentheses."
                )
            return make(*args, **settings)

        return attention_fn

    return decorate


class MeasuringSettings(TypedDict, total=False):
    """Keywords of `muonjax.linen.attention_fn` and `muonjax.nnx.attention_fn`, which `reporting` explains."""

    rotate: Callable[[jax.Array], jax.Array] | None
    scale: float | None
    local_window_size: int | tuple[int, int] | None
    block_q: int
    block_k: int


def reporting(
    call: str,
    base: Callable[..., jax.Array],
    sow: Callable[..., object],
    *,
    rotate: Callable[[jax.Array], jax.Array] | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    block_q: int = 512,
    block_k: int = 512,
    listens: Callable[[Any], bool] = lambda module: True,
) -> Callable[..., jax.Array]:
    """An attention function with Flax's arguments that calls `sow(module, name, value, ...)` before `base`.

    It sows each head's largest logit, and what says which of the axes is that of heads. Only if Flax passes the module,
    and it `listens`: otherwise nothing is measured.

    Args:
      call: The public function, for errors.
      base: As in the public functions.
      sow: As a module's.
      rotate: Rotary embedding, or another linear map of `[*batch, T, heads, D]`, applied to queries and keys
        before they are measured and handed to `base`.
      scale: The scale that `base` uses, if it isn't 1/√D.
      local_window_size: The window that `base` uses, as in `max_logits`.
      block_q: Queries that are held at a time, as in `max_logits`.
      block_k: Keys that are held at a time.
      listens: Whether a module's statistics are collected.
    """
    with errors_of(call):
        fixed = _settings_of(base)
        blocks = {"block_q": block_q, "block_k": block_k}
        settings = _agreed({"scale": scale, "local_window_size": local_window_size}, fixed) | blocks
    parameters = inspect.signature(base).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    # Every argument is spelled out, because Linen passes only those that it reads from the signature:
    # **kwargs would silently lose the mask.
    def attention_fn(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        force_fp32_for_softmax=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
        is_causal=False,
    ):
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        given = {
            "bias": bias,
            "mask": mask,
            "dtype": dtype,
            "precision": precision,
            "force_fp32_for_softmax": force_fp32_for_softmax or None,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
            "is_causal": None if is_causal is False else is_causal,
        }
        if dropout_rate > 0:
            given |= {
                "dropout_rate": dropout_rate,
                "dropout_rng": dropout_rng,
                "broadcast_dropout": broadcast_dropout,
                "deterministic": deterministic,
            }
        given = {name: value for name, value in given.items() if value is not None}
        if lost := [name for name in given if name not in parameters and not takes_all]:
            raise TypeError(
                f"{call}: the attention function {_name(base)} takes no {lost}, which Flax passed."
            )
        if module is not None and listens(module):
            seen = fixed | given
            mask, causal = _visible_pairs(query, key, seen), seen.get("is_causal", False)
            maxima = max_logits(query, key, mask=mask, is_causal=causal, precision=precision, **settings)
            lowest = jnp.full_like(maxima, -jnp.inf)
            sow(module, "max_logits", maxima, reduce_fn=larger, init_fn=lambda: lowest)
            marker = jnp.full(maxima.shape[0] + 1, -jnp.inf, maxima.dtype)
            sow(module, f"max_logits{AXES}", marker, reduce_fn=larger, init_fn=lambda: marker)
        # `module` is not handed on: the base would sow the whole attention matrix.
        return base(query, key, value, **given)

    attention_fn.__dict__["reports"] = True  # for those who wrap a whole model
    return attention_fn


def _visible_pairs(
    query: Float[Array, "*batch T heads D"],
    key: Float[Array, "*batch S key_heads D"],
    arguments: dict[str, Any],
) -> Bool[Array, " ..."] | None:
    """The pairs that the mask, the bias and the lengths of an attention function leave visible; None for all.

    A bias hides a pair where it is so low that no softmax sees it: half the lowest number of its dtype, or -1e9.
    """
    T, S = query.shape[-3], key.shape[-3]
    masks = []
    if (mask := arguments.get("mask")) is not None:
        masks.append(jnp.asarray(mask).astype(bool))
    if (bias := arguments.get("bias")) is not None:
        bias = jnp.asarray(bias)
        masks.append(bias > max(float(jnp.finfo(bias.dtype).min) / 2, -1e9))
    if (lengths := arguments.get("key_value_seq_lengths")) is not None:
        masks.append((jnp.arange(S)[None] < jnp.asarray(lengths)[:, None])[:, None, None, :])
    if (lengths := arguments.get("query_seq_lengths")) is not None:
        masks.append((jnp.arange(T)[None] < jnp.asarray(lengths)[:, None])[:, None, :, None])
    rank = max((mask.ndim for mask in masks), default=0)
    masks = [mask.reshape((1,) * (rank - mask.ndim) + mask.shape) for mask in masks]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", None) or repr(fn)


def _settings_of(base: Callable) -> dict[str, Any]:
    """What `base` does when it is not told: its own defaults, and what a `functools.partial` fixes.

    Refuses a base whose softmax sees other logits than can be measured.
    """
    parameters = inspect.signature(base).parameters.values()
    settings = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    keywords = {}
    while isinstance(base, functools.partial):
        keywords = {**base.keywords, **keywords}
        base = base.func
    settings |= keywords  # those that **kwargs take stand in no signature
    if "rope" in _name(base):
        raise ValueError(
            f"base={_name(base)} rotates queries and keys after they are measured; pass the rotation as rotate=fn "
            f"instead, a function of one array [*batch, T, heads, D]."
        )
    caps = [name for name in settings if re.search(r"cap(ped|ping)?(_|$)", name) and _is_on(settings[name])]
    if caps:
        raise ValueError(
            f"base={_name(base)}: {caps[0]}={settings[caps[0]]} caps the logits that the softmax sees, which QK-Clip "
            f"neither measures nor scales. Leave the cap out; or keep it, for it bounds the logits itself: use this "
            f"attention unwrapped, and take it out of the clip's sites."
        )
    hiding = [
        name
        for name in settings
        if re.search(HIDES, name) and name not in HONOURED and settings[name] is not None
    ]
    if hiding:
        raise ValueError(
            f"base={_name(base)}: {hiding[0]}=... hides pairs from the softmax in a way that can't be measured; give "
            f"it as one of {', '.join(HONOURED)}, or as the mask that the module is called with."
        )
    return settings


def _agreed(settings: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Settings of `max_logits`, with the scale and the window that the base has."""
    own = {name: fixed[name] for name in ("scale", "local_window_size") if fixed.get(name) is not None}
    for name, value in own.items():
        if settings[name] not in (None, value):
            raise ValueError(
                f"{name}={settings[name]} contradicts the attention function, which has {value}."
            )
    return settings | own


def _is_on(cap: Any) -> bool:
    """Whether a cap is one: None and 0 turn it off."""
    return cap is not None and not (isinstance(cap, (int, float)) and cap == 0)
