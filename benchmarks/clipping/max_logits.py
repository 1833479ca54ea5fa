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


def with_maxima(query, key, value, **blocks):
    return attention(query, key, value), muonjax.max_logits(
        query, key, is_causal=True, **blocks
    )


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
    whole = {"block_q": args.length, "block_k": args.length}
    gradients = functools.partial(jax.grad, argnums=(0, 1, 2))
    programs = {
        "attention, forward and backward": gradients(attention),
        "max_logits alone": lambda q, k, v: muonjax.max_logits(q, k, is_causal=True),
        "max_logits alone, one block": lambda q, k, v: muonjax.max_logits(
            q, k, is_causal=True, **whole
        ),
        "attention with max_logits": gradients(with_maxima, has_aux=True),
        "attention with max_logits_bound": gradients(with_bound, has_aux=True),
    }
    compiled = {
        name: jax.jit(program).lower(*qkv).compile()
        for name, program in programs.items()
    }
    calls = {
        name: functools.partial(program, *qkv) for name, program in compiled.items()
    }
    seconds = measure.interleave(calls, rounds=args.rounds)
    baseline = seconds["attention, forward and backward"]
    rows = [
        {
            "program": name,
            **measure.summary(seconds[name], baseline),
            "temporary_mib": compiled[name].memory_analysis().temp_size_in_bytes
            / 2**20,
        }
        for name in programs
    ]
    measure.write("max_logits", {**vars(args), "rows": rows}, rows)


if __name__ == "__main__":
    main()
