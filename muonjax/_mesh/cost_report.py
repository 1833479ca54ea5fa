"""Report what an update will cost on a mesh, in each mode. Needs shapes alone, no devices."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from muonjax._matrix_view import DimensionNumbersTree, matrix_pieces
from muonjax._mesh.assignment import MODES, ModeCost
from muonjax._mesh.distribution import Distribution, check_distribution, distribution_of, find_mesh
from muonjax._mesh.sharded_map import assign
from muonjax._newton_schulz.polar_factor import polar_function
from muonjax._newton_schulz.settings import NewtonSchulz, settings_of
from muonjax._policy import policy_of
from muonjax._routing.dimension_numbers import dimension_numbers as route
from muonjax._routing.tabulate import counted


class MeshPlan(NamedTuple):
    """What one update costs on a mesh; print it for a table.

    Attributes:
      mesh_shape: Sizes of the mesh's axes.
      matrices: How many there are.
      mode: The Distribution's.
      modes: The cost of each mode, "auto" included.
    """

    mesh_shape: dict[str, int]
    matrices: int
    mode: str
    modes: dict[str, ModeCost]

    @property
    def cost(self) -> ModeCost:
        """Of the Distribution's own mode."""
        return self.modes[self.mode]

    def __str__(self) -> str:
        heads = ("mode", "GFLOP", "÷ even share", "imbalance", "MiB sent", "MiB held", "collectives", "ms")
        rows = [
            (
                name + " *" * (name == self.mode),
                f"{c.flops / 1e9:.3g}",
                f"{c.redundancy:.2f}",
                f"{c.imbalance:.2f}",
                f"{c.sent / 2**20:.1f}",
                f"{c.held / 2**20:.1f}",
                str(c.collectives),
                f"{1e3 * c.seconds:.3g}",
            )
            for name, c in self.modes.items()
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])))
            for row in (heads, *rows)
        ]
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh_shape.items())
        devices = math.prod(self.mesh_shape.values())
        title = f"{counted(self.matrices, 'matrix', 'matrices')} on {counted(devices, 'device', 'devices')}"
        return "\n".join((f"{title} ({axes}); * is chosen", *lines))


def plan(
    params: Any,
    distribution: Distribution | None = None,
    *,
    dimension_numbers: DimensionNumbersTree | None = None,
    newton_schulz: NewtonSchulz | None = None,
) -> MeshPlan:
    """What one update will cost the busiest device of a mesh, in each mode.

    Args:
      params: Arrays or `jax.ShapeDtypeStruct`s.
      distribution: How they are sharded; over an `AbstractMesh` it needs no devices. None: as the arrays are.
      dimension_numbers: As in `orthogonalize`; None: what `muon` reads off paths and shapes.
      newton_schulz: How to orthogonalize; give `compute_dtype` to plan on a CPU for devices that compute in half
        precision.

    Returns:
      A `MeshPlan`.

    Raises:
      ValueError: If specs or dimension numbers do not fit the parameters, or nothing says how these are sharded.

    Example:
      >>> import jax, muonjax
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> up = {"kernel": jax.ShapeDtypeStruct((256, 1024), "float32")}
      >>> layers = {f"layer_{i}": {"mlp": {"up": up}} for i in range(24)}
      >>> distribution = muonjax.Distribution(AbstractMesh((8,), ("fsdp",)), P("fsdp", None))
      >>> plan = muonjax.plan(layers, distribution)
      >>> plan.cost.collectives, plan.cost.imbalance, plan.cost.sent / 2**20
      (2, 1.0, 5.25)

    Source: the assignment is Graham's, "Bounds on multiprocessing timing anomalies", 1969.
    """
    settings = settings_of(newton_schulz, "plan")
    check_distribution(distribution, call="plan")
    distribution = distribution_of(params, call="plan") if distribution is None else distribution
    leaves = jax.tree.leaves(params)
    policy = policy_of(*leaves, mesh=distribution.mesh)
    pieces = matrix_pieces(route if dimension_numbers is None else dimension_numbers, params, call="plan")
    chosen, views = [p.leaf for p in pieces], [p.view for p in pieces]
    inputs = [p.take(leaves) for p in pieces]
    dtypes = [policy.exchange_dtype(x.dtype, settings.compute_dtype) for x in inputs]

    polar = polar_function(settings, policy)

    def in_mode(mode: Any) -> ModeCost:
        on_mesh = find_mesh(dataclasses.replace(distribution, mode=mode), params, chosen, call="plan")
        assert on_mesh is not None  # a distribution was given
        return assign(on_mesh, polar, inputs, views, dtypes).cost

    return MeshPlan(
        dict(distribution.mesh.shape),
        sum(view.batch for view in views),
        distribution.mode,
        {mode: in_mode(mode) for mode in MODES},
    )
