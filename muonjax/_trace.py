"""Momentum, as `optax.trace`, in a dtype that stays, which may be int8."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from muonjax._int8_momentum import (
    Int8TraceState,
    block_size,
    check_kind,
    check_real,
    dequantize,
    quantize,
    zeros,
)
from muonjax._linalg import at_least_float32
from muonjax._mesh.distribution import Distribution, even_sharding, spread_specs
from muonjax._mesh.layout import size_of
from muonjax._offload import leaf_by_leaf


def trace(
    decay: float,
    nesterov: bool = False,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    *,
    distribution: Distribution | None = None,
) -> optax.GradientTransformation:
    r"""`optax.trace` whose state keeps its dtype, whatever that of the gradients; and int8 is one of them.

        M <- decay M + G

    In int8 a number takes a byte, and each block of up to 128 numbers along the last axis a float32 scale: 1.03 bytes a
    parameter where that axis is a multiple of 128. M is read, updated and rounded again where the gradient is read. The
    update is taken from M before it is rounded.

    Args:
      decay: In [0, 1).
      nesterov: Return G + decay M instead of M.
      accumulator_dtype: Of M; None is the parameter's. `muonjax.cast_momentum` converts a state.
      distribution: As in `orthogonalize`; with it, or with explicit axis types, blocks that would cross a shard are
        refused. They would need collectives.

    Returns:
      An `optax.GradientTransformation` whose state is `optax.TraceState`, or an `Int8TraceState`.

    Raises:
      TypeError: While tracing, a complex leaf for int8.
      ValueError: While tracing, a block that would cross a shard, or a state in int8 for another dtype or the reverse.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> tx = optax.chain(muonjax.trace(0.95, True, jnp.int8), muonjax.orthogonalize(), optax.scale(-0.02))
      >>> tx.init({"w": jnp.ones((64, 64))})[0].trace["w"].dtype
      dtype('int8')

    Source: `optax.trace`; linear 8-bit momentum for Muon: Gupta et al., 2025 (arXiv:2509.23106).
    """
    int8 = accumulator_dtype is not None and jnp.dtype(accumulator_dtype) == jnp.int8
    plain = optax.trace(decay, nesterov, accumulator_dtype=None if int8 else accumulator_dtype)
    kind: Any = Int8TraceState if int8 else optax.TraceState

    def optax_step(g: jax.Array, m: jax.Array) -> tuple[Any, Any]:
        ahead, new = plain.update(g, optax.TraceState(m))
        return ahead, new.trace  # pyright: ignore[reportAttributeAccessIssue]

    def step(g: jax.Array, m: jax.Array) -> tuple[jax.Array, ...]:
        ahead, momentum = optax_step(g, m)
        return ahead, momentum if accumulator_dtype is not None else momentum.astype(m.dtype)

    def int8_step(g: jax.Array, values: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        wide = g.astype(at_least_float32(g.dtype))
        ahead, momentum = optax_step(wide, dequantize(values, scale).astype(wide.dtype))
        return ahead.astype(g.dtype), *quantize(momentum)

    def init(params: optax.Params) -> Any:
        if not int8:
            return plain.init(params)
        _check(params, distribution)
        return zeros(params)

    def update(updates: optax.Updates, state: Any, params: Any = None):
        del params
        check_kind("trace", state, int8)
        if int8:
            _check(updates, distribution)
        updates, *new = leaf_by_leaf(int8_step if int8 else step, updates, *state)
        return updates, kind(*new)

    return optax.GradientTransformation(init, update)


def _check(tree: Any, distribution: Distribution | None) -> None:
    """Raise for complex leaves, and for blocks that would cross a shard, as far as that is known."""
    check_real(tree, "trace(accumulator_dtype=jnp.int8)")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if distribution is None:
        shardings = [(own.mesh, own.spec) for own in (jax.typeof(leaf).sharding for _, leaf in leaves)]
    else:
        specs = spread_specs(distribution.param_specs, tree, call="trace")
        shardings = [(distribution.mesh, spec) for spec in specs]
    for (path, leaf), (mesh, spec) in zip(leaves, shardings, strict=True):
        if leaf.ndim == 0:
            continue
        mesh_shape = dict(mesh.shape)
        length, block = leaf.shape[-1], block_size(leaf.shape[-1])
        shards = size_of(mesh_shape, even_sharding(leaf.shape, spec, mesh_shape)[-1])
        if length // shards % block:
            raise ValueError(
                f"trace(accumulator_dtype=jnp.int8): the last axis of {jax.tree_util.keystr(path)} {leaf.shape} has "
                f"blocks of {block}, and its {shards} shards have {length // shards} entries each, so that a block "
                "would cross a shard. Shard another axis of it, or take jnp.bfloat16."
            )
