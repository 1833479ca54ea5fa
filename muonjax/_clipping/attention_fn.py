"""Wrap an attention function so that it also reports each head's largest logit."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp

from muonjax._arguments import errors_of
from muonjax._clipping.largest import larger
from muonjax._clipping.max_logits import max_logits

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

# Arguments that say which pairs the softmax sees: these are measured so, others of such names are refused.
HONOURED = ("mask", "bias", "is_causal", "local_window_size", "query_seq_lengths", "key_value_seq_lengths")
HIDES = r"(^|_)(mask|masks|bias|segment_ids|lengths|lens|window|window_size)$"
DROPOUT = ("dropout_rate", "dropout_rng", "broadcast_dropout", "deterministic")


# The name's ending of what is sown beside a statistic. It is one longer on the axis of heads: whichever axes `scan` and
# `vmap` give to layers, the two shapes tell heads from layers, also where there are as many of both.
AXES = "_axes"


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
    like: Callable[..., jax.Array],
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
      like: Flax's own attention function.
      sow: As a module's.
      rotate: Rotary embedding, or another linear map of `[*batch, T, heads, D]`, applied to queries and keys
        before they are measured and handed to `base`.
      scale: The scale that `base` uses, if it isn't 1/√D.
      local_window_size: The window that `base` uses, as in `max_logits`.
      block_q: Queries that are held at a time, as in `max_logits`.
      block_k: Keys that are held at a time.
      listens: Whether a module's statistics are collected.
    """
    settings = {"scale": scale, "local_window_size": local_window_size}
    with errors_of(call):
        fixed = _settings_of(base)
        for name, value in settings.items():
            if value is not None and fixed.get(name) not in (None, value):
                raise ValueError(
                    f"{name}={value} contradicts the attention function, which has {fixed[name]}."
                )
            settings[name] = fixed.get(name) if value is None else value
    parameters = inspect.signature(base).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    signature = inspect.signature(like)
    defaults = {name: p.default for name, p in signature.parameters.items() if name not in DROPOUT}

    def attention_fn(*arguments, **keywords):
        given = signature.bind(*arguments, **keywords).arguments
        query, key, value = (given.pop(name) for name in ("query", "key", "value"))
        module = given.pop("module", None)
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        unused = () if given.get("dropout_rate") else DROPOUT
        given = {n: x for n, x in given.items() if n not in unused and x is not defaults.get(n)}
        if lost := [name for name in given if name not in parameters and not takes_all]:
            raise TypeError(
                f"{call}: the attention function {_name(base)} takes no {lost}, which Flax passed."
            )
        if module is not None and listens(module):
            seen = fixed | given
            maxima = max_logits(
                query, key, mask=_visible_pairs(query, key, seen), is_causal=seen.get("is_causal", False),
                precision=given.get("precision"), block_q=block_q, block_k=block_k, **settings,
            )  # fmt: skip
            lowest = jnp.full_like(maxima, -jnp.inf)
            sow(module, "max_logits", maxima, reduce_fn=larger, init_fn=lambda: lowest)
            marker = jnp.full(maxima.shape[0] + 1, -jnp.inf, maxima.dtype)
            sow(module, f"max_logits{AXES}", marker, reduce_fn=larger, init_fn=lambda: marker)
        # `module` is not handed on: the base would sow the whole attention matrix.
        return base(query, key, value, **given)

    public: Any = attention_fn
    public.__signature__ = signature  # Linen passes only what it reads there
    public.reports = True  # for those who wrap a whole model
    return public


def _visible_pairs(
    query: Float[Array, "*batch T heads D"],
    key: Float[Array, "*batch S key_heads D"],
    arguments: dict[str, Any],
) -> Bool[Array, " ..."] | None:
    """The pairs that the mask, the bias and the lengths of an attention function leave visible; None for all.

    A bias hides a pair where it is so low that no softmax sees it: half the lowest number of its dtype, or -1e9.
    """
    masks = []
    if (mask := arguments.get("mask")) is not None:
        masks.append(jnp.asarray(mask).astype(bool))
    if (bias := arguments.get("bias")) is not None:
        bias = jnp.asarray(bias)
        masks.append(bias > max(float(jnp.finfo(bias.dtype).min) / 2, -1e9))
    for name, x, new_axes in (("key_value_seq_lengths", key, (1, 2)), ("query_seq_lengths", query, (1, 3))):
        if (lengths := arguments.get(name)) is not None:
            seen = jnp.arange(x.shape[-3])[None] < jnp.asarray(lengths)[:, None]
            masks.append(jnp.expand_dims(seen, new_axes))
    rank = max((mask.ndim for mask in masks), default=0)
    masks = [mask.reshape((1,) * (rank - mask.ndim) + mask.shape) for mask in masks]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _name(base: Callable) -> str:
    base = base.func if isinstance(base, functools.partial) else base
    return getattr(base, "__name__", None) or repr(base)


def _settings_of(base: Callable) -> dict[str, Any]:
    """What `base` does when it is not told: its own defaults, and what a `functools.partial` fixes.

    Refuses a base whose softmax sees other logits than can be measured.
    """
    parameters = inspect.signature(base).parameters.values()
    settings = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    settings |= getattr(base, "keywords", {})  # of a partial: those that **kwargs take stand in no signature
    if "rope" in _name(base):
        raise ValueError(
            f"base={_name(base)} rotates queries and keys after they are measured; pass the rotation as rotate=fn "
            f"instead, a function of one array [*batch, T, heads, D]."
        )
    for name, value in settings.items():
        is_off = value is None or (isinstance(value, int | float) and value == 0)  # as FlashAttention's cap
        if re.search(r"cap(ped|ping)?(_|$)", name) and not is_off:
            raise ValueError(
                f"base={_name(base)}: {name}={value} caps the logits that the softmax sees, which QK-Clip neither "
                f"measures nor scales. Leave the cap out; or keep it, for it bounds the logits itself: use this "
                f"attention unwrapped, and take it out of the clip's sites."
            )
        if re.search(HIDES, name) and name not in HONOURED and value is not None:
            raise ValueError(
                f"base={_name(base)}: {name}=... hides pairs from the softmax in a way that can't be measured; give "
                f"it as one of {', '.join(HONOURED)}, or as the mask that the module is called with."
            )
    return settings
