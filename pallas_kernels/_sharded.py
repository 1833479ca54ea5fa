"""Share the lower triangle among devices that hold the same operands, inside of `jax.shard_map`.

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

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._reference import Operands, epilogue, mirror, product


def symmetric_product(o: Operands, *, axis_name: tuple[str, ...]) -> jax.Array:
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
