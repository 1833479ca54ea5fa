"""The pre-training benchmark at its smallest size: data, runs that are cut and go on, the order of what is wanted."""

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import report
from benchmarks.common import ahead_of_time, measure, tables
from benchmarks.training import pretrain, pretrain_results, source_text, trainer
from benchmarks.training.decoder import SIZES
from benchmarks.training.methods import METHODS
from tests.tools.tiers import quick

TINY = SIZES["tiny"]
STEPS = 12  # evaluated at 0, 5, 10 and 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    some = list(itertools.islice(source_text.sources("library"), 150))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_text, "sources", lambda corpus: some)
        source_text.prepare(folder, "library")
    return source_text.Text(folder)


@functools.cache
def made(method):
    return trainer.Trainer(trainer.task_of(TINY, "xla", 1), method)


def run(text, method, checkpoint, left=lambda: math.inf, rate=2e-3):
    """The rows that a run yields, as JSON keeps them."""
    rows = trainer.train(
        made(method), text, trainer.Run(rate, 0, STEPS), checkpoint, left
    )
    return [json.loads(json.dumps(row)) for row in rows]


@quick("muonclip")
@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains(text, method, tmp_path):
    rows = run(
        text, method, tmp_path / "run.npz", rate=2e-2 if method == "muonh" else 4e-3
    )
    assert [row["complete"] for row in rows] == [False, False, False, True]
    curve = rows[-1]["curve"]
    assert curve["step"] == [0, 5, 10, 12]
    assert curve["held_out"][-1] < curve["held_out"][0] - 0.5
    assert min(curve["largest_logit"]) > 0
    assert ("clipped" in rows[-1]) == ("clip" in method)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_cut_goes_on_bit_for_bit(text, tmp_path):
    whole = run(text, "muonclip", tmp_path / "whole.npz")[-1]["curve"]
    times = iter([math.inf, 0.0])
    cut = tmp_path / "cut.npz"
    first = run(text, "muonclip", cut, left=lambda: next(times))
    assert first[-1]["curve"]["step"] == [0, 5, 10]
    kept = cut.read_bytes()
    rest = run(text, "muonclip", cut)
    assert rest[0]["done"] == 10
    for name in ("step", "held_out", "largest_logit"):
        assert rest[-1]["curve"][name] == whole[name]
    cut.write_bytes(
        kept[: len(kept) // 2]
    )  # as a process leaves it that is killed while it writes
    assert run(text, "muonclip", cut)[-1]["curve"]["held_out"] == whole["held_out"]


def test_parts_of_a_batch_give_the_gradients_of_the_whole():
    tokens = trainer.random_tokens(TINY)
    count = np.int32(0)
    task, in_parts = (trainer.task_of(TINY, "xla", parts) for parts in (1, 2))
    params = task.init(0)
    (_, largest), grads = jax.jit(task.gradients, static_argnums=0)(
        "exact", params, tokens, count
    )
    (_, of_parts), means = jax.jit(in_parts.gradients, static_argnums=0)(
        "exact", params, tokens, count
    )
    assert jax.tree.all(
        jax.tree.map(lambda x, y: bool((x == y).all()), largest, of_parts)
    )
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(means), strict=True):
        # Sums of bfloat16 products, in another order.
        assert jnp.linalg.norm(x - y) <= 2e-2 * jnp.linalg.norm(x)


def test_a_batch_is_cut_until_it_fits(monkeypatch):
    def step(self):
        def run(*arguments):
            if self.task.parts < 4:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return 0.0

        return run

    monkeypatch.setattr(trainer.Trainer, "step", property(step))
    monkeypatch.setattr(
        trainer.Task, "without_optimizer", property(lambda self: lambda *arguments: 0.0)
    )
    assert trainer.fitting.__wrapped__(TINY, "xla", "adamw").task.parts == 4


