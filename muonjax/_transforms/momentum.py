"""Momentum, as `optax.trace`, in a dtype that stays: also 8-bit integers,
with a float32 scale for each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muonjax._common.arguments import (
    check_flag,
    check_range,
    errors_of,
    given_dtype,
)
from muonjax._common.linalg import at_least_float32, common_dtype, scaled
from muonjax._mesh.distribution import (
    Distribution,
    check_distribution,
    shards_of_last_axis,
)
from muonjax._mesh.host_memory import leaf_by_leaf

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int8

_LARGEST_INTEGER = 127
# The largest entry of a block counts as this at least, so that a scale is a normal number.
_SMALLEST_ENTRY = 256 * float(jnp.finfo(jnp.float32).tiny)


class Int8TraceState(NamedTuple):
    """State of `trace(accumulator_dtype=jnp.int8)`:
    the momentum is `trace` times its block's `scale`.

    Attributes:
      trace: A tree like the parameters, of their shapes, int8.
      scale: A tree like the parameters, float32; a parameter's last axis has an entry for each
        block instead. Blocks are of one size, at most 128 and at least 64 where such a number
        divides the axis; otherwise there is one.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> state = muonjax.trace(0.95, accumulator_dtype=jnp.int8).init({"w": jnp.ones((6, 768))})
      >>> state.trace["w"].shape, state.scale["w"].shape
      ((6, 768), (6, 6))
    """

    trace: Any
    scale: Any


def trace(
    decay: optax.ScalarOrSchedule,
    nesterov: bool = False,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    *,
    distribution: Distribution | None = None,
) -> optax.GradientTransformation:
    r"""`optax.trace` whose momentum keeps its dtype, whatever that of the gradients;
    int8 is allowed.

        M <- decay M + G

    In int8 a number takes a byte, and each block of up to 128 numbers along the last axis a float32
    scale: 1.03 bytes a parameter where that axis is a multiple of 128. M is read, updated and
    rounded again where the gradient is read. The update is taken from M before it is rounded.

    Args:
      decay: A number in [0, 1), or an Optax schedule of such numbers.
      nesterov: Return G + decay M instead of M.
      accumulator_dtype: The dtype of M; None is the parameter's.
        `muonjax.cast_momentum` converts a state.
      distribution: As in `orthogonalize`; with it, or with explicit axis types, blocks that would
        cross a shard are refused. They would need collectives.

    Returns:
      An `optax.GradientTransformation` whose state is `optax.TraceState`, or an `Int8TraceState`;
      with a schedule that of `optax.inject_hyperparams` around either,
      whose `hyperparams["decay"]` is the last decay.

    Raises:
      TypeError: A decay that is neither a number nor a schedule; while tracing,
        a complex leaf for int8.
      ValueError: A decay out of its range; while tracing, a block that would cross a shard, or a
        state in int8 for another dtype or the reverse.

    Example:
      >>> import jax.numpy as jnp, muonjax, optax
      >>> momentum = muonjax.trace(0.95, True, jnp.int8)
      >>> tx = optax.chain(momentum, muonjax.orthogonalize(), optax.scale(-0.02))
      >>> tx.init({"w": jnp.ones((64, 64))})[0].trace["w"].dtype
      dtype('int8')

    Source: `optax.trace`; linear 8-bit momentum for Muon: Gupta et al., 2025 (arXiv:2509.23106).
    """
    with errors_of("trace"):
        why = ": momentum would grow without end; 0.95 is usual."
        check_range("decay", decay, "in [0, 1)", why, schedule=True)
        check_flag(nesterov=nesterov)
        check_distribution(distribution)
        dtype = momentum_dtype("accumulator_dtype", accumulator_dtype)

    if callable(decay):
        # Optax keeps the count, and at each step calls `trace` with the number that the schedule
        # gives at it.
        static = ("nesterov", "accumulator_dtype", "distribution")
        with_schedule = optax.inject_hyperparams(
            trace, static, hyperparam_dtype=jnp.result_type(float)
        )
        return with_schedule(decay, nesterov, dtype, distribution=distribution)

    is_int8 = dtype == jnp.int8

    def step(g: jax.Array, *stored: jax.Array) -> tuple[jax.Array, ...]:
        """The update of a leaf and its new momentum, which is stored as an array,
        or as integers and scales."""
        # `stored` is (momentum,), or (integers, scales) in int8:
        # the leaf of each field of the state.
        m = dequantize(*stored) if is_int8 else stored[0]
        # In float32 at least: bfloat16 would round a decay of 0.999 to 1.
        wide = at_least_float32(g.dtype, m.dtype)
        gradient = g.astype(wide)
        # M <- G + decay M. A schedule's decay is an array. JAX's strict mode multiplies two arrays
        # only if they have one dtype, so `scaled` casts both.
        momentum = gradient + scaled(m.astype(wide), decay)
        # G + decay M looks one step ahead.
        update = gradient + scaled(momentum, decay) if nesterov else momentum
        # The update is that of M before it is rounded. In int8 M is stored as integers and scales,
        # so that it has no float type of its own, and the update has that of the gradient.
        if is_int8:
            return update.astype(g.dtype), *quantize(momentum)
        # As in `optax.trace`, in the dtype that holds both
        update = update.astype(common_dtype(g.dtype, m.dtype))
        # M gets `dtype`, which is `accumulator_dtype`, also where a restored M has another; None
        # keeps that of M.
        return update, momentum.astype(dtype or m.dtype)

    def int8_zeros(params: Any) -> Int8TraceState:
        """The first state in int8."""
        _check_blocks(params, distribution)
        values = optax.tree.zeros_like(params, dtype=jnp.int8)
        # An entry for each block, sharded as the leaf is. Not `quantize` of zeros: XLA would reduce
        # the constants while it compiles, for minutes.
        scales = jax.tree.map(
            lambda x: jnp.zeros_like(_in_blocks(x)[..., 0], jnp.float32), values
        )
        return Int8TraceState(values, scales)

    zeros = int8_zeros if is_int8 else optax.trace(0.0, accumulator_dtype=dtype).init

    @errors_of("trace")
    def update(updates, state, params=None):
        del params
        # Refused is an int8 state where `accumulator_dtype` is a float type, and the reverse; from
        # one float type to another `step` casts. The field `scale` tells an int8 state, as a
        # restored one may be of another class.
        if hasattr(state, "scale") != is_int8:
            wanted = "jnp.int8" if is_int8 else "jnp.float32"
            raise ValueError(
                "this state has momentum in another dtype; convert it by "
                f"muonjax.cast_momentum(state, {wanted})."
            )
        if is_int8:
            # Refuses complex leaves, and leaves with a block of one scale that two shards would
            # share.
            _check_blocks(updates, distribution)
        # One leaf after the other: of a state in host memory a leaf is copied to the device for its
        # step, with the next one's copy on its way, and the new one back. The results are trees:
        # the updates, and one for each field of the state, which is the momentum, or in int8 the
        # integers and the scales.
        updates, *fields = leaf_by_leaf(step, updates, *state)
        state = Int8TraceState(*fields) if is_int8 else optax.TraceState(*fields)
        return updates, state

    return optax.GradientTransformation(errors_of("trace")(zeros), update)


# The dtypes of a momentum, and how an error lists them: the last two arguments of `given_dtype`.
# Not float16, which ends at 65504: the momentum of a constant gradient is 20 times the gradient.
_MOMENTUM = (
    (jnp.bfloat16, jnp.float32, jnp.float64, jnp.complexfloating, jnp.int8),
    "jnp.bfloat16, a float type of 32 bits or more, or jnp.int8",
)


def momentum_dtype(name: str, given: Any) -> Any:
    """The dtype that an argument gives the momentum, None for the parameter's."""
    if given is None:
        return None
    return jax.dtypes.canonicalize_dtype(given_dtype(name, given, *_MOMENTUM))


