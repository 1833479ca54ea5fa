"""Trees whose leaves are sharded in every way that training uses, for the tests of this folder."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from muonjax import FusedDimensionNumbers, MuonDimensionNumbers, NewtonSchulz
from muonjax._mesh.assignment import assign_owners

PLAIN = MuonDimensionNumbers(-2, -1)

# name -> (shape, dimension numbers, spec on a mesh with axes "fsdp" and "tensor")
LAYOUTS = {
    "rows": ((16, 64), PLAIN, P("fsdp", None)),
    "columns": ((16, 64), PLAIN, P(None, "fsdp")),
    "tall": ((64, 16), PLAIN, P("fsdp", None)),
    "both": ((16, 64), PLAIN, P("fsdp", "tensor")),
    "both_turned": ((64, 16), PLAIN, P("tensor", "fsdp")),
    "one_axis_twice": ((16, 64), PLAIN, P(None, ("fsdp", "tensor"))),
    "one_axis_twice_turned": ((16, 64), PLAIN, P(("tensor", "fsdp"))),
    "tensor_alone": ((64, 16), PLAIN, P(None, "tensor")),
    "replicated": ((16, 64), PLAIN, P()),
    "experts": ((8, 16, 64), PLAIN, P("fsdp", None, "tensor")),
    "scanned": ((3, 16, 64), PLAIN, P(None, "fsdp", "tensor")),
    "scanned_last": (
        (16, 64, 3),
        MuonDimensionNumbers(0, 1),
        P("fsdp", "tensor", None),
    ),
    "query": ((16, 8, 8), MuonDimensionNumbers(0, (1, 2)), P("fsdp", "tensor", None)),
    "attention_out": (
        (8, 8, 16),
        MuonDimensionNumbers((0, 1), 2),
        P("tensor", None, "fsdp"),
    ),
    "head_by_head": (
        (16, 8, 64),
        MuonDimensionNumbers(0, 2),
        P("fsdp", "tensor", None),
    ),
    "fused": ((16, 192), FusedDimensionNumbers(), P("fsdp", "tensor")),
    "remainder": ((15, 64), PLAIN, P("fsdp", None)),
}
SPECS = {name: spec for name, (_, _, spec) in LAYOUTS.items()}
NUMBERS = {name: numbers for name, (_, numbers, _) in LAYOUTS.items()}

QUICK = NewtonSchulz(
    coefficients=muonjax.polar_express(2), deflation=0
)  # compiles faster; the exchange is the same


def tree(names=tuple(LAYOUTS)):
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(LAYOUTS[name][0]).astype(np.float32)
        for name in LAYOUTS
    }
    return {name: jnp.asarray(values[name]) for name in names}


def make_mesh(axis_type=AxisType.Auto, **sizes):
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(axis_type,) * len(sizes),
        devices=jax.devices()[:count],
    )


def put(values, specs, mesh):
    """On the mesh; where an axis can't be sharded evenly, JAX stores the whole."""
    return {
        name: jax.device_put(
            x,
            NamedSharding(
                mesh,
                P() if name == "remainder" and mesh.shape["fsdp"] > 1 else specs[name],
            ),
        )
        for name, x in values.items()
    }


def under(mesh):
    """The context in which an explicit mesh computes."""
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def first_update(tx):
    """The compiled update of a new state, as a function of the gradients."""
    return jax.jit(lambda x: tx.update(x, tx.init(x))[0])


def assigned(tx, params):
    """The rounds that `tx.update` makes for these shapes; nothing runs."""
    found = []

    def kept(*arguments):
        found.append(assign_owners(*arguments))
        return found[-1]

    with mock.patch("muonjax._mesh.map_on_mesh.assign_owners", kept):
        jax.eval_shape(first_update(tx), params)
    return found[-1]


def sent(rounds) -> float:
    """Bytes that one device sends in an update: to the owners, back, and to the other replicas."""
    total = 0.0
    for one in rounds:
        replicas, owners = len(one.replicas), len(one.replicas[0])
        elements = 2 * one.row_size * (owners - 1)
        if one.by_all_reduce:
            elements += 2 * owners * sum(one.replica_sizes) * (replicas - 1) / replicas
        else:
            elements += owners * one.row_size * (replicas - 1)
        total += elements * one.group.dtype.itemsize
    return total


def orthogonalize(values, numbers, newton_schulz=QUICK, **settings):
    tx = muonjax.orthogonalize(
        dimension_numbers=numbers, newton_schulz=newton_schulz, **settings
    )
    return first_update(tx)(values)


@functools.cache
def on_one_device(newton_schulz=QUICK):
    """What every mesh must give."""
    return jax.tree.map(np.asarray, orthogonalize(tree(), NUMBERS, newton_schulz))


def on_mesh(mesh, names=tuple(LAYOUTS), newton_schulz=QUICK, *, set_mesh=True):
    """The layouts' leaves, orthogonalized on the mesh."""
    values = put(tree(names), SPECS, mesh)
    explicit = AxisType.Explicit in mesh.axis_types
    own = {name: SPECS[name] for name in names}
    distribution = None if explicit else muonjax.Distribution(mesh, own)
    with under(mesh) if set_mesh else contextlib.nullcontext():
        results = orthogonalize(
            values,
            {n: NUMBERS[n] for n in names},
            newton_schulz,
            distribution=distribution,
        )
    return values, results
