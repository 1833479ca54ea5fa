"""Unusual use: strict modes, `jax.shard_map`, damaged files and unusual leaves, and what comes of each.

    python -m benchmarks.reliability.unusual_use            # all; about five minutes
    python -m benchmarks.reliability.unusual_use leaves     # one part; the others are kept

The first three parts count the cases of tests that pass; the quick tests that `.ci/run` runs under the strict modes are
only counted. For leaves, `muon` and `optax.adamw` make three steps on a
tree that holds one. Writes results/unusual_use.json.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import muonjax
from benchmarks.common import measure
from tests.tools import strict

ROOT = measure.RESULTS.parent.parent
TESTS = {
    "strict_modes": ["tests/reliability/test_strict_modes.py::test_strict"],
    "shard_map": ["tests/msign/test_shard_map.py", "tests/adapters/test_shard_map.py"],
    "files": [
        "tests/adapters/test_lycoris.py",
        "-k",
        "false_ or not_finite or many_unknown or are_named",
    ],
}


def run_cases(arguments: list[str]) -> list[tuple[str, str, bool, str]]:
    """Of each case its test, its parameters, whether it passed, and why it need not."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "cases.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", f"--junitxml={file}", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not file.exists():
            raise RuntimeError(done.stdout + done.stderr)
        cases = ElementTree.parse(file).iter("testcase")
        return [_case(case) for case in cases]


def _case(case: ElementTree.Element) -> tuple[str, str, bool, str]:
    test, _, parameters = case.get("name", "").partition("[")
    reasons = [child.get("message", "") for child in case if child.tag == "skipped"]
    bad = any(child.tag in ("failure", "error", "skipped") for child in case)
    folder = case.get("classname", "").split(".")[-2]
    return (
        f"{folder}: {test.removeprefix('test_').replace('_', ' ')}",
        parameters.rstrip("]"),
        not bad,
        " ".join(reasons),
    )


def strict_modes() -> list[dict[str, Any]]:
    """A row for each mode."""
    rows: dict[str, dict[str, Any]] = {}
    for _, parameters, passed, reason in run_cases(TESTS["strict_modes"]):
        function, _, mode = parameters.rpartition("-")
        row = rows.setdefault(mode, {"mode": mode, "passed": 0, "others": []})
        row["passed"] += passed
        row["others"] += [] if passed else [{"function": function, "reason": reason}]
    return list(rows.values())


def quick_tests() -> list[dict[str, Any]]:
    """Of each option of `.ci/run`, how many quick tests run under it, how many don't, and why."""

    def collected(markers: str) -> int:
        tier = "not thorough and not nightly and not interop"
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", f"{tier}{markers}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = re.search(r"^(\d+)(?:/\d+)? tests collected", done.stdout, re.MULTILINE)
        if not found:
            raise RuntimeError(done.stdout + done.stderr)
        return int(found.group(1))

    every = collected("")
    spared = [{"function": f"{module}.{name}", "reason": reason} for module, name, reason in strict.LENIENT]
    rows = [
        {"option": "--jax-strict", "marker": "promotes", "spared": spared},
        {"option": "--jax-debug-nans", "marker": "nan", "spared": []},
    ]
    for row in rows:
        row["without"] = collected(f" and {row['marker']}")
        row["tests"] = every - row["without"]
    return rows


def count_tests(name: str) -> list[dict[str, Any]]:
    """A row for each test, with its number of cases."""
    cases: dict[str, list[bool]] = collections.defaultdict(list)
    for test, _, passed, _ in run_cases(TESTS[name]):
        cases[test].append(passed)
    return [{"test": test, "passed": sum(found), "cases": len(found)} for test, found in cases.items()]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A dataclass of a user's."""

    kernel: jax.Array
    bias: jax.Array


def _kernel(dtype: str = "float32") -> jax.Array:
    return jnp.linspace(-1, 1, 64).reshape(8, 8).astype(dtype)


def _layer() -> dict[str, jax.Array]:
    return {"kernel": _kernel(), "bias": jnp.ones(8)}


# What stands in the tree beside an ordinary layer.
LEAVES: dict[str, Callable[[], Any]] = {
    "`None`": lambda: None,
    "`optax.MaskedNode`": optax.MaskedNode,
    "bfloat16": lambda: {"kernel": _kernel("bfloat16")},
    "float16": lambda: {"kernel": _kernel("float16")},
    "complex64": lambda: {"kernel": _kernel("complex64")},
    "float8": lambda: {"kernel": _kernel("float8_e4m3fn")},
    "int8": lambda: {"kernel": _kernel("int8")},
    "int4": lambda: {"kernel": _kernel("int4")},
    "bool": lambda: {"mask": jnp.ones((8, 8), bool)},
    "a random key": lambda: {"rng": jax.random.key(0)},
    "a Python scalar": lambda: {"scale": 1.0},
    "an empty tree": dict,
    "an array of size 0": lambda: {"kernel": jnp.zeros((0, 8))},
    "names with a slash": lambda: {"a/b": _layer(), "a": {"b": _layer()}},
    "whole numbers as keys": lambda: {0: _layer(), 1: _layer()},
    "a dataclass": lambda: Layer(_kernel(), jnp.ones(8)),
    "an Equinox module": lambda: eqx.filter(eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.is_array),
    "`nnx.State` with other variables": lambda: nnx.state(nnx.BatchNorm(8, rngs=nnx.Rngs(0))),
}


def _gradient(p: Any) -> Any:
    """Of the shape and dtype that `jax.grad(allow_int=True)` gives."""
    dtype = getattr(p, "dtype", jnp.result_type(p))
    return jnp.asarray(p) if jnp.issubdtype(dtype, jnp.inexact) else np.zeros(p.shape, jax.dtypes.float0)


def three_steps(tx: optax.GradientTransformation, params: Any) -> str:
    """ "works", or the error."""
    try:
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(jax.tree.map(_gradient, params), state, params)
            params = optax.apply_updates(params, updates)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:250]
    return "works"


def leaves() -> list[dict[str, str]]:
    """A row for each kind."""
    optimizers = {"muonjax": muonjax.muon(1e-3), "adamw": optax.adamw(1e-3)}
    return [
        {"leaf": leaf}
        | {name: three_steps(tx, {"dense": _layer(), "other": make()}) for name, tx in optimizers.items()}
        for leaf, make in LEAVES.items()
    ]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "strict_modes": strict_modes,
    "quick_tests": quick_tests,
    "shard_map": lambda: count_tests("shard_map"),
    "files": lambda: count_tests("files"),
    "leaves": leaves,
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    chosen = parser.parse_args().parts or PARTS
    path = measure.RESULTS / "unusual_use.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    content = {name: known[name] for name in PARTS if name in known}
    for name in chosen:
        content[name] = PARTS[name]()
        measure.write("unusual_use", content)
        print(measure.table(content[name]))


if __name__ == "__main__":
    main()
