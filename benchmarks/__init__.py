"""Benchmarks, run as python -m benchmarks.optimizer.muon_step; each writes JSON into results/."""

import pathlib
import sys

sys.path.append(
    str(pathlib.Path(__file__).parents[1] / "examples")
)  # the benchmarks run the examples
