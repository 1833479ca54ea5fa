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
from benchmarks.common import ahead_of_time, hlo_counts, measure

ROWS = 512
COLUMNS = 2048


Leaves = dict[str, tuple[tuple[int, ...], P]]


class Case(NamedTuple):
    """A mesh, and the sharded matrices on it.

    Attributes:
      title: The name that tables show.
      mesh_shape: Name and size of the mesh axes.
      leaves: Name to shape and spec; the last two axes are a matrix.
    """

    title: str
    mesh_shape: dict[str, int]
    leaves: Leaves

    def mesh(self, axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
        return jax.make_mesh(
            tuple(self.mesh_shape.values()),
            tuple(self.mesh_shape),
            axis_types=(axis_type,) * len(self.mesh_shape),
            devices=jax.devices()[: self.devices],
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


def equal(name: str, count: int, shape: tuple[int, ...], spec: P) -> Leaves:
    """`count` leaves of equal shape and spec."""
    return {f"{name}_{i}": (shape, spec) for i in range(count)}


def both_ways(wide: P, tall: P, count: int = 12) -> Leaves:
    """`count` wide and `count` tall matrices."""
    leaves = equal("wide", count, (ROWS, COLUMNS), wide)
    return leaves | equal("tall", count, (COLUMNS, ROWS), tall)


def fsdp(count: int) -> Case:
    """`count` wide and `count` tall matrices."""
    spec = P("fsdp", None)
    return Case("FSDP 8", {"fsdp": 8}, both_ways(spec, spec, count))


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
    "replicated": Case(
        "replicated (data parallel)",
        {"data": 8},
        both_ways(P(), P()),
    ),
    "experts": Case(
        "experts P('ep', None, 'fsdp')",
        {"ep": 2, "fsdp": 4},
        equal("experts", 3, (8, ROWS, COLUMNS), P("ep", None, "fsdp")),
    ),
    "four": Case(
        "four matrices on 4 × 2",
        {"fsdp": 4, "tensor": 2},
        equal("wide", 4, (ROWS, COLUMNS), P("fsdp", "tensor")),
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
    shardings = None
    under = contextlib.nullcontext()
    if mesh is not None:
        distribution = muonjax.Distribution(mesh, case.specs)
        of_state = muonjax.state_shardings(tx, params, distribution)
        state = ahead_of_time.with_shardings(state, of_state)
        shardings = jax.tree.map(lambda x: x.sharding, params), of_state
    if axis_type == AxisType.Explicit:
        under = jax.set_mesh(mesh)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with under:
        jitted = jax.jit(step, out_shardings=shardings, donate_argnums=(1, 2))
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
    counts = hlo_counts.count(compile_step(tx, case, None), devices=1)
    return counts.flops / case.devices


def measured(
    tx: optax.GradientTransformation, case: Case, axis_type: AxisType, share: float
) -> measure.Row:
    """What a device sends, and its flops in units of an even share."""
    compiled = compile_step(tx, case, axis_type)
    # Where owners have unequal numbers of matrices, no case gives any of them more than one.
    counts = hlo_counts.count(compiled, devices=case.devices, unknown_trips=1)
    return {
        "mebibytes": counts.mebibytes,
        "collectives": counts.total_collectives,
        "redundancy": counts.flops / share,
    }


def run_case(case: Case) -> measure.Row:
    """Every column of one row."""
    theirs = optax_muon(case)
    share = even_share(theirs, case)
    row: measure.Row = {"title": case.title}
    row["optax"] = measured(theirs, case, AxisType.Auto, share)
    share = even_share(muon(case, None), case)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        ours = muon(case, axis_type)
        name = f"muonjax_{axis_type.name.lower()}"
        row[name] = measured(ours, case, axis_type, share)
    return row


def memory(title: str, case: Case) -> measure.Row:
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
    counts = []
    for count in (4, 12, 24, 48):
        counts.append(memory(f"FSDP 8, {2 * count} matrices", fsdp(count)))
    for name in ("hsdp", "replicated"):
        counts.append(memory(f"{CASES[name].title}, 24 matrices", CASES[name]))
    measure.write("sharding", {"rows": rows, "memory": counts})


if __name__ == "__main__":
    main()
