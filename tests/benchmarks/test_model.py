"""The counted model on small matrices: no default launches, moves or keeps a tenth more than the committed figures."""

import json

import jax
import pytest

from benchmarks.common import accelerator_model, ahead_of_time, measure
from muonjax._common.platform_policy import Policy

CASES = [("H100", "balanced"), ("H100", "fast"), ("v5e", "balanced")]


def committed(platform):
    path = measure.RESULTS / f"{platform}_model.json"
    if not path.exists():
        pytest.skip(f"{path.name} is not there yet")
    return json.loads(path.read_text())


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "method"), CASES)
def test_no_default_got_a_tenth_worse(name, method):
    chip = ahead_of_time.CHIPS[name]
    if reason := ahead_of_time.missing(chip.platform):
        pytest.skip(reason)
    content = committed(chip.platform)
    if (counted_with := content["provenance"]["versions"]["jax"]) != jax.__version__:
        pytest.skip(
            f"XLA differs: counted with jax {counted_with}, this is {jax.__version__}"
        )
    key = {"chip": name, "tree": "small", "method": method}
    before = next(
        (row for row in content["results"] if key.items() <= row.items()), None
    )
    if before is None:
        pytest.skip(f"no committed figures of {key}")
    after = accelerator_model.model(chip, "small", method)
    for figure in ("launches", "gigabytes", "temporary_megabytes", "kernels"):
        assert after[figure] <= 1.1 * before.get(figure, after[figure]), figure


@pytest.mark.thorough
def test_more_stacks_of_a_shape_need_no_other_kernels(monkeypatch):
    """What XLA compiles grows with the shapes, not with the leaves: its time is that of the different kernels."""
    if reason := ahead_of_time.missing("gpu"):
        pytest.skip(reason)
    monkeypatch.setattr(Policy, "stack_elements", 96 * 256)  # one matrix in each
    found = []
    for count in (
        4,
        12,
    ):  # XLA fuses what fewer stacks have in common into one kernel less
        monkeypatch.setitem(accelerator_model.TREES, "equal", {"x": ((96, 256), count)})
        found.append(
            accelerator_model.model(ahead_of_time.CHIPS["H100"], "equal", "balanced")
        )
    assert found[1]["launches"] > 2 * found[0]["launches"]
    assert found[1]["kernels"] <= found[0]["kernels"] <= 75


def test_the_figures_of_kernels_and_launches_hold_the_update_to_what_was_reached():
    rows = {(row["tree"], row["method"]): row for row in committed("gpu")["results"]}
    for tree, kernels, launches in (
        ("GPT-2-small", 37, 112),
        ("Llama-8B, 4 layers", 60, 711),
    ):
        for preset in ("fast", "balanced"):
            assert rows[tree, preset]["kernels"] <= kernels
            assert rows[tree, preset]["launches"] <= launches
            assert (
                rows[tree, preset]["product_kinds"]
                <= rows[tree, "Optax, bfloat16"]["product_kinds"]
            )


def test_the_programs_of_a_tree_hold_all_of_its_matrices():
    for tree, matrices in accelerator_model.TREES.items():
        count = sum(count for _, count in matrices.values())
        for platform in ("gpu", "tpu"):
            for method in ("Optax, bfloat16", "balanced"):
                programs = accelerator_model.parts(tree, method, platform)
                assert sum(len(shapes) * times for shapes, times in programs) == count


def test_what_a_machine_lacks_is_said_with_the_way_to_get_it():
    for platform in ("gpu", "tpu"):
        reason = ahead_of_time.missing(platform)
        assert reason is None or "muonjax[" in reason or "nvidia-cuda-nvcc" in reason
