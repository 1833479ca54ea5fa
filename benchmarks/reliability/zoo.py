"""Count the leaves and parameters of the public models in tests/zoo that routing decides rightly, wrongly or refuses.

python -m benchmarks.reliability.zoo

Beside muonjax: the rule of `optax.contrib.muon` (two axes are a matrix, all else is Adam's), and the one that MaxText
0.2.5 has for its own models. A matrix counts as right whichever of its sides is called rows.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from benchmarks.common import measure
from muonjax._names.dimension_numbers import Route, routes
from tests.zoo.reader import Leaf, params, read_zoo, same_matrices

Answers = Sequence[Any] | None  # dimension numbers, leaf by leaf; None: the tree is refused


def muonjax_rule(leaves: Sequence[Leaf]) -> Answers:
    """What `muonjax.muon` does; ValueError is a refusal."""
    try:
        found = [route for route in routes(params(list(leaves)))[0] if isinstance(route, Route)]
    except ValueError:
        return None
    numbers = {route.path: route.numbers for route in found}
    return [numbers[leaf.path] for leaf in leaves]


def optax_rule(leaves: Sequence[Leaf]) -> Answers:
    """`optax.contrib.muon` without dimension numbers."""
    return [MuonDimensionNumbers(0, 1) if len(leaf.shape) == 2 else None for leaf in leaves]


def maxtext_rule(leaves: Sequence[Leaf]) -> Answers:
    """MaxText 0.2.5: by the names of its own models, layers on axis 1."""
    return [_maxtext(set(leaf.path.split("/")), len(leaf.shape)) for leaf in leaves]


def _maxtext(names: set[str], rank: int) -> MuonDimensionNumbers | None:
    excluded = (
        "scale",
        "embedding",
        "logits_dense",
        "sinks",
        "A_log",
        "dt_bias",
        "conv1d",
        "shared_expert_gate",
    )
    if rank < 2 or any(name.endswith("bias") or any(part in name for part in excluded) for name in names):
        return None
    experts = names & {"MoeBlock_0", "moe_block", "routed_experts", "GptOssMlp"}
    if experts and not names & {"shared_experts", "shared_expert"}:
        if names & {"wi", "wi_0", "wi_1", "wo", "gate_up_proj"}:
            return MuonDimensionNumbers(rank - 2, rank - 1)
        if names & {"gate", "router"}:
            return MuonDimensionNumbers(0, rank - 1)
    attentions = {"self_attention", "full_attention", "attention", "self_attn", "attn", "GptOssAttention"}
    if names & attentions and rank > 2:
        if names & {"query", "key", "value", "wq_b", "wkv_b", "wkv", "q_proj", "k_proj", "v_proj"}:
            return MuonDimensionNumbers(0, (rank - 2, rank - 1))
        if names & {"out", "o_proj"} and (names & {"self_attention", "GptOssAttention"} or rank == 4):
            return MuonDimensionNumbers((0, rank - 2), rank - 1)
    return MuonDimensionNumbers(0, rank - 1)


RULES: dict[str, Callable[[Sequence[Leaf]], Answers]] = {
    "muonjax": muonjax_rule,
    "optax.contrib.muon": optax_rule,
    "MaxText 0.2.5": maxtext_rule,
}


def count(rule: Callable[[Sequence[Leaf]], Answers], trees: Sequence[Sequence[Leaf]]) -> dict[str, int]:
    """Trees, leaves and parameters that are right, wrong and refused."""
    totals: Counter[str] = Counter()
    for leaves in trees:
        answers = rule(leaves)
        worst = "right" if answers else "refused"
        for i, leaf in enumerate(leaves):
            verdict = "refused"
            if answers is not None:
                verdict = "right" if same_matrices(answers[i], leaf.right) else "wrong"
                worst = "wrong" if verdict == "wrong" else worst
            totals[f"leaves_{verdict}"] += 1
            totals[f"parameters_{verdict}"] += math.prod(leaf.shape)
        totals[f"trees_{worst}"] += 1
    kinds = [
        f"{what}_{how}" for what in ("trees", "leaves", "parameters") for how in ("right", "wrong", "refused")
    ]
    return {kind: totals[kind] for kind in kinds}


def main() -> None:
    zoo = read_zoo()
    maxtext = [leaves for name, leaves in zoo.items() if name.startswith("maxtext")]
    rows = [{"trees": "all", "rule": name, **count(rule, list(zoo.values()))} for name, rule in RULES.items()]
    rows += [{"trees": "MaxText's", "rule": name, **count(rule, maxtext)} for name, rule in RULES.items()]
    measure.write("zoo", {"rows": rows}, rows)


if __name__ == "__main__":
    main()
