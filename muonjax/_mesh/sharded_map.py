"""On a mesh: `f` on each matrix of the leaves, once. Carries matrices, knows no iteration.

The way of a leaf: its spec says how it lies (`_placement`), every matrix gets a home (`_owner_plan`), travels there,
through f, and back (`_exchange`).
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from muonjax._cost_model import Work, count_work
from muonjax._matrix_view import MatrixView
from muonjax._mesh.assignment import OwnerPlan, make_plan
from muonjax._mesh.distribution import Distribution, cuts_of, spec_of, spread_specs
from muonjax._mesh.exchange import Function, exchange
from muonjax._mesh.layout import Leaf
from pallas_kernels._platform import platform_of


class OnMesh(NamedTuple):
    """A mesh with its settings, and how the chosen leaves lie on it.

    Attributes:
      distribution: its `param_specs` are spread already.
      specs: of each leaf.
    """

    distribution: Distribution
    specs: tuple[Any, ...]

    def plan(
        self, f: Function, leaves: Sequence[Any], views: Sequence[MatrixView], wire: Sequence[jnp.dtype]
    ) -> OwnerPlan:
        """Who calls f on which matrix; of the leaves only the shapes count, of the mesh only its own."""

        @functools.cache
        def cost(dtype, m: int, columns: int, devices: int) -> Work:
            x = jax.ShapeDtypeStruct((m, columns), dtype)
            axis_name = ("columns",) if devices > 1 else ()
            return count_work(lambda x: f(x, axis_name), x, axis_sizes={"columns": devices})

        d = self.distribution
        mesh_shape = dict(d.mesh.shape)
        placed = [
            Leaf(view, cuts_of(leaf.shape, spec, mesh_shape), jnp.dtype(dtype))
            for leaf, view, spec, dtype in zip(leaves, views, self.specs, wire, strict=True)
        ]
        axes = tuple(d.mesh.axis_names) if d.axes is None else d.axes
        return make_plan(placed, mesh_shape, axes=axes, mode=d.mode, chunks=d.chunks, cost=cost)

    def map(
        self,
        f: Function,
        leaves: Sequence[jax.Array],
        views: Sequence[MatrixView],
        wire: Sequence[jnp.dtype],
        *,
        call: str,
    ) -> list[jax.Array]:
        """f on each matrix of the leaves, once; the results lie as the leaves do.

        Args:
          f: [*batch, m, n] with m <= n, and the mesh axes over which the columns are cut -> the same shape and dtype.
          leaves: Arrays.
          views: Of each leaf.
          wire: The dtype in which each leaf travels.
          call: Who asks, for errors.
        """
        if not leaves:
            return []
        mesh = _runnable(self.distribution.mesh, leaves, call)
        plan = self.plan(f, leaves, views, wire)
        platform = platform_of(*leaves, mesh=mesh)
        specs = tuple(spec_of(leaf.spec) for leaf in plan.leaves)
        explicit = AxisType.Explicit in mesh.axis_types
        before = [jax.typeof(x).sharding for x in leaves]
        if explicit:
            leaves = [
                jax.sharding.reshard(x, NamedSharding(mesh, spec))
                for x, spec in zip(leaves, specs, strict=True)
            ]
        run = jax.shard_map(
            lambda *blocks: tuple(exchange(f, blocks, plan, platform)),
            mesh=mesh,
            in_specs=specs,
            out_specs=specs,
            check_vma=False,  # an all-gather makes replicas, which the checker can't see
        )
        results = list(run(*leaves))
        if explicit:
            results = [jax.sharding.reshard(y, s) for y, s in zip(results, before, strict=True)]
        return results


def _runnable(mesh: Mesh | AbstractMesh, leaves: Sequence[jax.Array], call: str) -> Mesh | AbstractMesh:
    """The mesh, if the leaves lie on its devices."""
    if isinstance(mesh, AbstractMesh):
        current = jax.sharding.get_abstract_mesh()
        if (current.axis_names, current.axis_sizes) != (mesh.axis_names, mesh.axis_sizes):
            raise ValueError(
                f"{call}: the Distribution's {mesh} is a plan for {mesh.size} devices, and here are "
                f"{jax.device_count()}. To run it, give it a jax.make_mesh(...) of them, or call it under jax.set_mesh "
                "of that shape."
            )
        mesh = current
    for leaf in leaves:
        there = jax.typeof(leaf).sharding.mesh
        if there.size > 1 and AxisType.Manual in there.axis_types:
            raise ValueError(
                f"{call}(distribution=...) runs its own shard_map, and can't run inside of another; call it outside."
            )
        if there.size > 1 and there.size != mesh.size:
            raise ValueError(
                f"{call}: the Distribution's mesh {dict(mesh.shape)} has {mesh.size} devices, but the arrays lie on "
                f"{there.size}, {dict(there.shape)}; make the Distribution with the mesh that the parameters lie on."
            )
    return mesh


def find_mesh(
    distribution: Distribution | None, tree: Any, chosen: Sequence[int], *, call: str
) -> OnMesh | None:
    """How the `chosen` leaves of `tree` lie; None: on one device, or nobody says.

    A `distribution` is believed; without one, explicit axis types say it.
    """
    leaves = jax.tree.leaves(tree)
    if distribution is not None:
        specs = spread_specs(distribution.param_specs, tree, call=call)
        return OnMesh(dataclasses.replace(distribution, param_specs=None), tuple(specs[i] for i in chosen))
    shardings = [jax.typeof(leaves[i]).sharding for i in chosen]
    # An array that was made under no mesh at all has a mesh without axes.
    meshes = list(dict.fromkeys(s.mesh for s in shardings if s.mesh.size > 1))
    for mesh in meshes:
        if AxisType.Explicit in mesh.axis_types:
            return OnMesh(Distribution(mesh, None), tuple(s.spec for s in shardings))
        if AxisType.Manual not in mesh.axis_types:
            _warn_of(mesh, call)
    return None


@functools.cache
def _warn_of(mesh: AbstractMesh, call: str) -> None:
    warnings.warn(
        f"{call} runs on arrays of the mesh {dict(mesh.shape)} whose axis types are Auto, and can't see how they lie: "
        "XLA will gather matrices and repeat work on every device. Pass distribution=muonjax.Distribution(mesh, "
        "param_specs), or make the mesh with explicit axis types.",
        stacklevel=4,
    )
