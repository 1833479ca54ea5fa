"""Measure the cost of each head's largest logit relative to attention itself.

Seconds and temporary memory of `max_logits` alone and in one program with causal attention's forward and backward
pass; the same without blocks, and the bound from the log-sum-exp.
"""

import functools

import jax
import jax.numpy as jnp

import muonjax
from benchmarks.common import measure


def attention(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True).sum()


def maxima(query, key, value, **blocks):
    return muonjax.max_logits(query, key, is_causal=True, **blocks)


def with_maxima(query, key, value):
    return attention(query, key, value), maxima(query, key, value)


def with_bound(query, key, value):
    out, lse = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, return_residual=True
    )
    return out.sum(), muonjax.max_logits_bound(lse)


def main() -> None:
    args = measure.options(
        __doc__, batch=1, length=4096, heads=8, size=64, rounds=5, dtype="float32"
    )
    shape = (args.batch, args.length, args.heads, args.size)
    qkv = jax.random.normal(jax.random.key(0), (3, *shape), jnp.dtype(args.dtype))
    gradients = functools.partial(jax.grad, argnums=(0, 1, 2))
    programs = {
        "attention, forward and backward": gradients(attention),
        "max_logits alone": maxima,
        "max_logits alone, one block": functools.partial(
            maxima, block_q=args.length, block_k=args.length
        ),
        "attention with max_logits": gradients(with_maxima, has_aux=True),
        "attention with max_logits_bound": gradients(with_bound, has_aux=True),
    }
    calls, temporary = {}, {}
    for name, program in programs.items():
        compiled = jax.jit(program).lower(*qkv).compile()
        calls[name] = functools.partial(compiled, *qkv)
        temporary[name] = compiled.memory_analysis().temp_size_in_bytes / 2**20
    seconds = measure.interleave(calls, rounds=args.rounds)
    rows = []
    for name in programs:
        timed = measure.summary(
            seconds[name], seconds["attention, forward and backward"]
        )
        rows.append({"program": name, **timed, "temporary_mib": temporary[name]})
    measure.write("max_logits", {**vars(args), "rows": rows}, rows)


if __name__ == "__main__":
    main()
