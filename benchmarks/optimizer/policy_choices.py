"""What each rule of muonjax/_policy.py is worth on an accelerator: updates compiled with and without it, modelled.

    python -m benchmarks.optimizer.policy_choices [--chips H100,v5e] [--again] [--texts FOLDER]

Needs what benchmarks/gpu/model.py and benchmarks/tpu/model.py need; writes benchmarks/results/policy_choices.json.
"""

import argparse
import contextlib
import math
import pathlib
import unittest.mock
from typing import Any

import jax

from benchmarks.common import accelerator_model, ahead_of_time, measure
from muonjax._policy import Policy

SQUARES, WIDE, KEYS, LARGE, LARGEST, HEADS, EXPERTS = TREES = {
    "48 of 768 × 768": {"x": ((768, 768), 48)},
    "24 of 768 × 3072": {"x": ((3072, 768), 12), "y": ((768, 3072), 12)},
    "8 of 1024 × 4096": {"x": ((4096, 1024), 8)},
    "8 of 4096 × 4096": {"x": ((4096, 4096), 8)},
    "3 of 4096 × 14336": {"x": ((14336, 4096), 1), "y": ((4096, 14336), 2)},
    "64 heads of 7168 × 128": {"x": ((64, 7168, 128), 1)},
    "128 experts of 2048 × 768": {"x": ((128, 2048, 768), 1)},
}
MATRICES = (SQUARES, WIDE, KEYS, LARGE, LARGEST)
PLAIN = "{} Polar Express steps, no deflation"
_NOT_FUSED = {"joins_last_steps": lambda self, m, n: False}
_BLOCKS = {"symmetric_in_blocks": lambda self, m: m >= 2048}
_NO_BLOCKS = {"symmetric_in_blocks": lambda self, m: False}


def _batches(_: Policy, count: int, shape: tuple[int, int]) -> int:
    return max(
        size for size in range(1, count + 1) if count % size == 0 and size * math.prod(shape) <= 32 << 20
    )


def _stacks(mebi: int) -> dict[str, Any]:
    return {"stack_elements": mebi << 20}


# By chip and name: the method, what replaces a rule, and the trees that it concerns.
CHOICES: dict[tuple[str, str], tuple[str, dict[str, Any], tuple[str, ...]]] = {
    ("H100", "fast"): ("fast", {}, MATRICES),
    ("H100", "5 steps, no deflation"): (PLAIN.format(5), {}, MATRICES),
    ("H100", "fast, steps not fused"): ("fast", _NOT_FUSED, (WIDE, KEYS, LARGEST)),
    ("H100", "balanced"): ("balanced", {}, tuple(TREES)),
    ("H100", "6 steps, no deflation"): (PLAIN.format(6), {}, MATRICES),
    ("H100", "balanced, steps not fused"): ("balanced", _NOT_FUSED, (WIDE, KEYS, LARGEST)),
    ("H100", "balanced, nothing shared"): (
        "balanced",
        {"shares_small_matrices": False},
        (WIDE, LARGE, LARGEST),
    ),
    ("H100", "balanced, all stacks at once"): (
        "balanced",
        {"one_stack_at_a_time": False},
        (WIDE, LARGE, LARGEST),
    ),
    ("H100", "balanced, stacks of 16 Mi"): ("balanced", _stacks(16), (SQUARES, WIDE, LARGE)),
    ("H100", "balanced, stacks of 64 Mi"): ("balanced", _stacks(64), (WIDE, LARGE)),
    ("H100", "balanced, symmetric in blocks"): ("balanced", _BLOCKS, (LARGE, LARGEST)),
    ("H100", "balanced, batches of 32 Mi"): ("balanced", {"chunk_size": _batches}, (HEADS, EXPERTS)),
    ("v5e", "balanced"): ("balanced", {}, (KEYS, LARGE)),
    ("v5e", "balanced, not in blocks"): ("balanced", _NO_BLOCKS, (LARGE,)),
    ("v5e", "balanced, stacks of 17 Mi"): ("balanced", _stacks(17), (KEYS,)),
    ("v5p", "balanced"): ("balanced", {}, (KEYS, LARGE, LARGEST)),
    ("v5p", "balanced, symmetric in blocks"): ("balanced", _BLOCKS, (LARGE, LARGEST)),
    ("v5p", "balanced, stacks of 4 Mi"): ("balanced", _stacks(4), (KEYS,)),
    ("v6e", "balanced"): ("balanced", {}, (KEYS, LARGE)),
    ("v6e", "balanced, not in blocks"): ("balanced", _NO_BLOCKS, (LARGE,)),
    ("v6e", "balanced, stacks of 17 Mi"): ("balanced", _stacks(17), (KEYS,)),
}


def row(chip: str, choice: str, tree: str, texts: pathlib.Path | None) -> dict[str, Any]:
    """One update of a tree by one choice, as benchmarks/common/accelerator_model.py models it."""
    method, rules, _ = CHOICES[chip, choice]
    jax.clear_caches()  # a trace does not know that a rule was replaced
    with (
        unittest.mock.patch.multiple(Policy, **rules) if rules else contextlib.nullcontext(),
        unittest.mock.patch.dict(accelerator_model.TREES, TREES),
    ):
        found = accelerator_model.model(
            ahead_of_time.CHIPS[chip], tree, choice, accelerator_model.methods()[method], texts
        )
    names = ("chip", "tree", "milliseconds", "launches", "kernels", "temporary_megabytes")
    return {"choice": choice, **{name: found[name] for name in names}}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", default="H100,v5e,v5p,v6e")
    parser.add_argument("--again", action="store_true", help="compile what stands in the JSON too")
    parser.add_argument(
        "--texts", type=pathlib.Path, help="a folder that keeps the programs, to count them again"
    )
    arguments = parser.parse_args()
    known = {(r["chip"], r["choice"], r["tree"]): r for r in measure.read("policy_choices").get("rows", [])}
    for (chip, choice), (_, _, trees) in CHOICES.items():
        for key in [(chip, choice, tree) for tree in trees]:
            if chip in arguments.chips.split(",") and (arguments.again or key not in known):
                known[key] = row(*key, arguments.texts)
                print(known[key], flush=True)
                keys = [(*key, tree) for key, (_, _, trees) in CHOICES.items() for tree in trees]
                measure.write("policy_choices", {"rows": [known[key] for key in keys if key in known]})


if __name__ == "__main__":
    main()
