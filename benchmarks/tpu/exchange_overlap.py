"""How much of the exchange has compute to hide behind in a training step, by compiling for a TPU v5e without one.

    python -m benchmarks.tpu.exchange_overlap --rounds 1 4 --asynchronous 0 1

One `jit` holds a transformer's backward pass, scanned over its layers, and muonjax's update, FSDP over 16 devices.
The schedule of the compiled program is followed instruction by instruction, with the compiler's own estimate of cycles:
what an all-to-all still has to transfer when the program waits for its end is not hidden.
Needs `pip install "muonjax[tpu]"`; writes results/exchange_overlap.json.
"""

import argparse
import json
import re
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
from benchmarks.common import ahead_of_time, hlo_text, measure

TOPOLOGY = "v5e:4x4"
LAYERS, WIDTH, HIDDEN, HEADS, TOKENS = 32, 512, 2048, 8, 1024
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
# Without deflation it compiles in half the time, and there is less compute to hide behind.
SETTINGS = muonjax.NewtonSchulz(deflation=0)
OPTION = "xla_tpu_enable_async_all_to_all"
# A TPU v5e: 1.5 GHz; 4 links of 400 Gbit/s in all, of which an all-to-all over a torus uses half at best.
CYCLES_A_SECOND, BYTES_A_SECOND = 1.5e9, 2.5e10


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Attention and an MLP, in bfloat16."""
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    q, k, v = (y.reshape(*x.shape[:2], HEADS, -1) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attention.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def compile_step(rounds: int, asynchronous: bool) -> tuple[str, float]:
    """The scheduled HLO of a training step, and the seconds that it took."""
    mesh = Mesh(
        np.array(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices),
        ("fsdp",),
        axis_types=(AxisType.Auto,),
    )
    sharded = NamedSharding(mesh, P("fsdp"))
    params = {
        name: jax.ShapeDtypeStruct(
            (LAYERS, *shape), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp"))
        )
        for name, shape in SHAPES.items()
    }
    x = jax.ShapeDtypeStruct((2 * mesh.size, TOKENS, WIDTH), jnp.bfloat16, sharding=sharded)
    specs = jax.tree.map(lambda p: p.sharding, params)
    distribution = muonjax.Distribution(mesh, specs, mode="owner", chunks=rounds)
    tx = muonjax.muon(
        1e-3,
        muon_weight_dimension_numbers=muonjax.MuonDimensionNumbers(1, 2),
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

    start = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, out_shardings=(specs, shardings), donate_argnums=(0, 1)).lower(
            params, state, x
        )
        compiled = lowered.compile(compiler_options={OPTION: asynchronous})
    return compiled.as_text(), time.perf_counter() - start


class Exchange(NamedTuple):
    """An all-to-all of the schedule: its bytes, its seconds on the links, and those that nothing hides."""

    asynchronous: bool
    bytes: int
    seconds: float
    waited: float


def exchanges(text: str) -> list[Exchange]:
    """The all-to-alls of a scheduled program, as the links carry them: one after the other, beside the compute."""
    computations, entry = hlo_text.parse(text)
    found: list[Exchange] = []
    started: dict[str, tuple[int, float]] = {}  # name -> bytes, when its transfer ends
    now = links_free = 0.0
    for i in computations[entry]:
        if is_exchange(i, computations):
            size = max(map(hlo_text.size, _arrays(i.shape)))
            links_free = max(links_free, now) + size / BYTES_A_SECOND
            if i.op.endswith("-start"):
                started[i.name] = size, links_free
            else:
                found.append(Exchange(False, size, size / BYTES_A_SECOND, links_free - now))
                now = links_free
        elif i.op.endswith("-done") and (own := i.operands[0].split()[-1].lstrip("%")) in started:
            size, end = started.pop(own)
            found.append(Exchange(True, size, size / BYTES_A_SECOND, max(0.0, end - now)))
            now = max(now, end)
        else:
            now += cycles(i, computations) / CYCLES_A_SECOND
    return found


def is_exchange(i: hlo_text.Instruction, computations: dict[str, list[hlo_text.Instruction]]) -> bool:
    """Whether it is an all-to-all or the start of one."""
    inner = computations.get(i.called("calls") or "", []) if i.op == "async-start" else [i]
    return any(j.op in ("all-to-all", "all-to-all-start") for j in inner)


def _arrays(shape: str) -> list[str]:
    return [f"{dtype}[{','.join(map(str, sizes))}]" for dtype, sizes in hlo_text.shapes(shape)]


def cycles(i: hlo_text.Instruction, computations: dict[str, list[hlo_text.Instruction]]) -> int:
    """By the compiler's estimate; a loop's body counts as often as it is known to run, else once."""
    if i.op == "while":
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', i.attributes)
        body = computations[i.called("body") or ""]
        return (int(trips.group(1)) if trips else 1) * sum(cycles(j, computations) for j in body)
    found = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
    return int(found.group(1)) if found else 0


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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--asynchronous", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    arguments = parser.parse_args()
    if reason := ahead_of_time.missing("tpu"):
        raise SystemExit(reason)
    file = measure.RESULTS / "exchange_overlap.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    found = {(row["rounds"], row["option"]): row for row in rows}
    for rounds in arguments.rounds:
        for asynchronous in map(bool, arguments.asynchronous):
            text, seconds = compile_step(rounds, asynchronous)
            row = {
                "rounds": rounds,
                "option": asynchronous,
                "compile_seconds": seconds,
                **summary(exchanges(text)),
            }
            found[rounds, asynchronous] = row
            print({key: value for key, value in row.items() if key != "exchanges"}, flush=True)
            measure.write(
                "exchange_overlap", {"topology": TOPOLOGY, "rows": [found[key] for key in sorted(found)]}
            )


if __name__ == "__main__":
    main()
