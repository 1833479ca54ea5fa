"""Time the GPU kernels and whole updates on an H100 or H200, beside the modeled figures.

    python -m benchmarks.gpu.run [--sections step queue] [--out benchmarks/results] [--dry-run]

In this order, unless sections are named: whole updates ("step") by four to six steps, with and without the kernel, by
Optax in both types and by ours of bfloat16 gradients; the kernel with an addend in a long queue; stacks of 32 and 64
Mi; polar errors ("accuracy") and hostile matrices; the time to compile; many shapes; single products.

Writes `gpu_<device>.json` after each result, in at most ten minutes, and keeps what it does not measure again.
`XLA_FLAGS=--xla_gpu_enable_triton_gemm=false` makes rows of their own. `--dry-run` runs the same code anywhere, on
small matrices and with "blocked" in the kernels' place. Whether the kernels are right is for their tests, which take
the GPU where there is one: `pytest tests/pallas_kernels`.
"""

from benchmarks.common import accelerator_run

if __name__ == "__main__":
    accelerator_run.main("gpu", ["hopper"], __doc__ or "")
