"""Log metrics to a CSV file, and to stand-ins of the packages that are no dependency; draw a list of metrics."""

import contextlib
import math
import types

import plots
import pytest

from tests.examples.programs import EXAMPLES

ROWS = [
    {
        "loss": 2.0 / count,
        "count": float(count),
        "qk_clip/largest/model": 3.0 * count,
        "qk_clip/num_clipped": count - 1.0,
    }
    for count in (1, 2, 3)
]


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "recipes"))
    import log_metrics

    return log_metrics


@pytest.fixture
def calls(monkeypatch):
    """What TensorBoard and Weights & Biases are asked to log, as (step, name, value)."""
    recorded = []

    @contextlib.contextmanager
    def opened(*_, **settings):
        assert settings.get("mode", "offline") == "offline"
        yield types.SimpleNamespace(
            add_scalar=lambda name, value, step: recorded.append((step, name, value)),
            log=lambda row, step: recorded.extend(
                (step, *item) for item in row.items()
            ),
        )
        recorded.append("closed")

    for module, name in (("tensorboardX", "SummaryWriter"), ("wandb", "init")):
        stand_in = types.SimpleNamespace(**{name: opened})
        monkeypatch.setitem(__import__("sys").modules, module, stand_in)
    return recorded


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_each_metric_of_each_step_is_logged(name, recipe, calls, tmp_path):
    with recipe.LOGS[name](tmp_path) as log:
        for row in ROWS:
            log(row)
    metrics = [(int(row["count"]), *item) for row in ROWS for item in row.items()]
    assert calls == [*metrics, "closed"]


def test_a_csv_file_has_a_row_for_each_step_at_once(recipe, tmp_path):
    with recipe.to_csv(tmp_path) as log:
        for count, row in enumerate(ROWS, start=1):
            log(row)
            assert plots.read(tmp_path / "metrics.csv") == ROWS[:count]


@pytest.mark.thorough
def test_both_rates_and_the_clip_are_logged(recipe):
    logged = []
    assert recipe.train(logged.append, steps=4) == logged
    for t, row in enumerate(logged):
        assert row["count"] == t + 1
        muon, adam = 1e-2 * (1 + math.cos(math.pi * t / 4)), 1e-2 - 9e-3 * t / 4
        assert row["learning_rate"] == pytest.approx(muon, rel=1e-5)
        assert row["adam_learning_rate"] == pytest.approx(adam, rel=1e-5)
    assert logged[0]["qk_clip/num_clipped"] == 4
    assert logged[-1]["qk_clip/largest"] < 2.5 < logged[0]["qk_clip/largest"]
    assert logged[-1]["loss"] < 0.9 * logged[0]["loss"]


def test_a_picture_of_ones_own_run():
    """The rows of `metrics` alone draw the loss, the logits of each layer, and the clipped heads."""
    loss, logits, sizes, clips = plots.plot({"mine": ROWS}, threshold=4.0).axes
    (line,) = loss.lines
    assert [*line.get_xdata()] == [1, 2, 3]
    assert [*line.get_ydata()] == [2.0, 1.0, 2 / 3]
    assert [*logits.lines[0].get_ydata()] == [3.0, 6.0, 9.0]
    assert [text.get_text() for text in clips.get_legend().texts] == ["mine: 3 in all"]
    assert not [x for line in sizes.lines for x in line.get_ydata()]  # no monitor
