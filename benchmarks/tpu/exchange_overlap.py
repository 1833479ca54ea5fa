"""How much of the exchange has compute to hide behind in a training step, by compiling for TPUs and GPUs without one.

    python -m benchmarks.tpu.exchange_overlap --meshes "v5e:4x4" "v5e:16x16" "8 x H100" --rounds 1 4 --options 0 1

One `jit` holds a transformer's backward pass, scanned over its layers, and muonjax's update, FSDP over all devices;
each owns eight matrices. The schedule of the compiled program is followed instruction by instruction, for a TPU with
the compiler's own estimate of cycles, for a GPU with a roofline: what an all-to-all still has to transfer when the
program waits for its end is not hidden. Launches and temporary memory say what the rounds cost.
Needs `pip install "muonjax[tpu]"`, for GPUs `"muonjax[cuda13]"`; writes results/exchange_overlap.json.
"""

import argparse
import dataclasses
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.common import ahead_of_time, hlo_launches, hlo_text, measure, roofline

WIDTH, HIDDEN, HEADS = 512, 2048, 8
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
MATRICES = 8  # of each device
UNKNOWN_TRIPS = (
    1  # of loops over matrices of which some devices own more than others: less compute than there is
)
# Without deflation it compiles in half the time, and there is less compute to hide behind.
SETTINGS = muonjax.NewtonSchulz(deflation=0)


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      chip: A name of `ahead_of_time.CHIPS`.
      devices: Number of devices.
      option: XLA's option that is tried on and off.
      bytes_a_second: What a device sends in an all-to-all among all of them.
      tokens: In each of two sequences of a device; more layers have room for fewer.
    """

    chip: str
    devices: int
    option: str
    bytes_a_second: float
    tokens: int = 1024


_TPU, _GPU = "xla_tpu_enable_async_all_to_all", "xla_gpu_enable_latency_hiding_scheduler"
# A link of a TPU v5e carries 45 GB/s each way. Half of what 256 devices send crosses one of the two cuts through the
# middle of a 16 x 16 torus, of 16 links each: half a link for each device. Across the middle of a 4 x 4 mesh, which is
# no torus, eight devices have four links: one for each. For GPUs as `plan` assumes.
TARGETS = {
    "v5e:4x4": Target("v5e", 16, _TPU, 4.5e10),
    "v5e:16x16": Target("v5e", 256, _TPU, 2.25e10, tokens=128),
    "8 x H100": Target("H100", 8, _GPU, 2e11),
}


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Attention and an MLP, in bfloat16."""
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    q, k, v = (y.reshape(*x.shape[:2], HEADS, -1) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attention.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def devices_of(name: str) -> list[Any]:
    """Descriptions of the devices of a target."""
    chip = ahead_of_time.CHIPS[TARGETS[name].chip]
    if chip.platform == "gpu":
        return ahead_of_time.devices(chip, TARGETS[name].devices)
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def compile_step(name: str, rounds: int, option: bool) -> ahead_of_time.Compiled:
    """A training step for one of `TARGETS`, with the seconds that tracing and compiling took."""
    target = TARGETS[name]
    mesh = Mesh(np.array(devices_of(name)), ("fsdp",), axis_types=(AxisType.Auto,))
    layers = MATRICES * mesh.size // len(SHAPES)
    sharded = NamedSharding(mesh, P("fsdp"))
    params = {
        leaf: jax.ShapeDtypeStruct(
            (layers, *shape), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp"))
        )
        for leaf, shape in SHAPES.items()
    }
    x = jax.ShapeDtypeStruct((2 * mesh.size, target.tokens, WIDTH), jnp.bfloat16, sharding=sharded)
    specs = jax.tree.map(lambda p: p.sharding, params)
    distribution = muonjax.Distribution(mesh, specs, mode="owner", chunks=rounds)
    tx = muonjax.muon(
        1e-3,
        program=muonjax.MuonDimensionNumbers(1, 2),
        newton_schulz=SETTINGS,
        distribution=distribution,
    )
    shardings = muonjax.state_shardings(tx, params, distribution)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        shardings,
    )

    def loss(params, x):
        def layer(x, p):
            return jax.lax.with_sharding_constraint(block(p, x), sharded), None

        x, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    options = {**dict(ahead_of_time.CHIPS[target.chip].options), target.option: option}
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, out_shardings=(specs, shardings), donate_argnums=(0, 1))
        compiled = jitted.lower(params, state, x).compile(compiler_options=options)
    seconds = time.perf_counter() - start
    return ahead_of_time.Compiled(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, seconds)