def _check_blocks(tree: Any, distribution: Distribution | None) -> None:
    """Raise for leaves that can't have int8 momentum: complex ones, and those with a block of one
    scale that would lie in two shards, as far as the shards are known.

    An axis of 768 has blocks of 128: two shards have three each,
    and four shards of 192 entries would cut the second.
    """
    # int8 can hold no imaginary part.
    _check_real(tree)
    shards_of_leaves = shards_of_last_axis(tree, distribution)
    leaves = jax.tree.leaves_with_path(tree)
    for (path, leaf), shards in zip(leaves, shards_of_leaves, strict=True):
        # A number is a block of its own.
        length = leaf.shape[-1] if leaf.shape else 1
        block = block_size(length)
        # The entries of a shard. `shards_of_last_axis` counts an axis that the mesh does not divide
        # as one shard, so there is no remainder.
        entries = length // shards
        # A block across two shards would take a collective to find its largest entry.
        if entries % block != 0:
            raise ValueError(
                f"int8 momentum of {jax.tree_util.keystr(path)} {leaf.shape} has blocks of {block} "
                f"along the last axis, and its {shards} shards have {entries} entries each, so "
                "that a block would cross a shard. Shard another axis of it, or take jnp.bfloat16."
            )


def block_size(length: int) -> int:
    """The largest divisor of the length from 64 to 128, so that no block is cut;
    else the whole axis."""
    for size in range(min(length, 128), 63, -1):
        if length % size == 0:
            return size
    # An empty axis has blocks of one entry, and none of them.
    return max(length, 1)


