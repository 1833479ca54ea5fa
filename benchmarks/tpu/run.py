"""Time whole updates on a TPU, beside the modeled figures; at most ten minutes.

    python -m benchmarks.tpu.run [--out benchmarks/results] [--dry-run]

Writes `tpu_<device>.json` after each result. `--dry-run` runs the same code anywhere, on small matrices.
"""

from benchmarks.common import accelerator_run

if __name__ == "__main__":
    accelerator_run.main("tpu", [], __doc__ or "")
