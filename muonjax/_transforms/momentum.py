"""Momentum, as `optax.trace`, in a dtype that stays: also 8-bit integers, with a float32 scale for each block."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._common.arguments import WIDE_FLOATS, check_flag, check_range, given_dtype, other_state
from muonjax._common.linalg import at_least_float32, scaled
from muonjax._mesh.distribution import Distribution, check_distribution, shards_of_last_axis
from muonjax._mesh.host_memory import leaf_by_leaf

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int8

_LARGEST = 127
_SMALLEST = 256 * float(jnp.finfo(jnp.float32).tiny)


class Int8TraceState(NamedTuple):
    """State of `trace(accumulator_dtype=jnp.int8)`: the momentum is `trace` times its block's `scale`.

    Attributes:
      trace: A tree like the parameters, of their shapes, int8.
      scale: A tree like the parameters, float32; a parameter's last axis has an entry for each block instead. Blocks
        are of one size, at most 128 and at least 64 where such a number divides the axis; otherwise there is one.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> state = muonjax.trace(0.95, accumulator_dtype=jnp.int8).init({"w": jnp.ones((6, 768))})
      >>> state.trace["w"].shape, state.scale["w"].shape
      ((6, 768), (6, 6))
    """

    trace: Any
    scale: Any


class ScheduledTraceState(NamedTuple):
    """State of `trace` whose decay is a schedule.

    Attributes:
      count: Updates so far, int32.
      momentum: The state that `trace` has for a number: `optax.TraceState`, or an `Int8TraceState`.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> state = muonjax.trace(optax.linear_schedule(0.85, 0.95, 300)).init({"w": jnp.ones((2, 3))})
      >>> int(state.count), state.momentum.trace["w"].shape
      (0, (2, 3))
    """

    count: jax.Array
    momentum: Any


def trace(
    decay: optax.ScalarOrSchedule,
    nesterov: bool = False,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    *,
    distribution: Distribution | None = None,
) -> optax.GradientTransformation:
    r"""`optax.trace` whose momentum keeps its dtype, whatever that of the gradients; int8 is allowed.

        M <- decay M + G

    In int8 a number takes a byte, and each block of up to 128 numbers along the last axis a float32 scale: 1.03 bytes a
    parameter where that axis is a multiple of 128. M is read, updated and rounded again where the gradient is read. The
    update is taken from M before it is rounded.

    Args:
      decay: A number in [0, 1), or an Optax schedule of such numbers.
      nesterov: Return G + decay M instead of M.
      accumulator_dtype: The dtype of M; None is the parameter's. `muonjax.cast_momentum` converts a state.
      distribution: As in `orthogonalize`; with it, or with explicit axis types, blocks that would cross a shard are
        refused. They would need collectives.

    Returns:
      An `optax.GradientTransformation` whose state is `optax.TraceState`, or an `Int8TraceState`; with a schedule it is
      a `ScheduledTraceState` around either.

    Raises:
      TypeError: A decay that is neither a number nor a schedule; while tracing, a complex leaf for int8.
      ValueError: A decay out of its range; while tracing, a block that would cross a shard, or a state in int8 for
        another dtype or the reverse.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> tx = optax.chain(muonjax.trace(0.95, True, jnp.int8), muonjax.orthogonalize(), optax.scale(-0.02))
      >>> tx.init({"w": jnp.ones((64, 64))})[0].trace["w"].dtype
      dtype('int8')

    Source: `optax.trace`; linear 8-bit momentum for Muon: Gupta et al., 2025 (arXiv:2509.23106).
    """
    check_decay("trace", decay)
    check_flag("trace", "nesterov", nesterov)
    check_distribution(distribution, call="trace")
    dtype = momentum_dtype("trace", "accumulator_dtype", accumulator_dtype)
    int8 = dtype == jnp.int8
    kind: Any = Int8TraceState if int8 else optax.TraceState

    def wide_step(g: jax.Array, m: jax.Array, decay: Any) -> tuple[jax.Array, jax.Array]:
        # In float32 at least: bfloat16 would round a decay of 0.999 to 1.
        wide = at_least_float32(g.dtype, m.dtype)
        g, m = g.astype(wide), m.astype(wide)
        new = g + scaled(m, decay)
        return g + scaled(new, decay) if nesterov else new, new

    def step(g: jax.Array, m: jax.Array, *, decay: Any) -> tuple[jax.Array, jax.Array]:
        ahead, new = wide_step(g, m, decay)
        with jax.numpy_dtype_promotion("standard"):
            update_dtype = jnp.promote_types(g.dtype, m.dtype)
        return ahead.astype(update_dtype), new.astype(dtype or m.dtype)

    def int8_step(
        g: jax.Array, values: jax.Array, scale: jax.Array, *, decay: Any
    ) -> tuple[jax.Array, ...]:
        ahead, new = wide_step(g, dequantize(values, scale), decay)
        return ahead.astype(g.dtype), *quantize(new)

    def init_momentum(params: optax.Params) -> Any:
        if not int8:
            return optax.trace(0.0, accumulator_dtype=dtype).init(params)
        _check_blocks(params, distribution)
        # Not `quantize` of zeros: XLA would reduce the constants while it compiles, for minutes.
        values = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.int8), params)
        scales = jax.tree.map(lambda v: jnp.zeros_like(_in_blocks(v)[..., 0], jnp.float32), values)
        return Int8TraceState(values, scales)

    def update_momentum(updates: optax.Updates, momentum: Any, decay: Any) -> tuple[Any, Any]:
        check_kind("trace", momentum, int8)
        if int8:
            _check_blocks(updates, distribution)
        leaf_step = partial(int8_step if int8 else step, decay=decay)
        updates, *arrays = leaf_by_leaf(leaf_step, updates, *momentum)
        return updates, kind(*arrays)

    def init(params: optax.Params) -> Any:
        momentum = init_momentum(params)
        return (
            ScheduledTraceState(jnp.zeros([], jnp.int32), momentum) if callable(decay) else momentum
        )

    def value_and_count(_: Any, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert callable(decay)
        value = jnp.asarray(decay(count), jnp.result_type(float))
        return value, jnp.asarray(optax.safe_increment(count))

    def update(updates: optax.Updates, state: Any, params: Any = None):
        del params
        if not callable(decay):
            return update_momentum(updates, state, decay)
        if not hasattr(state, "momentum"):
            raise ValueError(other_state("trace", state))
        # The count may be in host memory, as the momentum.
        value, count = leaf_by_leaf(value_and_count, 0.0, state.count)
        updates, momentum = update_momentum(updates, state.momentum, value)
        return updates, ScheduledTraceState(count, momentum)

    return optax.GradientTransformation(init, update)


def check_decay(call: str, decay: Any) -> None:
    """Raise unless it is a coefficient of momentum or a schedule of them."""
    why = ": momentum would grow without end; 0.95 is usual."
    check_range(call, "decay", decay, "in [0, 1)", why, schedule=True)


_MOMENTUM = (
    (*WIDE_FLOATS, jnp.complexfloating, jnp.int8),
    "a float type of 16 bits or more, or jnp.int8",
)


def momentum_dtype(call: str, name: str, given: Any) -> Any:
    """The dtype that an argument gives the momentum, None for the parameter's."""
    if given is None:
        return None
    return jax.dtypes.canonicalize_dtype(given_dtype(call, name, given, *_MOMENTUM))


