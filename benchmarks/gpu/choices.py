"""What each rule of muonjax/_policy.py is worth on an H100, by shape: updates compiled with and without it, modelled.

    python -m benchmarks.gpu.choices [--texts FOLDER]

Needs what benchmarks/gpu/model.py needs; writes benchmarks/results/gpu_choices.json.
"""

import argparse
import contextlib
import pathlib
import unittest.mock
from typing import Any

import jax

from benchmarks.common import accelerator_model, ahead_of_time, measure
from muonjax._policy import Policy

TREES = {
    "48 of 768 × 768": {"x": ((768, 768), 48)},
    "24 of 768 × 3072": {"x": ((3072, 768), 12), "y": ((768, 3072), 12)},
    "8 of 1024 × 4096": {"x": ((4096, 1024), 8)},
    "8 of 4096 × 4096": {"x": ((4096, 4096), 8)},
    "3 of 4096 × 14336": {"x": ((14336, 4096), 1), "y": ((4096, 14336), 2)},
}
_NOT_FUSED = {"joins_last_steps": lambda self, m, n: False}
PLAIN = "{} Polar Express steps, no deflation"
# The method, what replaces a rule, and the trees that it concerns.
CHOICES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "fast": ("fast", {}, (0, 1, 2, 3, 4)),
    "5 steps, no deflation": (PLAIN.format(5), {}, (0, 1, 2, 3, 4)),
    "fast, steps not fused": ("fast", _NOT_FUSED, (1, 2, 4)),
    "balanced": ("balanced", {}, (0, 1, 2, 3, 4)),
    "6 steps, no deflation": (PLAIN.format(6), {}, (0, 1, 2, 3, 4)),
    "balanced, steps not fused": ("balanced", _NOT_FUSED, (1, 2, 4)),
    "balanced, nothing shared": ("balanced", {"shares_small_matrices": False}, (1, 3, 4)),
    "balanced, stacks of 16 Mi": ("balanced", {"stack_elements": 16 << 20}, (0, 1, 3)),
    "balanced, stacks of 64 Mi": ("balanced", {"stack_elements": 64 << 20}, (1, 3)),
}


def row(tree: str, choice: str, texts: pathlib.Path | None) -> dict[str, Any]:
    """One update of a tree by one choice, as benchmarks/gpu/model.py models it."""
    method, rules, _ = CHOICES[choice]
    jax.clear_caches()  # a trace does not know that a rule was replaced
    with (
        unittest.mock.patch.multiple(Policy, **rules) if rules else contextlib.nullcontext(),
        unittest.mock.patch.dict(accelerator_model.TREES, TREES),
    ):
        found = accelerator_model.model(
            ahead_of_time.CHIPS["H100"], tree, choice, accelerator_model.methods()[method], texts
        )
    names = ("tree", "milliseconds", "launches", "kernels", "temporary_megabytes")
    return {"choice": choice, **{name: found[name] for name in names}}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--texts", type=pathlib.Path, help="a folder that keeps the programs, to count them again"
    )
    arguments = parser.parse_args()
    if reason := ahead_of_time.missing("gpu"):
        parser.error(reason)
    rows = [
        row(tree, choice, arguments.texts)
        for number, tree in enumerate(TREES)
        for choice, (_, _, concerned) in CHOICES.items()
        if number in concerned
    ]
    measure.write("gpu_choices", {"rows": rows})
    print(measure.table(rows))


if __name__ == "__main__":
    main()
