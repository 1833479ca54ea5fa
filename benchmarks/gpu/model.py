"""What one update launches, moves and takes on an H100, modeled: compiled and counted without a GPU.

    python -m benchmarks.gpu.model [--trees GPT-2-small] [--methods balanced fast] [--again]

Needs `pip install "muonjax[cuda13]"` on Python 3.12; writes benchmarks/results/gpu_model.json.
"""

from benchmarks.common import accelerator_model

if __name__ == "__main__":
    accelerator_model.main("gpu", __doc__ or "")
