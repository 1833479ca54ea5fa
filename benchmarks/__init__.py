"""Benchmarks, run as python -m benchmarks.optimizer.muon_step; each writes JSON into results/."""

import pathlib
import sys

# The benchmarks run the examples.
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))