def test_without_cudnn_attention_is_xlas(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not pretrain.cudnn_runs()
    assert "no cuDNN attention: " in capsys.readouterr().out


def test_a_whole_measurement_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        pretrain.main(["--minutes", "9"])
    assert "there is no GPU. --size tiny runs anywhere" in capsys.readouterr().err


@pytest.mark.parametrize("implementation", ["tokenizers", None])
def test_the_text(implementation, tmp_path, monkeypatch):
    """Each content once, its split by its hash, and no path in the record; bytes where there are no tokenizers."""
    if implementation:
        pytest.importorskip(implementation)
    else:
        monkeypatch.setattr(source_text.importlib.util, "find_spec", lambda name: None)
    contents = [f"def f_{i}():\n    return {i}\n" for i in range(200)]
    for i, content in enumerate([*contents, *contents]):
        (tmp_path / f"{i}.py").write_text(content)
    paths = sorted(tmp_path.glob("*.py"))
    monkeypatch.setattr(
        source_text, "sources", lambda corpus: [("p", "1", path) for path in paths]
    )
    record = source_text.prepare(tmp_path / "made", "packages")
    size = sum(map(len, contents))
    assert record["packages"] == [
        {"name": "p", "version": "1", "files": 200, "bytes": size}
    ]
    assert record["train"]["bytes"] + record["held_out"]["bytes"] == size
    assert 0 < record["held_out"]["files"] < 20
    assert str(tmp_path) not in json.dumps(record)
    monkeypatch.setattr(source_text, "sources", None)
    assert source_text.prepare(tmp_path / "made", "packages") == record  # made once


def test_an_epoch_has_every_window_once(tmp_path):
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(41, dtype=np.uint16).tofile(tmp_path / "held_out.bin")
    (tmp_path / "record.json").write_text("{}")
    text = source_text.Text(tmp_path)
    windows = np.concatenate(
        [text.batch(0, step, 4, 10) for step in range(5)]
    )  # two epochs of ten
    assert (np.diff(windows) == 1).all()
    for epoch in (windows[:10], windows[10:]):
        assert sorted(epoch[:, 0]) == list(range(0, 100, 10))
    assert (windows[:10] != windows[10:]).any()
    assert text.held_out_batches(8, 2, 10)[:, :, 0].tolist() == [[0, 10], [20, 30]]


def run_row(method, rate, held_out, **others):
    curve = {
        "step": [0, 10, 20],
        "seconds": [0, 1, 2],
        "held_out": held_out,
        "largest_logit": [1, 3, 2],
    }
    piece = pretrain.Piece("run", "30M", method, "cudnn", rate)._asdict()
    return (
        piece
        | {"device": "d", "steps": 20, "tokens": 7, "complete": True, "curve": curve}
        | others
    )


def next_runs(rows):
    keys = [{name: row[name] for name in pretrain.Piece._fields} for row in rows]
    found = pretrain.pieces(rows, ("30M", "124M"), "cudnn")
    return [
        piece for piece in found if piece.kind == "run" and piece._asdict() not in keys
    ]


def test_the_order_goes_on_from_the_rows():
    first, *_ = pretrain.pieces([], ("30M", "124M"), "cudnn")
    assert first == pretrain.Piece("step", "124M", "adamw", "cudnn")
    assert {piece.size for piece in next_runs([])} == {"30M"}  # no rate is the best yet
    losses = {4e-3: 3.0, 2e-3: 3.2, 8e-3: 2.9}
    rows = [run_row("muon", rate, [9, 5, loss]) for rate, loss in losses.items()]
    assert next_runs(rows)[0] == pretrain.Piece(
        "run", "30M", "muon", "cudnn", 16e-3
    )  # the best was at an end
    rows.append(run_row("muon", 16e-3, [9, 5, None]))  # diverged
    assert next_runs(rows)[0].method == "adamw"
    assert pretrain.Piece("run", "124M", "muon", "cudnn", 8e-3) in next_runs(rows)


def test_the_part_of_adamws_tokens_and_seconds():
    slower = run_row("muon", 4e-3, [9, 4, 3])
    slower["curve"]["seconds"] = [0, 2, 4]
    rows = [
        run_row("adamw", 2e-3, [9, 5, 3.75]),
        run_row("adamw", 4e-3, [9, 5, 3.8]),
        slower,
    ]
    lines = {line["method"]: line for line in pretrain_results.summary(rows)}
    assert lines["adamw"]["rate"] == 2e-3
    assert lines["adamw"]["losses"] == {"0.002": 3.75, "0.004": 3.8}
    # A quarter of the way from the loss 4 to 3: after 12.5 steps of 20, and after 2.5 seconds of AdamW's 2.
    assert lines["muon"]["part_of_step"] == 0.625
    assert lines["muon"]["part_of_seconds"] == 1.25


def test_the_json_keeps_what_others_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "provenance", lambda: {"device": "d", "commit": "c"})
    whole, part = (
        run_row("muon", 4e-3, [9, 5, loss], complete=loss == 3) for loss in (3, 4)
    )
    other = run_row("muon", 4e-3, [9, 5, 2], device="another")
    content = {"provenance": {}, "data": {"hash": {}}, "rows": [other, whole]}
    (tmp_path / "pretrain.json").write_text(json.dumps(content))
    results = pretrain.Results(tmp_path / "out", "d")
    piece = pretrain.Piece("run", "30M", "muon", "cudnn", 4e-3)
    results.add(
        piece, {name: part[name] for name in ("complete", "curve", "steps", "tokens")}
    )
    results.add(
        piece._replace(rate=8e-3), {"complete": False, "error": "out of memory"}
    )
    again = pretrain.Results(tmp_path / "out", "d")
    assert again.rows == [whole]
    assert [row["device"] for row in again.content["rows"]] == ["another", "d", "d"]
    assert again.content["data"] == {"hash": {}}


@pytest.mark.thorough
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "MOST_RATES", 3)
    pretrain.main(["--size", "tiny", "--minutes", "2", "--work", str(tmp_path)])
    content = json.loads((tmp_path / "pretrain.json").read_text())
    assert not [row for row in content["rows"] if "error" in row]
    assert {(line["method"], line["fraction"]) for line in content["best"]} == {
        ("adamw", 1),
        ("muon", 1),
        ("muon", 0.5),
    }
    for row in content["rows"]:
        row["size"] = "124M"  # as if
    template = report.find_templates()["pretrain"]
    assert "| tiny, muon | " in tables.fill(template, content)
    assert "| adamw, visible softmax | " in tables.fill(template, content)
    pretrain_results.draw(content["rows"], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_the_step_compiles_for_a_gpu(monkeypatch):
    """With cuDNN's attention and the bound that its log-sum-exp gives."""
    if reason := ahead_of_time.missing("gpu"):
        pytest.skip(reason)
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_000
    )
    on_gpu = trainer.Trainer(trainer.task_of(TINY, "cudnn", 1), "muonclip")
    arguments = (
        jax.eval_shape(on_gpu.init, 0),
        on_gpu.task.tokens,
        *trainer.numbers(0, 1, 0),
    )
    compiled = ahead_of_time.compile_for(
        ahead_of_time.CHIPS["H100"], on_gpu._step, *arguments
    )
    assert "__cudnn$fmhaSoftmaxBackward" in compiled.as_text()
