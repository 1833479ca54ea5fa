"""Count what an optimizer's state costs an accelerator: bytes of momentum's pass, memory and copies from the host.

    python -m benchmarks.optimizer.state_memory [--chips H100]

Needs `pip install "muonjax[cuda13]"` and `"muonjax[tpu]"`; writes benchmarks/results/state_memory.json. The update is
that of `muon` for square matrices, or of `trace` alone; gradients and state are donated. A group is the matrices that
are orthogonalized at once. A TPU's scheduler copies ahead into whatever memory is free, so one case leaves it little.
"""

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import muonjax
from benchmarks.common import ahead_of_time, hlo_launches, measure
from muonjax._common.platform import Policy


class Case(NamedTuple):
    """An update of `count` matrices size x size, for a chip."""

    chip: str
    optimizer: str
    count: int
    size: int
    note: str = ""


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "muon": lambda: muonjax.muon(1e-3, muonjax.MuonDimensionNumbers(0, 1)),
    "muon, int8": lambda: muonjax.muon(
        1e-3, muonjax.MuonDimensionNumbers(0, 1), mu_dtype=jnp.int8
    ),
    "trace": lambda: muonjax.trace(0.95, nesterov=True),
    "trace, int8": lambda: muonjax.trace(0.95, True, jnp.int8),
}
CASES = [
    Case("H100", "muon", 8, 4096),
    Case("H100", "muon, int8", 8, 4096),
    Case("H100", "trace", 8, 4096),
    Case("v5e", "trace", 8, 4096, "11 GiB are free"),
    Case("v5e", "trace", 58, 8192, "1.5 GiB are free"),
]


def compiled(case: Case, memory_kind: str | None) -> Any:
    """The update of a case."""
    chip, tx = ahead_of_time.CHIPS[case.chip], OPTIMIZERS[case.optimizer]()
    mesh = Mesh(np.array(ahead_of_time.devices(chip)[:1]), ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    matrix = jax.ShapeDtypeStruct((case.size, case.size), jnp.float32, sharding=here)
    params = {f"layer_{i}": {"kernel": matrix} for i in range(case.count)}
    shardings = muonjax.state_shardings(tx, params, memory_kind=memory_kind)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        shardings,
    )
    on_host = memory_kind and chip.platform == "gpu"

    def update(grads: Any, state: Any, params: Any) -> Any:
        if (
            on_host
        ):  # the description of a GPU has no memories, and shardings lose their kind
            state = jax.tree.map(
                lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x,
                state,
            )
        return tx.update(grads, state, params)

    step = jax.jit(
        update,
        donate_argnums=(0, 1),
        out_shardings=None if on_host else (here, shardings),
    )
    with ahead_of_time.traced_for(chip):
        return step.lower(params, state, params).compile(
            compiler_options=dict(chip.options)
        )


def count(case: Case) -> dict[str, Any]:
    """The figures of a case."""
    host = compiled(case, "pinned_host")
    device = (
        None if case.note.startswith("1.5") else compiled(case, None)
    )  # which does not fit
    policy, matrix = Policy(ahead_of_time.CHIPS[case.chip].platform), 4 * case.size**2
    together = (
        1
        if case.optimizer.startswith("trace")
        else int(policy.stack_elements // case.size**2)
    )
    group = matrix * min(case.count, max(1, together))
    after = host.memory_analysis()
    added = after.temp_size_in_bytes - (
        device.memory_analysis().temp_size_in_bytes if device else 0
    )
    # The device's arguments without state: gradients and parameters.
    others = (
        2 * case.count * matrix
        if not case.optimizer.startswith("trace")
        else case.count * matrix
    )
    text = host.as_text()
    # Memory space 5 is the host's.
    copies = [
        line.partition(" copy-start(")[0]
        for line in text.splitlines()
        if " copy-start(" in line
    ]
    return {
        **case._asdict(),
        "state_mib": (device.memory_analysis().argument_size_in_bytes - others) / 2**20
        if device
        else None,
        "state_on_device": max(0, after.argument_size_in_bytes - others),
        "state_on_host_mib": after.host_argument_size_in_bytes / 2**20,
        "added_mib": added / 2**20,
        "added_groups": added / group,
        "group_mib": group / 2**20,
        "asynchronous": sum("S(5)" in shapes for shapes in copies),
        "synchronous": len(re.findall(r"S\(5\)\S* copy\(", text)),
    }


def moved(gradients: str, nesterov: bool, size: int = 4096) -> dict[str, Any]:
    """Bytes that a GPU reads and writes to update the momentum of one matrix, for momentum in int8 and in float32."""
    row: dict[str, Any] = {"gradients": gradients, "nesterov": nesterov}
    for dtype in ("float32", "int8"):
        tx = muonjax.trace(0.95, nesterov, jnp.dtype(dtype))
        matrix = {"w": jax.ShapeDtypeStruct((size, size), jnp.dtype(gradients))}
        program = ahead_of_time.compile_for(
            ahead_of_time.CHIPS["H100"],
            tx.update,
            matrix,
            jax.eval_shape(tx.init, matrix),
        )
        found = hlo_launches.launches(program.text)
        row[dtype] = sum(launch.count * launch.moved for launch in found) / size**2
    return {**row, "ratio": row["int8"] / row["float32"]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--chips", nargs="+", default=["H100", "v5e"], choices=["H100", "v5e"]
    )
    args = parser.parse_args(arguments)
    rows = []
    passes = [
        moved(dtype, nesterov)
        for dtype in ("float32", "bfloat16")
        for nesterov in (True, False)
    ]
    for case in CASES:
        if case.chip in args.chips:
            if reason := ahead_of_time.missing(ahead_of_time.CHIPS[case.chip].platform):
                raise SystemExit(reason)
            rows.append(count(case))
            print(measure.table(rows[-1:]), flush=True)
            measure.write("state_memory", {"passes": passes, "cases": rows})


if __name__ == "__main__":
    main()
