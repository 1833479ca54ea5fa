"""Count what an optimizer's state in host memory costs an accelerator: memory, and copies from the host.

    python -m benchmarks.optimizer.state_memory

Needs `pip install "muonjax[cuda13]"` and `"muonjax[tpu]"`; writes benchmarks/results/state_memory.json. The update is
that of `muon` for square matrices, or of `trace` alone; gradients and state are donated. A TPU's scheduler copies ahead
into whatever memory is free, so one case leaves it little.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import muonjax
from benchmarks.common import ahead_of_time, measure


class Case(NamedTuple):
    """An update of `count` matrices size x size, for a chip; `fits` says whether its state fits on the device."""

    chip: str
    optimizer: str
    count: int
    size: int
    fits: bool = True


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
    Case("v5e", "trace", 8, 4096),
    Case("v5e", "trace", 58, 8192, fits=False),
]


def compiled(case: Case, memory_kind: str | None) -> Any:
    """The update of a case."""
    chip = ahead_of_time.CHIPS[case.chip]
    tx = OPTIMIZERS[case.optimizer]()
    here = ahead_of_time.on_device(chip)
    matrix = jax.ShapeDtypeStruct((case.size, case.size), jnp.float32, sharding=here)
    params = {f"layer_{i}": {"kernel": matrix} for i in range(case.count)}
    shardings = muonjax.state_shardings(tx, params, memory_kind=memory_kind)
    state = jax.eval_shape(tx.init, params)
    state = ahead_of_time.with_shardings(state, shardings)
    # The description of a GPU has no memories, and shardings lose their kind.
    to_host = memory_kind and chip.platform == "gpu"

    def on_host(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host) if x.ndim else x

    def update(grads: Any, state: Any, params: Any) -> Any:
        if to_host:
            state = jax.tree.map(on_host, state)
        return tx.update(grads, state, params)

    return ahead_of_time.compile_for(
        chip,
        update,
        *(params, state, params),
        donate_argnums=(0, 1),
        out_shardings=None if to_host else (here, shardings),
    )


def count(case: Case) -> measure.Row:
    """The figures of a case."""
    program = compiled(case, "pinned_host")
    memory = program.memory_analysis()
    # The device's arguments without state: gradients, and the parameters where they are read.
    trees = 1 if case.optimizer.startswith("trace") else 2
    others = trees * case.count * 4 * case.size**2
    state = None
    temporary = 0
    if case.fits:
        without = compiled(case, None).memory_analysis()
        state = (without.argument_size_in_bytes - others) / 2**20
        temporary = without.temp_size_in_bytes
    text = program.as_text()
    # Memory space 5 is the host's.
    copies = re.findall(r"^.*(?= copy-start\()", text, re.MULTILINE)
    return {
        **case._asdict(),
        "state_mib": state,
        "state_on_device": max(0, memory.argument_size_in_bytes - others),
        "state_on_host_mib": memory.host_argument_size_in_bytes / 2**20,
        "added_mib": (memory.temp_size_in_bytes - temporary) / 2**20,
        "asynchronous": sum("S(5)" in shapes for shapes in copies),
        "synchronous": len(re.findall(r"S\(5\)\S* copy\(", text)),
    }


def main() -> None:
    for platform in ("gpu", "tpu"):
        if reason := ahead_of_time.missing(platform):
            raise SystemExit(reason)
    content = {"cases": [count(case) for case in CASES]}
    measure.write("state_memory", content, device=ahead_of_time.NO_DEVICE)


if __name__ == "__main__":
    main()
