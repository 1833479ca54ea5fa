"""Pre-train a decoder with AdamW, Optax's Muon and ours, on the Python sources that are installed here.

    python -m benchmarks.training.pretrain --minutes 9                  # on a GPU; what is most wanted first
    python -m benchmarks.training.pretrain --size tiny --minutes 1      # anywhere: shows that all of it runs
    python -m benchmarks.training.pretrain --draw                       # the picture, from the JSON

Each call does what comes next in `ORDER` and is not in the JSON yet, writes after each evaluation and stops in time. A
run that is cut goes on from its checkpoint in the working folder, or starts again where that folder is lost.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")
# The tokenizer's threads leave cores for the compiler.
os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))

import jax
import jax.numpy as jnp

from benchmarks.common import measure
from benchmarks.training import source_text, trainer
from benchmarks.training.decoder import SIZES, attention
from benchmarks.training.methods import METHODS
from benchmarks.training.pretrain_results import (
    Piece,
    Results,
    Row,
    draw,
    losses,
    piece_of,
)

ROOT = measure.RESULTS.parents[1]
# What is most wanted comes first. "step" times a step; "rates" is a run at each of three rates, and at more until the
# best has worse ones on both sides; "best" is a run at the best rate of the smaller model; "half" has half the steps.
ORDER = (
    ("step", "124M", ("adamw", "muon", "optax.contrib.muon", "muonclip")),
    ("step", "30M", ("adamw",)),
    ("rates", "30M", ("muon", "adamw")),
    ("best", "124M", ("adamw", "muon")),
    ("half", "124M", ("muon",)),
    ("best", "124M", ("muonclip",)),
    ("step", "124M", ("muonclip, exact", "muon, fast", "muonh")),
    ("rates", "30M", ("optax.contrib.muon", "muonclip", "muonh", "muon, fast")),
    ("best", "124M", ("optax.contrib.muon", "muonh", "muon, fast")),
    ("second seed", "124M", ("adamw", "muon")),
    ("step, visible softmax", "124M", ("muon", "muonclip")),
    ("step", "tiny", ("adamw",)),
    ("rates", "tiny", ("muon", "adamw")),
    ("half", "tiny", ("muon",)),
)
RATES = dict.fromkeys(METHODS, (4e-3, 2e-3, 8e-3))
RATES |= {"adamw": (2e-3, 1e-3, 4e-3), "muonh": (2e-2, 1e-2, 4e-2)}
MOST_RATES = 5
TO_IMPORT = 8  # seconds before `main` begins, at most


class Budget(NamedTuple):
    """Seconds for a size.

    Attributes:
      to_begin: Until a step is compiled and the first loss is there, at a guess.
      step: To time a step, at a guess.
      run: Of AdamW's runs, which gives all runs their number of steps.
      tuned_at: The size at which its rates are compared.
    """

    to_begin: float
    step: float
    run: float
    tuned_at: str


BUDGETS = {
    "tiny": Budget(10, 3, 0.3, tuned_at="tiny"),
    "30M": Budget(45, 10, 60, tuned_at="30M"),
    "124M": Budget(60, 30, 150, tuned_at="30M"),
}


def rates(rows: list[Row], size: str, method: str) -> tuple[float, ...]:
    """The rates to run: the usual three, then the next one beyond the best where that is at an end."""
    by_rate = losses(rows, size, method)
    usual = RATES[method]
    if not by_rate.keys() >= set(usual) or len(by_rate) >= MOST_RATES:
        return usual
    beyond = {min(by_rate): min(by_rate) / 2, max(by_rate): max(by_rate) * 2}
    best = min(by_rate, key=by_rate.__getitem__)
    return (*by_rate, beyond[best]) if best in beyond else tuple(by_rate)


def pieces(rows: list[Row], sizes: tuple[str, ...], fastest: str) -> Iterator[Piece]:
    """All of `ORDER` for these sizes, as far as the rows tell the best rates."""
    for what, size, methods in ORDER:
        for method in methods if size in sizes else ():
            run = Piece("run", size, method, fastest)
            if what == "step":
                yield run._replace(kind="step")
            elif what == "step, visible softmax":
                yield run._replace(kind="step", attention="xla")
            elif what == "rates":
                for rate in rates(rows, size, method):
                    yield run._replace(rate=rate)
            elif by_rate := losses(rows, BUDGETS[size].tuned_at, method):
                run = run._replace(rate=min(by_rate, key=by_rate.__getitem__))
                if what == "half":
                    run = run._replace(fraction=0.5)
                if what == "second seed":
                    run = run._replace(seed=1)
                yield run


def expected(piece: Piece) -> float:
    """Seconds, at a guess."""
    budget = BUDGETS[piece.size]
    if piece.kind == "step":
        return budget.to_begin + budget.step
    return budget.to_begin + 1.2 * piece.fraction * budget.run


class Session:
    """One call: the time that it has, the data, and the programs that are compiled."""

    def __init__(self, args: argparse.Namespace, left: Callable[[], float]):
        self.args = args
        self.left = left
        self.fastest = "cudnn" if cudnn_runs() else "xla"
        self.results = Results(args.out, measure.provenance()["device"])
        self.failed: set[Piece] = set()
        self.texts = args.work / ("library" if args.size == "tiny" else "packages")
        # The tokens are made in a process of their own, while steps are timed on random ones.
        module = "benchmarks.training.source_text"
        command = [sys.executable, "-m", module, str(self.texts), self.texts.name]
        self.preparing = subprocess.Popen(command, cwd=ROOT)

    def next(self) -> Piece | None:
        """The first piece that fits into the time; if none does, the first run of which a part can be kept."""
        rows = self.results.rows
        over = self.failed | {piece_of(row) for row in rows}
        every = pieces(rows, self.args.sizes, self.fastest)
        wanted = [piece for piece in every if piece not in over]
        if self.preparing.poll() is None:
            # Steps are timed while the tokens are made.
            wanted.sort(key=lambda piece: piece.kind == "run")
        for piece in wanted:
            if expected(piece) < self.left():
                return piece
        for piece in wanted:
            budget = BUDGETS[piece.size]
            # The first checkpoint comes after an evaluation, and takes a while to write.
            to_keep = budget.to_begin + 2 * budget.run / trainer.EVALUATIONS
            if piece.kind == "run" and to_keep < self.left():
                return piece
        return None

    def whole_steps(self, size: str) -> int:
        """The steps of a whole run: the same for all methods, so that all see the same tokens."""
        results = self.results
        rows = results.content["rows"]
        for row in measure.matching(rows, device=results.device, size=size):
            if "whole_steps" in row:
                return row["whole_steps"]
        timed = measure.matching(results.rows, kind="step", size=size, method="adamw")
        unit = 2 * trainer.EVALUATIONS
        return max(1, int(BUDGETS[size].run / timed[0]["seconds"]) // unit) * unit

    def do(self, piece: Piece) -> bool:
        """Measure a piece; False if the time is up."""
        print(f"{self.left():.0f} s left:", *piece, flush=True)
        chosen = trainer.fitting(SIZES[piece.size], piece.attention, piece.method)
        common = {"parts": chosen.task.parts, "statistic": chosen.statistic}
        if piece.kind == "step":
            timed = trainer.time_step(chosen)
            self.results.add(piece, common | timed | {"complete": True})
            return True
        self.preparing.wait(max(1.0, self.left()))
        text = source_text.Text(self.texts)
        self.results.content["data"][text.record["hash"]] = text.record
        whole_steps = self.whole_steps(piece.size)
        common["whole_steps"] = whole_steps
        run = trainer.Run(piece.rate, piece.seed, int(piece.fraction * whole_steps))
        path = self.args.work / f"{'_'.join(map(str, piece))}.npz"
        for row in trainer.train(chosen, text, run, path, self.left):
            self.results.add(piece, common | row)
        return row["complete"]

    def run(self) -> None:
        while piece := self.next():
            try:
                if not self.do(piece):
                    return
            except Exception as error:  # the others are still worth knowing
                traceback.print_exc()
                self.failed.add(piece)
                self.results.add(piece, {"complete": False} | measure.failure(error))


def cudnn_runs() -> bool:
    """Whether cuDNN's attention, its log-sum-exp and its derivative run here."""
    if jax.default_backend() != "gpu":
        return False
    attend = attention("cudnn", "bound")

    def total(x: jax.Array) -> jax.Array:
        grouped = x[:, :, :2]
        y, _ = attend(x, grouped, grouped)
        return y.astype(jnp.float32).sum()

    try:
        jax.block_until_ready(jax.grad(total)(jnp.ones((1, 128, 4, 64), jnp.bfloat16)))
    except Exception as error:
        print("no cuDNN attention:", measure.failure(error)["error"])
        return False
    return True


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9, help="this process takes no longer")
    add("--size", choices=SIZES, help="None: 124M and 30M")
    add("--out", type=pathlib.Path, default=measure.RESULTS)
    runs = ROOT / "runs" / "pretrain"
    add("--work", type=pathlib.Path, default=runs, help="tokens and checkpoints")
    add("--draw", action="store_true", help="draw the picture, and measure nothing")
    args = parser.parse_args(argv)
    args.sizes = (args.size,) if args.size else ("124M", "30M")
    if args.size == "tiny":
        args.out = args.work
    elif not args.draw and jax.default_backend() != "gpu":
        parser.error("there is no GPU. --size tiny runs anywhere.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.draw:
        device = measure.read("pretrain", args.out)["provenance"]["device"]
        draw(Results(args.out, device).rows, measure.IMAGES / "pretrain.png")
        return
    end = time.monotonic() + 60 * args.minutes - TO_IMPORT
    if args.size == "tiny":  # nobody wants its times
        jax.config.update("jax_disable_most_optimizations", True)
    # Nothing else stops a compiler.
    watch = threading.Timer(end - time.monotonic(), os._exit, [3])
    watch.daemon = True
    watch.start()
    session = Session(args, lambda: end - 3 - time.monotonic())
    try:
        session.run()
    finally:
        watch.cancel()
        session.preparing.terminate()
        session.preparing.wait()


if __name__ == "__main__":
    main()