class Exchange(NamedTuple):
    """An all-to-all of the schedule: its bytes, its seconds on the links, and those that nothing hides."""

    asynchronous: bool
    bytes: int
    seconds: float
    waited: float


def exchanges(text: str, target: Target) -> list[Exchange]:
    """The all-to-alls of a scheduled program, as the links carry them: one after the other, beside the compute."""
    computations, _ = hlo_text.parse(text)
    found: list[Exchange] = []
    started: dict[str, tuple[int, float]] = {}  # name -> bytes, when its transfer ends
    now = links_free = 0.0
    for i, launches in hlo_launches.by_instruction(text, UNKNOWN_TRIPS):
        if is_exchange(i, computations):
            size = max(map(hlo_text.size, _arrays(i.shape)))
            links_free = max(links_free, now) + size / target.bytes_a_second
            if i.op.endswith("-start"):
                started[i.name] = size, links_free
            else:
                found.append(Exchange(False, size, size / target.bytes_a_second, links_free - now))
                now = links_free
        elif i.op.endswith("-done") and (own := i.operands[0].split()[-1].lstrip("%")) in started:
            size, end = started.pop(own)
            found.append(Exchange(True, size, size / target.bytes_a_second, max(0.0, end - now)))
            now = max(now, end)
        else:
            now += sum(launch.count * seconds(launch, target.chip) for launch in launches)
    return found


def seconds(launch: hlo_launches.Launch, chip: str) -> float:
    """Of one run: on a TPU by the compiler's estimate of cycles alone."""
    model = roofline.ROOFLINES[chip].optimistic  # less compute hides less
    if isinstance(model, roofline.Tpu):
        return (launch.cycles or 0) / model.clock
    return model.seconds(launch)


def is_exchange(i: hlo_text.Instruction, computations: dict[str, list[hlo_text.Instruction]]) -> bool:
    """Whether it is an all-to-all or the start of one."""
    inner = computations.get(i.called("calls") or "", []) if i.op == "async-start" else [i]
    return any(j.op in ("all-to-all", "all-to-all-start") for j in inner)


def _arrays(shape: str) -> list[str]:
    return [f"{dtype}[{','.join(map(str, sizes))}]" for dtype, sizes in hlo_text.shapes(shape)]


def summary(found: list[Exchange]) -> dict[str, Any]:
    """The row of a program; the hidden share is that of the bytes, at the same speed of all links."""
    total = sum(one.seconds for one in found)
    return {
        "all_to_alls": len(found),
        "asynchronous": sum(one.asynchronous for one in found),
        "mebibytes": sum(one.bytes for one in found) / 2**20,
        "hidden_share": 1 - min(total, sum(one.waited for one in found)) / total,
        "exchanges": [one._asdict() for one in found],
    }


def row_of(name: str, rounds: int, option: bool) -> dict[str, Any]:
    """What a program costs and hides."""
    compiled = compile_step(name, rounds, option)
    return {
        "mesh": name,
        "rounds": rounds,
        "option": option,
        "compile_seconds": compiled.seconds,
        "launches": sum(launch.count for launch in hlo_launches.launches(compiled.text, UNKNOWN_TRIPS)),
        "temporary_mebibytes": compiled.temporary / 2**20,
        **summary(exchanges(compiled.text, TARGETS[name])),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--options", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    arguments = parser.parse_args()
    file = measure.RESULTS / "exchange_overlap.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    found = {(row["mesh"], row["rounds"], row["option"]): row for row in rows}
    for name in arguments.meshes:
        if reason := ahead_of_time.missing(ahead_of_time.CHIPS[TARGETS[name].chip].platform):
            raise SystemExit(reason)
        for rounds in arguments.rounds:
            for option in map(bool, arguments.options):
                row = found[name, rounds, option] = row_of(name, rounds, option)
                print({key: value for key, value in row.items() if key != "exchanges"}, flush=True)
                order = sorted(found, key=lambda key: (list(TARGETS).index(key[0]), *key[1:]))
                measure.write("exchange_overlap", {"rows": [found[key] for key in order]})


if __name__ == "__main__":
    main()