def _in_blocks(x: jax.Array) -> jax.Array:
    """x with its last axis cut in two: [..., blocks, entries of a block]."""
    *leading, length = x.shape or (1,)
    return x.reshape(*leading, -1, block_size(length))


def quantize(
    x: Float[Array, "*leaf"],
) -> tuple[Int8[Array, "*leaf"], Float32[Array, "*blocks"]]:
    """The nearest integers in units of a 127th of each block's largest entry, and these units.

    A leaf [6, 768] has six blocks in each row, so the units are [6, 6]. A block with the entries
    1.27 and -0.5 becomes 127 and -50 with the scale 0.01. NaN and inf make the scale of their block
    NaN or infinite, and so the block as `dequantize` returns it.
    """
    # [..., blocks, entries of a block]: a block's size divides the axis,
    # so that nothing is filled up.
    blocks = _in_blocks(x.astype(at_least_float32(x.dtype)))
    # |x| of the largest entry, in float32, the dtype of a scale. The bits of x without the sign,
    # read as an integer, are in the order of |x|, with NaN above inf; XLA's `jnp.max` of floats may
    # ignore NaN on a CPU, and `jnp.maximum` below keeps it.
    bits = blocks.astype(jnp.float32).view(jnp.int32) & 0x7FFFFFFF
    largest = jnp.max(bits, axis=-1).view(jnp.float32)
    # Zeros are divided too: the largest entry counts as `_SMALLEST_ENTRY` at least, of which a
    # 127th is still a normal number. A branch for them would be one more kernel on a GPU.
    scale = jnp.maximum(largest, _SMALLEST_ENTRY) / _LARGEST_INTEGER
    integers = jnp.round(blocks / scale[..., None].astype(blocks.dtype))
    return integers.astype(jnp.int8).reshape(x.shape), scale


def dequantize(
    values: Int8[Array, "*leaf"], scale: Float32[Array, "*blocks"]
) -> Float32[Array, "*leaf"]:
    """The inverse of `quantize`, up to its rounding: each integer times the scale of its block."""
    blocks = _in_blocks(values).astype(jnp.float32)
    return (blocks * scale[..., None]).reshape(values.shape)


def _is_momentum(node: Any) -> bool:
    """Whether a node of a state is the momentum of `trace` or `optax.trace`."""
    return isinstance(node, (optax.TraceState, Int8TraceState))


def cast_momentum(state: Any, dtype: jax.typing.DTypeLike) -> Any:
    """An optimizer's state with its momentum in another dtype:
    to continue a checkpoint with another `mu_dtype`.

    Args:
      state: One with the states of `trace` or `optax.trace` in it, at any depth;
        all else stays as it is.
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
    with errors_of("cast_momentum"):
        # `_MOMENTUM` has the dtypes that are allowed, and their list for the error.
        dtype = given_dtype("dtype", dtype, *_MOMENTUM)
        nodes, treedef = jax.tree.flatten(state, is_leaf=_is_momentum)
        if not any(map(_is_momentum, nodes)):
            raise ValueError(
                "(state) finds no momentum; give the state of muon or of trace."
            )

        def cast(node: Any) -> Any:
            """The state of `trace` or `optax.trace` with its momentum in `dtype`;
            any other node as it is."""
            if not _is_momentum(node):
                return node
            # A tree of floats: float32 of an `Int8TraceState`, which is (integers, scales).
            is_int8 = isinstance(node, Int8TraceState)
            momentum = jax.tree.map(dequantize, *node) if is_int8 else node.trace
            if dtype != jnp.int8:
                return optax.TraceState(optax.tree.cast(momentum, dtype))
            # int8 can hold no imaginary part.
            _check_real(momentum)
            # A tree of integers and one of scales: a map of both at once would be a tree of pairs.
            values = jax.tree.map(lambda m: quantize(m)[0], momentum)
            scales = jax.tree.map(lambda m: quantize(m)[1], momentum)
            return Int8TraceState(values, scales)

        return treedef.unflatten(map(cast, nodes))


def _check_real(momentum: Any) -> None:
    """Raise for complex leaves."""
    for path, leaf in jax.tree.leaves_with_path(momentum):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"int8 momentum has no imaginary part, and {name} is {leaf.dtype}."
            )
