"""What one update launches, moves and takes on a TPU v5e, v5p or v6e, modeled: compiled and counted without a TPU.

    python -m benchmarks.tpu.model [--chips v5e] [--trees GPT-2-small] [--methods balanced fast] [--again]

Needs `pip install "muonjax[tpu]"`; writes benchmarks/results/tpu_model.json.
"""

from benchmarks.common import accelerator_model

if __name__ == "__main__":
    accelerator_model.main("tpu", __doc__ or "")
