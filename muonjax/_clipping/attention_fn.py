"""Wrap an attention function so that it also reports each head's largest logit."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax

from muonjax._clipping.errors import errors_of
from muonjax._clipping.max_logits import max_logits


def reporting(
    call: str,
    base: Callable[..., jax.Array],
    report: Callable[[Any, jax.Array], object],
    *,
    rotate: Callable[[jax.Array], jax.Array] | None,
    **settings: Any,  # of max_logits
) -> Callable[..., jax.Array]:
    """An attention function with Flax's arguments that calls `report(module, maxima)` before `base`."""
    with errors_of(call):
        fixed = _settings_of(base)
        settings = _agreed(settings, fixed)
    accepted = inspect.signature(base).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())

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
        if module is not None:
            causal = is_causal or fixed.get("is_causal", False)
            maxima = max_logits(query, key, mask=mask, is_causal=causal, precision=precision, **settings)
            report(module, maxima)
        given = {
            "bias": bias,
            "mask": mask,
            "dtype": dtype,
            "precision": precision,
            "force_fp32_for_softmax": force_fp32_for_softmax or None,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
            "is_causal": is_causal or None,
        }
        if dropout_rate > 0:
            given |= {
                "dropout_rate": dropout_rate,
                "dropout_rng": dropout_rng,
                "broadcast_dropout": broadcast_dropout,
                "deterministic": deterministic,
            }
        # What is at its default need not be known to `base`; what is not must be.
        given = {name: value for name, value in given.items() if value is not None}
        lost = [name for name in given if name not in accepted and not takes_all]
        if lost:
            raise TypeError(
                f"{call}: the attention function {_name(base)} takes no {lost}, which Flax passed."
            )
        # `module` is not handed on: the base would sow the whole attention matrix.
        return base(query, key, value, **given)

    return attention_fn


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
