"""The comparison of variants and the sweeps over widths and depths: which rates they try, and what they conclude."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks.common import measure
from benchmarks.training import book, ema_nesterov, fine_tuning, int8_momentum, small_runs, transfer, variants
from benchmarks.training.small_models import Model


def variant_row(variant, rate, seed, loss):
    return {"layout": "MHA", "variant": variant, "seed": seed, "learning_rate": rate, "held_out": loss}


def test_the_rate_between_is_on_the_better_side():
    assert variants.towards_the_better({1.0: 3.0, 2.0: 1.0, 4.0: 2.0}) == pytest.approx(8**0.5)
    assert variants.towards_the_better({1.0: 2.0, 2.0: 1.0, 4.0: 3.0}) == pytest.approx(2**0.5)
    # a rate between that has run already does not count as a neighbour
    assert variants.towards_the_better({1.0: 3.0, 2.0: 1.0, 8**0.5: 0.9, 4.0: 2.0}) == pytest.approx(8**0.5)


def test_ratios_are_taken_seed_by_seed_at_the_first_seeds_best_rate():
    runs = [variant_row("muon", rate, 0, loss) for rate, loss in ((1.0, 4.0), (2.0, 2.0))]
    runs += [
        variant_row("muon", 2.0, 1, 1.0),
        variant_row("NorMuon", 4.0, 0, 1.0),
        variant_row("NorMuon", 4.0, 1, 1.0),
    ]
    muon, normuon = variants.table(runs)
    assert (muon["learning_rate"], muon["held_out"], muon["ratio"]) == (2.0, 1.5, 1.0)
    assert (normuon["ratio"], normuon["ratio_low"], normuon["ratio_high"]) == (0.75, 0.5, 1.0)


def test_a_sweep_has_four_rates_and_ends_between_two_worse_ones():
    losses = {}
    while (rate := book.next_rate(losses, (8.0,), least=transfer.LEAST)) is not None:
        losses[rate] = abs(np.log2(rate) - 1)
    assert min(losses, key=losses.get) == 2.0
    assert len(losses) >= 4
    assert {1.0, 2.0, 4.0} <= losses.keys()


def test_the_best_rate_is_the_parabolas():
    assert transfer.vertex({1.0: 3.0, 2.0: 1.0, 4.0: 3.0, 8.0: 9.0}) == pytest.approx(2.0)
    quadratic = {rate: (np.log2(rate) - 1.3) ** 2 for rate in (1.0, 2.0, 4.0, 8.0)}
    assert transfer.vertex(quadratic) == pytest.approx(2**1.3)


def test_how_far_best_rates_are_apart():
    rows = [
        (width, layers, best * factor, 1 + abs(np.log2(factor)))
        for width, layers, best in ((64, 2, 4.0), (128, 2, 2.0), (64, 4, 8.0))
        for factor in (0.5, 1.0, 2.0, 4.0)
    ]
    rows.append((256, 2, 64.0, 0.0))  # not complete: left out
    runs = [
        {"rule": "rms", "width": w, "layers": d, "learning_rate": rate, "held_out": loss}
        for w, d, rate, loss in rows
    ]
    (row,) = transfer.summary(runs)
    assert [entry["learning_rate"] for entry in row["width"]] == [4.0, 2.0]
    assert (row["width_factor"], row["layers_factor"]) == (2.0, 2.0)


@pytest.mark.parametrize("layout", ["MHA", "GQA", "MLA", "fused"])
def test_a_position_sees_only_those_before_it(layout):
    model = Model(layout, layers=1, width=32, head_size=8, context=8)
    params = jax.eval_shape(model.init, 0)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: np.float32(0.3) * rng.standard_normal(p.shape, np.float32), params)
    tokens = rng.integers(0, 256, (2, 8))
    other = tokens.copy()
    other[:, 5] = (other[:, 5] + 1) % 256
    a, b = (np.asarray(model.apply(params, t)[0]) for t in (tokens, other))
    np.testing.assert_allclose(a[:, :5], b[:, :5], rtol=1e-4, atol=1e-4)
    assert (np.abs(a[:, 5:] - b[:, 5:]).max(-1) > 1e-3).all()


def test_differences_to_float32_are_taken_seed_by_seed():
    rows = [("float32", 0, 2.0), ("float32", 1, 3.0), ("int8", 0, 2.1), ("int8", 1, 2.9)]
    runs = [{"text": "a", "momentum": m, "seed": s, "held_out": loss} for m, s, loss in rows]
    _, int8 = int8_momentum.table(runs)
    found = int8["difference"], int8["difference_low"], int8["difference_high"]
    assert found == pytest.approx((0.0, -0.1, 0.1))


def test_forgetting_is_compared_where_the_same_is_gained():
    runs = [
        {"method": optimizer, "share": 0, "seed": seed, "source": 3.0, "documentation": 2.0}
        for optimizer in ("AdamW", "Muon")
        for seed in (0, 1)
    ]
    for method, gains in (("AdamW", (0.1, 0.5)), ("Muon", (0.2, 1.0))):
        for share, gain in zip((0.1, 1.0), gains, strict=True):
            for seed in (0, 1):
                losses = {"source": 3.0 - gain + 0.1 * (seed - 0.5), "documentation": 2.0 + gain**2}
                runs.append({"method": method, "share": share, "seed": seed, **losses})
    rows = fine_tuning.summary(runs)
    assert [row["gained"] for row in rows] == pytest.approx([0.1, 0.5, 0.2, 1.0])
    assert [row["forgotten"] for row in rows] == pytest.approx([0.01, 0.25, 0.04, 1.0])
    assert [row["gained_spread"] for row in rows] == pytest.approx(4 * [0.05])
    adamw, muon = fine_tuning.at_equal_gain(rows)  # 0.9 of AdamW's 0.5
    assert (adamw["goal"], adamw["forgotten"]) == pytest.approx((0.45, 0.01 + 0.24 * 0.35 / 0.4))
    assert muon["forgotten"] == pytest.approx(0.04 + 0.96 * 0.25 / 0.8)


def test_the_formats_of_eight_bits_begin_with_ours():
    x = jax.random.normal(jax.random.key(0), (4, 256))
    ours, theirs = (jax.jit(int8_momentum.ROUNDINGS["int8"])(x), jax.jit(int8_momentum._in_eight_bits)(x))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.thorough
def test_tiny_fine_tuning_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(fine_tuning, "best_rates", lambda: (0.01, 0.004))
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    names = ("AdamW", "LoRA by Muon")
    monkeypatch.setattr(fine_tuning, "METHODS", {name: fine_tuning.METHODS[name] for name in names})
    sizes = "--batch 2 --head-size 8 --context 8 --width 16 --layers 1 --seeds 0 --first-steps 2 --steps 2"
    fine_tuning.main(sizes.split())
    first = json.loads((tmp_path / "fine_tuning.json").read_text())
    assert len(first["runs"]) == 2 + 2 * 4
    assert {row["method"] for row in first["methods"]} == set(names)
    monkeypatch.setattr(fine_tuning.Tuner, "run", None)  # nothing is trained again
    fine_tuning.main(sizes.split())
    assert json.loads((tmp_path / "fine_tuning.json").read_text())["runs"] == first["runs"]


@pytest.mark.thorough
def test_tiny_runs_of_dtypes_and_wrappers(tmp_path, monkeypatch):
    monkeypatch.setattr(int8_momentum, "best_rates", lambda: (0.01, 0.004))
    monkeypatch.setattr(ema_nesterov, "best_rates", lambda: (0.01, 0.004))
    monkeypatch.setattr(int8_momentum, "rounding_errors", list)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    for module in (int8_momentum, ema_nesterov):
        monkeypatch.setattr(module, "TEXTS", ("documentation",))
    sizes = [
        "--batch",
        "2",
        "--head-size",
        "8",
        "--context",
        "8",
        "--width",
        "16",
        "--layers",
        "1",
        "--seeds",
        "0",
    ]
    int8_momentum.main([*sizes, "--steps", "2"])
    recipes = ["Muon", "EMA-Nesterov, beta 0.6, decay 0.95"]
    ema_nesterov.main([*sizes, "--steps", "8", "--recipes", *recipes])
    found = json.loads((tmp_path / "int8_momentum.json").read_text())["dtypes"]
    assert [row["momentum"] for row in found] == ["float32", "bfloat16", "int8"]
    muon, wrapped = json.loads((tmp_path / "ema_nesterov.json").read_text())["recipes"]
    assert muon["held_out"] != wrapped["held_out"]


@pytest.mark.nightly
def test_tiny_sweeps_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(transfer, "IMAGES", tmp_path)
    monkeypatch.setattr(variants, "PLAN", [("MLA", "muon"), ("MLA", "per head")])
    sizes = ["--steps", "2", "--batch", "2", "--head-size", "8", "--context", "8"]
    variants.main([*sizes, "--width", "16", "--layers", "1", "--seeds", "0", "1"])
    found = json.loads((tmp_path / "variants.json").read_text())
    assert [row["variant"] for row in found["variants"]] == ["muon", "per head"]
    sweep = [*sizes, "--widths", "16", "32", "--depths", "1", "--rules", "rms"]
    transfer.main(sweep)
    first = json.loads((tmp_path / "transfer.json").read_text())
    assert len(first["checks"]) == 2 * len(transfer.CHECKED)
    monkeypatch.setattr(small_runs.Trainer, "run", None)  # nothing is trained again
    monkeypatch.setattr(transfer, "coordinate_check", lambda *_: [])
    monkeypatch.setattr(transfer, "spectral_share", lambda *_: {})
    transfer.main(sweep)
    assert json.loads((tmp_path / "transfer.json").read_text())["runs"] == first["runs"]
