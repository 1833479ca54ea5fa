"""The counted model on small matrices: no default launches, moves or keeps a tenth more than the committed figures."""

import json

import jax
import pytest

from benchmarks.common import accelerator_model, ahead_of_time, measure

# The TPU's compiler takes a minute for one program.
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
        pytest.skip(f"XLA differs: counted with jax {counted_with}, this is {jax.__version__}")
    key = {"chip": name, "tree": "small", "method": method}
    before = next((row for row in content["results"] if key.items() <= row.items()), None)
    if before is None:
        pytest.skip(f"no committed figures of {key}")
    after = accelerator_model.model(chip, "small", method, accelerator_model.methods()[method])
    assert after["factorizations"] == 0
    for figure in ("launches", "gigabytes", "temporary_megabytes"):
        assert after[figure] <= 1.1 * before[figure], figure


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
