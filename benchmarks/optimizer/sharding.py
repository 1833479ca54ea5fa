"""Count what one optimizer step sends and computes on eight devices, in its compiled program.

    python -m benchmarks.optimizer.sharding            # a few minutes; prints a table, writes results/sharding.json

Only the compiler is timed; the counts are exact and the same on every machine. Both optimizers get the same parameters,
with momentum sharded like them, and the step is `update` and `apply_updates`. An even share is the same
optimizer's work on one device, divided by the number of devices.
"""

import contextlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.common import hlo_counts, measure

ROWS, COLUMNS = 512, 2048


class Case(NamedTuple):
    """A mesh, and the sharded matrices on it.

    Attributes:
      title: The name that tables show.
      mesh_shape: Name and size of the mesh axes.
      leaves: Name to shape and spec; the last two axes are a matrix.
    """

    title: str
    mesh_shape: dict[str, int]
    leaves: dict[str, tuple[tuple[int, ...], P]]

    def mesh(self, axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
        names, sizes = tuple(self.mesh_shape), tuple(self.mesh_shape.values())
        devices = jax.devices()[: self.devices]
        return jax.make_mesh(
            sizes, names, axis_types=(axis_type,) * len(names), devices=devices
        )

    @property
    def devices(self) -> int:
        return math.prod(self.mesh_shape.values())

    @property
    def matrices(self) -> int:
        return sum(math.prod(shape[:-2]) for shape, _ in self.leaves.values())

    @property
    def specs(self) -> dict[str, P]:
        return {name: spec for name, (_, spec) in self.leaves.items()}

    def params(self, mesh: jax.sharding.Mesh | None) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings; without a mesh, of one device."""
        params = {}
        for name, (shape, spec) in self.leaves.items():
            sharding = None if mesh is None else NamedSharding(mesh, spec)
            params[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        return params


def both_ways(
    wide: P, tall: P, count: int = 12
) -> dict[str, tuple[tuple[int, ...], P]]:
    """`count` wide and `count` tall matrices."""
    leaves = {f"wide_{i}": ((ROWS, COLUMNS), wide) for i in range(count)}
    return leaves | {f"tall_{i}": ((COLUMNS, ROWS), tall) for i in range(count)}


def fsdp(count: int) -> Case:
    """`count` wide and `count` tall matrices."""
    return Case(
        "FSDP 8", {"fsdp": 8}, both_ways(P("fsdp", None), P("fsdp", None), count)
    )


CASES = {
    "fsdp": fsdp(12),
    "fsdp_tp": Case(
        "FSDP × tensor 4 × 2",
        {"fsdp": 4, "tensor": 2},
        both_ways(P("fsdp", "tensor"), P("tensor", "fsdp")),
    ),
    "hsdp": Case(
        "HSDP 2 × 4",
        {"replica": 2, "fsdp": 4},
        both_ways(P("fsdp", None), P("fsdp", None)),
    ),
    "replicated": Case("replicated (data parallel)", {"data": 8}, both_ways(P(), P())),
    "experts": Case(
        "experts P('ep', None, 'fsdp')",
        {"ep": 2, "fsdp": 4},
        {f"experts_{i}": ((8, ROWS, COLUMNS), P("ep", None, "fsdp")) for i in range(3)},
    ),
    "four": Case(
        "four matrices on 4 × 2",
        {"fsdp": 4, "tensor": 2},
        {f"wide_{i}": ((ROWS, COLUMNS), P("fsdp", "tensor")) for i in range(4)},
    ),
}

NUMBERS = muonjax.MuonDimensionNumbers(-2, -1)


def compile_step(
    tx: optax.GradientTransformation, case: Case, axis_type: AxisType | None
) -> Any:
    """`update` and `apply_updates`; `axis_type` None: on one device."""
    mesh = None if axis_type is None else case.mesh(axis_type)
    params = case.params(mesh)
    state = jax.eval_shape(tx.init, case.params(None))
    if mesh is not None:
        shardings = muonjax.state_shardings(
            tx, params, muonjax.Distribution(mesh, case.specs)
        )
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            shardings,
        )

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    out = None if mesh is None else jax.tree.map(lambda x: x.sharding, (params, state))
    under = (
        jax.set_mesh(mesh)
        if axis_type == AxisType.Explicit
        else contextlib.nullcontext()
    )
    with under:
        jitted = jax.jit(step, out_shardings=out, donate_argnums=(1, 2))
        return jitted.lower(params, state, params).compile()


def muon(case: Case, axis_type: AxisType | None) -> optax.GradientTransformation:
    """muonjax's Muon, with a Distribution where the axis types are not explicit."""
    auto = axis_type == AxisType.Auto
    distribution = muonjax.Distribution(case.mesh(), case.specs) if auto else None
    return muonjax.muon(1e-3, NUMBERS, distribution=distribution)


def optax_muon(case: Case) -> optax.GradientTransformation:
    numbers = jax.tree.map(lambda _: NUMBERS, case.params(None))
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)


def even_share(tx: optax.GradientTransformation, case: Case) -> float:
    """Flops on one device, divided by the number of devices."""
    return (
        hlo_counts.count(compile_step(tx, case, None), devices=1).flops / case.devices
    )


def measured(compiled: Any, even_share: float, case: Case) -> dict[str, Any]:
    counts = hlo_counts.count(compiled, devices=case.devices)
    return {
        "mebibytes": counts.mebibytes,
        "collectives": counts.total_collectives,
        "redundancy": counts.flops / even_share,
    }


def run_case(case: Case) -> dict[str, Any]:
    """Every column of one row."""
    ours, theirs = (
        even_share(muon(case, None), case),
        even_share(optax_muon(case), case),
    )
    row: dict[str, Any] = {"title": case.title}
    row["optax"] = measured(
        compile_step(optax_muon(case), case, AxisType.Auto), theirs, case
    )
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        compiled = compile_step(muon(case, axis_type), case, axis_type)
        row[f"muonjax_{axis_type.name.lower()}"] = measured(compiled, ours, case)
    try:
        compile_step(optax_muon(case), case, AxisType.Explicit)
        row["optax_explicit"] = "runs"
    except Exception as error:
        row["optax_explicit"] = type(error).__name__
    return row


def memory(title: str, case: Case) -> dict[str, Any]:
    """Temporary memory of `orthogonalize` alone, and what a device's shards of the momentum and its group take."""
    mesh = case.mesh()
    distribution = muonjax.Distribution(mesh, case.specs)
    tx = muonjax.orthogonalize(dimension_numbers=NUMBERS, distribution=distribution)
    params = case.params(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    update = jax.jit(lambda x: tx.update(x, tx.init(x))[0], out_shardings=shardings)
    compiled = update.lower(params).compile()
    group = math.ceil(case.matrices / case.devices) * ROWS * COLUMNS
    shards = [x.sharding.shard_shape(x.shape) for x in params.values()]
    needed = 4 * (group + sum(math.prod(shape) for shape in shards))
    return {
        "title": title,
        "temporary_mebibytes": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "share_and_group_mebibytes": needed / 2**20,
    }


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    rows = {}
    for name, case in CASES.items():
        rows[name] = run_case(case)
        print(name, rows[name], flush=True)
    counts = [
        memory(f"FSDP 8, {2 * count} matrices", fsdp(count))
        for count in (4, 12, 24, 48)
    ]
    for name in ("hsdp", "replicated"):
        counts.append(memory(f"{CASES[name].title}, 24 matrices", CASES[name]))
    measure.write("sharding", {"rows": rows, "memory": counts}, counts)


if __name__ == "__main__":
    main()
