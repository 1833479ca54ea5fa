"""The lower triangle in equal blocks, in plain XLA: fewer multiply-adds on any platform.

```
[ S₁₁           ]      S_ij = alpha·X_i Y_jᴴ + beta·C_ij for i >= j,
[ S₂₁ S₂₂       ]      and S_ji = S_ijᴴ
[ S₃₁ S₃₂ S₃₃   ]
```

r rows of blocks cost (1 + 1/r)/2 of the full product's multiply-adds, four of them 5/8. A block off the diagonal is
copied twice into the result, the few on the diagonal are mirrored: on a CPU much cheaper than mirroring the whole
matrix, where a transposed pass misses the cache on every element.

Blocks of one size are the same few kernels all over an iteration, and XLA compiles each of them once. For the same
reason the result is put together column by column, which takes the mirroring along, and scaled as a whole: what differs
from product to product comes last. A loop over the blocks would compile faster still, but run them one after the other:
on two cores a whole iteration takes longer so.

The blocks can also be shared among devices that hold the same operands, inside of `jax.shard_map`.

```
p = 2 devices, 2p = 4 rows of blocks, 2p + 1 = 5 blocks per device

[ 0       ]
[ 0 0     ]     device 0 computes the blocks marked 0, device 1 those marked 1; one all-gather
[ 0 0 1   ]     gives both of them all, and the upper triangle is their mirror image
[ 1 1 1 1 ]
```

The lower triangle has p(2p + 1) blocks, 2p + 1 for each device. Each computes (1 + 1 / 2p) / 2p of the whole product's
multiply-adds, and half of the result is sent.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _reference
from pallas_kernels._platform import numbers_from_loop
from pallas_kernels._reference import Operands, epilogue, mirror, product

if TYPE_CHECKING:
    from jaxtyping import Array, Inexact


# Rows of blocks, at most, and of the smallest block: benchmarks/optimizer/symmetric_product.py compares others.
ROWS = 4
SMALLEST = 128


def symmetric_product(
    o: Operands, *, platform: str, rows: int = ROWS, smallest: int = SMALLEST
) -> Inexact[Array, "*batch m m"]:
    """The product in blocks."""
    *batch, m, _ = o.x.shape
    rows = min(rows, m // smallest)
    if rows < 2:
        return _reference.symmetric_product(o)
    one = functools.partial(_in_blocks, rows=rows, platform=platform)
    if math.prod(batch) <= 1 or platform != "cpu":
        return one(o)
    # One matrix after the other: blocks of a whole batch would be copied through main memory.
    each = o._replace(alpha=jnp.broadcast_to(o.alpha, batch), beta=jnp.broadcast_to(o.beta, batch))
    each = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), each)
    return lax.map(one, each).reshape(*batch, m, m)


def _in_blocks(o: Operands, *, rows: int, platform: str) -> Inexact[Array, "*batch m m"]:
    x, _, c, alpha, beta = o
    bounds = [x.shape[-2] * i // rows for i in range(rows + 1)]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    starts = numbers_from_loop(bounds[:-1], platform)

    def cut(a, i, axis=-2):
        return lax.dynamic_slice_in_dim(a, starts[i], sizes[i], axis, allow_negative_indices=False)

    blocks = {}
    for i in range(rows):
        x_i = cut(x, i)
        c_i = None if c is None else cut(c, i)
        for j in range(i + 1):
            block = product(x_i, cut(o.second, j))
            if c_i is not None:
                block = epilogue(block, cut(c_i, j, axis=-1), alpha, beta)
            blocks[i, j], blocks[j, i] = (block, block.mT.conj()) if i > j else (mirror(block),) * 2
    columns = [jnp.concatenate([blocks[i, j] for i in range(rows)], axis=-2) for j in range(rows)]
    s = jnp.concatenate(columns, axis=-1)
    return (epilogue(s, None, alpha, beta) if c is None else s).astype(x.dtype)


def shared_product(o: Operands, *, axis_name: tuple[str, ...]) -> jax.Array:
    """The product, each device of the mesh axes `axis_name` a part; the same arguments on all of them."""
    x, y, c, alpha, beta = o
    m = x.shape[-2]
    devices = math.prod(map(lax.axis_size, axis_name))
    rows = 2 * devices
    size = -(-m // rows)
    i, j = np.argwhere(np.tri(rows)).T  # of the blocks in the lower triangle
    number = np.zeros((rows, rows), int)
    number[i, j] = np.arange(len(i))
    own_i, own_j = (jnp.asarray(k.reshape(devices, -1))[lax.axis_index(axis_name)] for k in (i, j))

    def padded(a, *axes):
        return jnp.pad(a, [(0, rows * size - m if axis - a.ndim in axes else 0) for axis in range(a.ndim)])

    def cut(a, i, axis):
        return lax.dynamic_slice_in_dim(a, i * size, size, axis, allow_negative_indices=False)

    def of_own(f, *indices):
        """f of each index, [*batch, blocks, size, ...]."""
        return jax.vmap(f, out_axes=-3)(*indices)

    x, y = padded(x, -2), None if y is None else padded(y, -2)
    p = product(
        of_own(lambda i: cut(x, i, -2), own_i), of_own(lambda j: cut(x if y is None else y, j, -2), own_j)
    )
    if c is not None:
        c = padded(c, -2, -1)
        c = of_own(lambda i, j: cut(cut(c, i, -2), j, -1), own_i, own_j)
    alpha, beta = (s if s.ndim == 0 else s[..., None] for s in (alpha, beta))
    own = epilogue(p, c, alpha, beta).astype(x.dtype)
    blocks = lax.all_gather(own, axis_name, axis=own.ndim - 3, tiled=True)
    s = jnp.moveaxis(blocks[..., number, :, :], -3, -2)
    return mirror(s.reshape(*s.shape[:-4], rows * size, rows * size)[..., :m, :m])
