"""The table says what the routing does, and adds up."""

import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from muonjax import FusedDimensionNumbers
from muonjax._names.routes import dimension_numbers
from muonjax._names.tabulate import tabulate
from tests.tools.views import leaf

PARAMS = {
    "Embed_0": {"embedding": leaf(100, 8)},
    "block": {
        "query": {"kernel": leaf(3, 8, 2, 4), "bias": leaf(3, 2, 4)},
        "norm": {"scale": leaf(3, 8)},
    },
    "c_attn": {"kernel": leaf(8, 24)},
}


def test_default_routing():
    assert tabulate(PARAMS).splitlines() == [
        "leaf                shape    goes to  matrices  why",
        "──────────────────  ───────  ───────  ────────  ────────────────────────",
        "Embed_0/embedding   100×8    Adam               embedding",
        "block/norm/scale    3×8      Adam               scale",
        "block/query/bias    3×2×4    Adam               bias",
        "block/query/kernel  3×8×2×4  Muon     3 of 8×8  attention query, stacked",
        "c_attn/kernel       8×24     Muon     3 of 8×8  attention q, k, v",
        "──────────────────  ───────  ───────  ────────  ────────────────────────",
        "Muon: 384 parameters (31.2 %)",
        "Adam: 848 parameters (68.8 %)",
    ]


def test_given_tree_function_and_prefix():
    by_tree = tabulate(PARAMS, dimension_numbers(PARAMS))
    assert by_tree == tabulate(PARAMS, dimension_numbers)
    given, by_names = (
        table.splitlines()[2:-3] for table in (by_tree, tabulate(PARAMS))
    )
    assert [line.split()[:3] for line in given] == [
        line.split()[:3] for line in by_names
    ]
    assert {line.split()[-1] for line in given} == {"given"}
    prefix = {
        "Embed_0": MuonDimensionNumbers(0, 1),
        "block": None,
        "c_attn": FusedDimensionNumbers(0, 1, 2, 1),
    }
    table = tabulate(PARAMS, prefix)
    assert "100×8" in table
    assert "2 of 8×12" in table
    assert "Muon: 992 parameters" in table


def test_given_tree_must_fit():
    with pytest.raises(
        ValueError, match=r"tabulate\(params, dimension_numbers\).*neither the tree"
    ):
        tabulate(PARAMS, {"Embed_0": None})


def test_scalars_get_a_word():
    table = tabulate(
        {"a": leaf(4, 5, dtype="bfloat16"), "b": leaf(), "step": leaf(dtype="int32")}
    )
    assert "scalar" in table
    assert "not a floating-point leaf" in table


def test_masked_and_empty_trees():
    masked = {"a": optax.MaskedNode(), "w": leaf(1)}
    for table in (tabulate(masked), tabulate(masked, dimension_numbers)):
        assert table.splitlines()[2].startswith("w ")
        assert "Adam: 1 parameters (" in table
    assert tabulate({}).splitlines()[-1] == "Adam: 0 parameters (0.0 %)"


def test_an_nnx_model_has_its_parameters_alone():
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        up=nnx.Linear(4, 5, rngs=rngs),
        drop=nnx.Dropout(0.5, rngs=rngs),
        bn=nnx.BatchNorm(5, rngs=rngs),
    )
    leaves = [line.split()[0] for line in tabulate(model).splitlines()[2:6]]
    assert leaves == ["bn/bias", "bn/scale", "up/bias", "up/kernel"]
    given = tabulate(model, dimension_numbers(model)).splitlines()[2:6]
    assert [line.split()[0] for line in given] == leaves
