"""The training benchmark: the search for rates, the summary of runs, and a tiny run."""

import json
import math

import pytest

pytest.importorskip("matplotlib")

from flax import nnx

import muonjax
from benchmarks.common import measure
from benchmarks.training import answers as training_answers
from benchmarks.training import book
from benchmarks.training import optimizers as training
from benchmarks.training import tasks as training_tasks


def row(optimizer, rate, seed, loss, task="a"):
    curve = [[1, 2 * loss, 0.1], [2, loss, 0.5]]
    names = {"task": task, "optimizer": optimizer, "learning_rate": rate, "seed": seed}
    return {**names, "held_out": loss, "accuracy": 0.5, "curve": curve}


def test_the_search_ends_at_the_least_loss():
    least = 2**-5

    def loss(rate):
        return abs(math.log2(rate / least))

    losses = {}
    while (rate := book.next_rate(losses, (2**-8,))) is not None:
        assert rate not in losses
        losses[rate] = loss(rate)
    assert min(losses, key=losses.get) == least
    assert {least / 2, least, least * 2} <= set(losses)


def test_the_best_rate_is_the_first_seeds_and_the_mean_is_over_seeds():
    rows = [row("AdamW", 1.0, 0, 0.4), row("AdamW", 2.0, 0, 0.2), row("AdamW", 4.0, 0, 0.3)]
    rows += [row("AdamW", 2.0, 1, 0.4)]
    (best,) = training_answers.summary(rows, [])
    assert (best["learning_rate"], best["bracketed"], best["seeds"]) == (2.0, True, 2)
    assert best["held_out"] == pytest.approx(0.3)
    assert best["spread"] == pytest.approx(0.02**0.5)
    assert best["curve"] == [[1, pytest.approx(0.6)], [2, pytest.approx(0.3)]]


def test_the_answers_follow_from_the_rows():
    rows = [row("AdamW", 1.0, seed, 0.4) for seed in (0, 1)]
    rows += [row("balanced", 4.0, seed, 0.2) for seed in (0, 1)]
    rows += [row("fast", 4.0, 0, 0.3), row("MuonClip", 4.0, 0, 0.1), row("MuonClip", 4.0, 1, 0.25)]
    costs = [{"task": "a", "optimizer": "AdamW", "seconds": 1.0, "ratio": 1.0}]
    costs += [{"task": "a", "optimizer": "balanced", "seconds": 3.0, "ratio": 3.0}]
    answers = training_answers.answers(training_answers.summary(rows, costs))
    found = {(a["question"], a["of"]): a for a in answers}
    assert found["orthogonalization", "balanced"]["gap"]["mean"] == pytest.approx(-0.1)
    gain = found["gain", "balanced"]
    assert gain["gap"]["mean"] == pytest.approx(-0.2)
    # 0.4 is met at step 1 of 2, each three times as long
    assert gain["steps"] == 0.5
    assert gain["time"] == 1.5
    assert found["rate", "balanced"]["factors_of_two"] == 2
    assert found["clip", "MuonClip"]["gap"]["high"] == pytest.approx(0.05)


def test_a_loss_that_comes_back_is_not_reached():
    curve = [[1, 0.5], [2, 0.2], [3, 0.4], [4, 0.3], [5, 0.1]]
    assert training_answers._stays_below_from(curve, 0.35) == 4
    assert training_answers._stays_below_from(curve, 0.05) is None


@pytest.mark.thorough
def test_a_tiny_run_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(training, "step_costs", lambda task, optimizers, rounds: [])
    arguments = ["--tiny", "--steps", "2", "--most", "1", "--picture", str(tmp_path / "training.png")]
    arguments += ["--only", "documentation/(AdamW|MuonClip)"]
    training.main([*arguments, "--seeds", "0"])
    first = json.loads((tmp_path / "training.json").read_text())["runs"]
    assert [(r["optimizer"], r["seed"]) for r in first] == [("AdamW", 0), ("MuonClip", 0)]
    training.main([*arguments, "--seeds", "0", "1"])
    content = json.loads((tmp_path / "training.json").read_text())
    assert content["runs"][:2] == first
    assert [(r["optimizer"], r["seed"]) for r in content["runs"][2:]] == [("AdamW", 1), ("MuonClip", 1)]
    assert {a["question"] for a in content["answers"]} == {"gain"}
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_convolutions_are_matrices():
    model = training_tasks.ConvNet(4, rngs=nnx.Rngs(0))
    numbers = nnx.to_pure_dict(muonjax.dimension_numbers(model))
    table = muonjax.tabulate(nnx.to_pure_dict(nnx.state(model, nnx.Param)), numbers)
    goes = {line.split()[0]: line for line in table.splitlines() if "/" in line}
    assert "9×4" in goes["first/kernel"]
    assert "36×8" in goes["second/kernel"]
    assert "Adam" in goes["head/kernel"]
    assert "Adam" in goes["first/bias"]


def test_a_step_of_every_optimizer_on_digits():
    pytest.importorskip("sklearn")
    task = training_tasks.digits(tiny=True)
    costs = training.step_costs(task, ["AdamW", "Optax's Muon"], rounds=2)
    assert [c["optimizer"] for c in costs] == ["AdamW", "Optax's Muon"]
    assert costs[0]["ratio"] == 1
