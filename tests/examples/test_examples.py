"""Run the examples at a tiny size."""

import csv
import functools
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import read_run

from tests.examples.programs import EXAMPLES, refusal, run

TRAIN = "train_transformer.py"
TINY = [
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "2",
    "--sample",
    "0",
]
TINY += ["--steps", "12", "--checkpoint-every", "4", "--eval-every", "6", "--quiet"]
# Below the first logits, so that QK-Clip acts.
TINY += ["--optimizer", "muonclip", "--threshold", "0.001"]


refused = functools.partial(refusal, "train_transformer")


def state(out):
    """A hash of the parameters and of the optimizer's state at the end of a run."""
    return read_run(out / "checkpoints")["digest"]


def contents(folder):
    """A hash of every file's name and bytes below `folder`."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path.relative_to(folder)).encode())
        total.update(path.read_bytes() if path.is_file() else b"")
    return total.hexdigest()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run with its progress bar: the folder, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    return out, run(TRAIN, *(flag for flag in TINY if flag != "--quiet"), "--out", out)


@pytest.mark.thorough
def test_a_run_leaves_metrics_and_a_picture(finished):
    out, output = finished
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row["held_out"]] == ["6", "12"]
    assert all(float(row["logit/blocks/0/attention"]) for row in rows)
    assert (out / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert "Muon: " in output
    assert "read from the loss; the clip watches 1 attention" in output
    assert "held-out loss" in output
    assert all(float(row["learning_rate"]) > 0 for row in rows)


@pytest.mark.thorough
def test_the_monitors_statistics_are_logged(finished):
    out, _ = finished
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    ratios = {int(row["step"]): row["monitor/muon/update_to_weight"] for row in rows}
    assert [step for step, ratio in ratios.items() if ratio] == [1, 11]
    assert 0 < float(ratios[11]) < 1
    assert float(rows[0]["monitor/adam/update_rms"]) > 0


@pytest.mark.thorough
def test_the_clip_is_counted_and_the_bar_shows_no_value_that_is_not_there(finished):
    out, output = finished
    with (out / "metrics.csv").open() as file:
        counts = [float(row["qk_clip/num_clipped"]) for row in csv.DictReader(file)]
    assert counts[0] == 2  # later some logits are negative, which the clip leaves alone
    assert len(counts) == 12
    bars = re.findall(r"/12 \[.*loss.*\]", output)
    assert "held out" not in bars[0]
    assert re.search(r"held out \d", bars[-1])
    assert f"clipped {counts[-1]:.0f}" in bars[-1]
    assert "nan" not in output


@pytest.mark.nightly
def test_the_comparison_ends_with_losses_rates_and_a_picture(tmp_path):
    output = run(TRAIN, *TINY[: TINY.index("--optimizer")], "--out", tmp_path)
    assert re.search(
        r"12 steps.*: \d.\d+ with muonclip \(rate 0.008\), \d.\d+ with adamw \(rate 0.002\)",
        output,
    )
    assert re.search(r"takes \d.\d\d times as long", output)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_killed_twice_and_resumed_ends_in_the_same_bits(finished, tmp_path):
    """A kill in the first checkpoint leaves a temporary folder: --resume refuses it, and --out may start again."""
    whole, _ = finished
    out = tmp_path / "killed"
    (out / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    assert "holds no complete checkpoint" in refused(*TINY, "--resume", out)
    command = [sys.executable, str(EXAMPLES / TRAIN), *TINY, "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and not any(
        p.name.isdigit() for p in (out / "checkpoints").glob("*")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = run(TRAIN, *TINY, "--resume", out)
    assert "Resuming" in resumed
    assert state(out) == state(whole)
    with (out / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 13))


def damage(folder, kind):
    newest = max((folder / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    if kind == "foreign":
        shutil.rmtree(newest)
        newest.mkdir()
        (newest / "weights.bin").write_bytes(b"not ours")
        return
    files = [
        p
        for p in newest.rglob("*")
        if p.is_file() and p.stat().st_size > 500 and "metadata" not in p.name.lower()
    ]
    largest = max(files, key=lambda p: p.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["truncated", "foreign"])
def test_a_damaged_checkpoint_is_refused_and_left_alone(finished, tmp_path, kind):
    out = tmp_path / kind
    shutil.copytree(finished[0], out)
    damage(out, kind)
    before = contents(out)
    message = refused(*TINY, "--resume", out)
    assert "--resume: the checkpoint" in message
    assert "damaged" in message
    assert contents(out) == before


@pytest.mark.thorough
def test_another_run_and_no_run_are_refused(finished, tmp_path):
    before = contents(finished[0])
    assert "width: 16 there, 8 here" in refused(
        *TINY, "--width", "8", "--resume", finished[0]
    )
    assert "holds no complete checkpoint" in refused(*TINY, "--resume", tmp_path)
    assert "holds a run already" in refused(*TINY, "--out", finished[0])
    assert contents(finished[0]) == before


@pytest.mark.thorough
def test_bad_flags():
    assert "--steps must be at least 1" in refused("--steps", "0")
    assert "multiple of --heads" in refused("--width", "10", "--heads", "3")


@pytest.mark.thorough
def test_linen_twin():
    tiny = ["--steps", "3", "--layers", "2", "--width", "16", "--heads", "2"]
    tiny += ["--context", "16", "--batch", "2"]
    output = run("train_transformer_linen.py", *tiny)
    assert "step 3: loss" in output
    assert "Muon" in output


@pytest.mark.thorough
def test_latent_attention_with_and_without_the_clip(tmp_path):
    """At a threshold below the first logits the clip must act from the second step on."""
    tiny = [
        "--steps",
        6,
        "--layers",
        1,
        "--width",
        16,
        "--heads",
        2,
        "--context",
        16,
        "--batch",
        2,
    ]
    output = run("mla_qk_clip.py", *tiny, "--threshold", 0.5, "--out", tmp_path)
    last = {
        name: float(at)
        for name, at in re.findall(r"(Muon|MuonClip) +step 6: .*logit ([\d.]+)", output)
    }
    assert last["MuonClip"] < last["Muon"]
    assert (tmp_path / "mla_qk_clip.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_latent_attention_diverges_without_the_clip_and_trains_with_it(tmp_path):
    """At the size that the page shows."""
    output = run("mla_qk_clip.py", "--out", tmp_path)
    lines = re.findall(
        r"(Muon|MuonClip): last loss ([\d.]+), largest logit ([\d.]+)", output
    )
    (_, loss, largest), (_, clipped_loss, clipped_largest) = lines
    assert float(largest) > 100 * 30
    assert float(clipped_largest) < 2.5 * 30
    assert float(clipped_loss) < float(loss) - 0.3


@pytest.mark.thorough
def test_loha_adapters_on_a_finished_run(finished, tmp_path):
    flags = [
        "--steps",
        "3",
        "--batch",
        "2",
        "--rank",
        "2",
        "--quiet",
        "--out",
        tmp_path / "loha",
    ]
    output = run("loha_finetune.py", "--start", finished[0], *flags)
    before, muon, adamw = re.findall(r"held-out loss ([\d.]+)", output)
    assert muon != before != adamw
    assert "trainable parameters" in output
    missing = refusal("loha_finetune", "--start", tmp_path, *flags)
    assert "holds no checkpoint; first: python examples/train_transformer.py" in missing


def test_loha_adapters_start_from_what_the_example_leaves():
    """`python examples/train_transformer.py` compares two optimizers, each in its own folder."""
    import loha_finetune
    import train_transformer

    started = train_transformer.parse([])
    assert started.optimizer is None
    assert loha_finetune.parse([]).start == started.out / "muonclip"