def _check_blocks(tree: Any, distribution: Distribution | None) -> None:
    """Raise for complex leaves, and for blocks that would cross a shard, as far as that is known."""
    _check_real(tree, "trace(accumulator_dtype=jnp.int8)")
    cut = shards_of_last_axis(tree, distribution, call="trace")
    for (path, leaf), shards in zip(jax.tree.leaves_with_path(tree), cut, strict=True):
        length, block = (leaf.shape or (1,))[-1], block_size((leaf.shape or (1,))[-1])
        if length // shards % block:
            raise ValueError(
                f"trace(accumulator_dtype=jnp.int8): the last axis of {jax.tree_util.keystr(path)} {leaf.shape} has "
                f"blocks of {block}, and its {shards} shards have {length // shards} entries each, so that a block "
                "would cross a shard. Shard another axis of it, or take jnp.bfloat16."
            )


def block_size(length: int) -> int:
    """The largest divisor of the length from 64 to 128, so that no block is cut; else the whole axis."""
    return next(
        (size for size in range(min(length, 128), 63, -1) if length % size == 0), max(length, 1)
    )


def _in_blocks(x: jax.Array) -> jax.Array:
    shape = x.shape or (1,)
    return x.reshape(*shape[:-1], -1, block_size(shape[-1]))


