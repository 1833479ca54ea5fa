"""The runs on a GPU and on a TPU: what they conclude from a report, and dry runs of all of their code."""

import json
import subprocess
import sys

import pytest

from benchmarks.common.roofline import ROOFLINES
from benchmarks.gpu.contradictions import contradictions
from tests.tools.tiers import nightly, thorough


def took(milliseconds, **more):
    return {"host": {"median_ms": milliseconds}, **more}


def report(**sections):
    return {"sections": {name: {"results": rows} for name, rows in sections.items()}}


def test_constants_that_a_measurement_contradicts():
    # 8192³ at four fifths of the lower share of the peak; a copy at 85 % of the bandwidth, as assumed; 2 µs a launch.
    optimistic, pessimistic = ROOFLINES["H100"]
    share = 0.8 * pessimistic.efficiency["bf16"]
    product = {"what": "efficiency", "kind": "bf16", "flops": 2 * 8192**3}
    rows = [
        {**product, "times": {"product": took(1e3 * 2 * 8192**3 / (share * 990e12))}},
        {"what": "memory", "bytes": 2e9, "times": {"copy": took(1e3 * 2e9 / (0.85 * 3.35e12))}},
        {"what": "launch", "launches": 100, "times": {"chain": took(0.2)}},
        {"what": "efficiency", "kind": "f16", "error": "no such type"},
    ]
    first, second = contradictions(report(constants=rows))
    low, high = pessimistic.efficiency["bf16"], optimistic.efficiency["bf16"]
    assert f"efficiency of bf16 products is {low:.3g} to {high:.3g}, measured {share:.3g}." in first
    assert "seconds per launch is 3e-06 to 4.92e-06, measured 2e-06." in second


def test_an_order_of_methods_that_a_measurement_contradicts():
    times = {
        "balanced": took(12.0, ahead_of_time_ms=[5.0, 7.0]),
        "fast": took(4.5, ahead_of_time_ms=[4.9, 6.9]),  # modelled as equal: no order to contradict
        "Optax, bfloat16": took(10.0, ahead_of_time_ms=[10.0, 15.0]),
        "not modelled": took(1.0),
    }
    (sentence,) = contradictions(report(step=[{"tree": "GPT-2-small", "times": times}]))
    assert (
        "GPT-2-small: the model has 'balanced' before 'Optax, bfloat16', measured the other way (10 and 12 ms)"
        in (sentence)
    )


def test_a_kernel_that_should_have_been_chosen():
    times = {"plain": took(1.0), "hopper": took(0.6), "blocked": took(1.0), "reference": took(1.05)}
    row = {"shape": [4096, 4096], "dtype": "bfloat16", "times": times}
    (sentence,) = contradictions(report(product=[row]))
    assert "(4096, 4096): 'hopper' takes 0.6 ms" in sentence
    row["times"]["hopper"] = {"host_error": "refused"}
    assert contradictions(report(product=[row])) == []


@pytest.mark.parametrize("sections", [thorough("public,constants,product"), nightly("check,step")])
def test_the_dry_run(sections, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--dry-run", "--out", str(tmp_path)]
    run = subprocess.run([*command, "--only", sections], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    written = json.loads((tmp_path / "gpu_dry_run.json").read_text())
    for name, section in written["sections"].items():
        assert section["ended"] == "exit status 0", (name, section)
        assert not [row for row in section["results"] if "error" in row], name
    assert "contradictions" in written
    assert "contradicted by the measurement" in run.stdout
    assert set(written["sections"]) == {"device", *sections.split(",")}
    if "public" in sections:
        (shape,) = written["sections"]["public"]["results"]
        assert {"standard", "fast", "balanced"} <= shape["times"].keys()
        assert shape["public_ms"]["H100, torch-compile"] == 0.3397  # of 2 x 1024 x 2560


@pytest.mark.thorough
def test_the_tpu_s_dry_run(tmp_path):
    command = [sys.executable, "-m", "benchmarks.tpu.run", "--dry-run", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "tpu_dry_run.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"check", "product", "step"}
    assert not [row for row in rows if "error" in row["result"]]
    assert all(row["result"]["ok"] for row in rows if row["section"] == "check")
