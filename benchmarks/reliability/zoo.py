"""Count the leaves and parameters of the public models in tests/zoo that routing has right, wrong and leaves open.

A leaf that names leave open goes to Adam with a warning; it counts as right if it is Adam's, and otherwise as open.

python -m benchmarks.reliability.zoo

Beside muonjax: the rule of `optax.contrib.muon` (two axes are a matrix, all else is Adam's), and the one that MaxText
0.2.5 has for its own models. A matrix counts as right whichever of its sides is called rows.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from benchmarks.common import measure
from muonjax._names.dimension_numbers import routes
from tests.zoo.reader import Leaf, params, read_zoo, same_matrices

OPEN = "Adam, with a warning"
Answers = Sequence[Any]  # dimension numbers, None or `OPEN`, leaf by leaf


def by_names(tree: Any) -> dict[str, Any]:
    """What `muonjax.muon` does without a program: dimension numbers, None or `OPEN` by path."""
    found, _ = routes(tree, warn=False)
    return {route.path: OPEN if route.is_open else route.numbers for route in found}


def muonjax_rule(leaves: Sequence[Leaf]) -> Answers:
    """What `muonjax.muon` does."""
    numbers = by_names(params(list(leaves)))
    return [numbers[leaf.path] for leaf in leaves]


def optax_rule(leaves: Sequence[Leaf]) -> Answers:
    """`optax.contrib.muon` without dimension numbers."""
    return [
        MuonDimensionNumbers(0, 1) if len(leaf.shape) == 2 else None for leaf in leaves
    ]


# The names of MaxText's models: parts of names that go to Adam, and the modules of experts and of attention.
_ADAM = re.compile(
    "bias$|scale|embedding|logits_dense|sinks|A_log|dt_bias|conv1d|shared_expert_gate"
)
_EXPERTS = {"MoeBlock_0", "moe_block", "routed_experts", "GptOssMlp"}
_ATTENTIONS = {"self_attention", "full_attention", "attention", "self_attn", "attn"}
_ATTENTIONS.add("GptOssAttention")


def maxtext_rule(leaves: Sequence[Leaf]) -> Answers:
    """MaxText 0.2.5: by the names of its own models, layers on axis 1."""
    return [_maxtext(set(leaf.path.split("/")), len(leaf.shape)) for leaf in leaves]


def _maxtext(names: set[str], rank: int) -> MuonDimensionNumbers | None:
    last = MuonDimensionNumbers(0, rank - 1)
    if rank < 2 or any(_ADAM.search(name) for name in names):
        return None
    if names & _EXPERTS and not names & {"shared_experts", "shared_expert"}:
        if names & {"wi", "wi_0", "wi_1", "wo", "gate_up_proj"}:
            return MuonDimensionNumbers(rank - 2, rank - 1)
        return last
    if names & _ATTENTIONS and rank > 2:
        if names & {
            "query",
            "key",
            "value",
            "wq_b",
            "wkv_b",
            "wkv",
            "q_proj",
            "k_proj",
            "v_proj",
        }:
            return MuonDimensionNumbers(0, (rank - 2, rank - 1))
        whole = rank == 4 or names & {"self_attention", "GptOssAttention"}
        if whole and names & {"out", "o_proj"}:
            return MuonDimensionNumbers((0, rank - 2), rank - 1)
    return last


RULES: dict[str, Callable[[Sequence[Leaf]], Answers]] = {
    "muonjax": muonjax_rule,
    "optax.contrib.muon": optax_rule,
    "MaxText 0.2.5": maxtext_rule,
}


def count(
    rule: Callable[[Sequence[Leaf]], Answers], trees: Sequence[Sequence[Leaf]]
) -> dict[str, int]:
    """Trees, leaves and parameters that are right, wrong and open."""
    totals: Counter[str] = Counter()
    for leaves in trees:
        verdicts = []
        for leaf, answer in zip(leaves, rule(leaves), strict=True):
            is_right = same_matrices(None if answer == OPEN else answer, leaf.right)
            verdicts.append(
                "right" if is_right else "open" if answer == OPEN else "wrong"
            )
            totals[f"leaves_{verdicts[-1]}"] += 1
            totals[f"parameters_{verdicts[-1]}"] += math.prod(leaf.shape)
        totals[f"trees_{min(verdicts, key=('wrong', 'open', 'right').index)}"] += 1
    for what in ("trees", "leaves", "parameters"):
        for how in ("right", "wrong", "open"):
            totals[f"{what}_{how}"] += 0
    return dict(totals)


def main() -> None:
    trees = list(read_zoo().values())
    rows = [
        {"trees": "all", "rule": name, **count(rule, trees)}
        for name, rule in RULES.items()
    ]
    measure.write("zoo", {"rows": rows}, rows)


if __name__ == "__main__":
    main()