def quantize(x: Float[Array, "*leaf"]) -> tuple[Int8[Array, "*leaf"], Float32[Array, "*blocks"]]:
    """The nearest integers in units of a 127th of each block's largest entry. NaN and inf make their block NaN."""
    blocks = _in_blocks(x)
    # The bits of |x| as an integer are in the order of |x|, with NaN above inf; a maximum of floats may ignore NaN.
    bits = jax.lax.bitcast_convert_type(blocks.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)
    # Zeros are divided too: a branch would be one more kernel on a GPU.
    scale = jnp.maximum(largest, _SMALLEST) / _LARGEST
    return jnp.round(blocks / scale[..., None].astype(x.dtype)).astype(jnp.int8).reshape(
        x.shape
    ), scale


def dequantize(
    values: Int8[Array, "*leaf"], scale: Float32[Array, "*blocks"]
) -> Float32[Array, "*leaf"]:
    """The inverse of `quantize`, up to its rounding."""
    return (_in_blocks(values).astype(jnp.float32) * scale[..., None]).reshape(values.shape)


def _is_trace(node: Any) -> bool:
    return isinstance(node, (optax.TraceState, Int8TraceState))


def cast_momentum(state: Any, dtype: jax.typing.DTypeLike) -> Any:
    """An optimizer's state with its momentum in another dtype: to continue a checkpoint with another `mu_dtype`.

    Args:
      state: One with the states of `trace` or `optax.trace` in it, at any depth; all else stays as it is.
      dtype: A float type, or `jnp.int8`.

    Returns:
      The state, as an optimizer with `mu_dtype=dtype` keeps it.

    Raises:
      ValueError: No momentum in the state.
      TypeError: `dtype` is neither, or it is int8 and the momentum is complex.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"w": jnp.eye(64)}
      >>> tx = muonjax.muon(1e-3, mu_dtype=jnp.int8)
      >>> restored = muonjax.muon(1e-3).init(params)
      >>> updates, state = tx.update(params, muonjax.cast_momentum(restored, jnp.int8), params)
    """
    dtype = given_dtype("cast_momentum", "dtype", dtype, *_MOMENTUM)
    nodes, treedef = jax.tree.flatten(state, is_leaf=_is_trace)
    if not any(map(_is_trace, nodes)):
        raise ValueError(
            "cast_momentum(state) finds no momentum; give the state of muon or of trace."
        )

    def cast(node: Any) -> Any:
        if not _is_trace(node):
            return node
        int8 = isinstance(node, Int8TraceState)
        if dtype != jnp.int8:
            wide = jax.tree.map(dequantize, node.trace, node.scale) if int8 else node.trace
            return optax.TraceState(jax.tree.map(lambda m: m.astype(dtype), wide))
        if int8:
            return node
        _check_real(node.trace, "cast_momentum")
        pairs = jax.tree.map(lambda m: quantize(m.astype(at_least_float32(m.dtype))), node.trace)
        return Int8TraceState(*jax.tree.transpose(jax.tree.structure(node.trace), None, pairs))

    return treedef.unflatten(map(cast, nodes))


def _check_real(tree: Any, call: str) -> None:
    """Raise for complex leaves."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"{call}: int8 momentum has no imaginary part, and {name} is {leaf.dtype}."
            )


def has_int8(state: Any) -> bool | None:
    """Whether the momentum in a state is in int8; None if there is none."""
    found = [n for n in jax.tree.leaves(state, is_leaf=_is_trace) if _is_trace(n)]
    return any(isinstance(node, Int8TraceState) for node in found) if found else None


def check_kind(call: str, state: Any, wanted: bool | None) -> None:
    """Raise where the momentum in a state is in int8 and should not be, or the reverse."""
    found = has_int8(state)
    if None not in (found, wanted) and found != wanted:
        held, name = ("a float type", "jnp.int8") if wanted else ("int8", "jnp.float32")
        raise ValueError(
            f"{call}: this momentum is in {held}; see muonjax.cast_momentum(state, {name})."
        )
