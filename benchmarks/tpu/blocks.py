"""Result blocks of the TPUs."""

from benchmarks.common.model_blocks import block

# Compilation is not compared: of Optax's loops, one for each parameter, only one of each shape was compiled.
BLOCKS = {"tpu_model": block(chips=True, compile_time=False)}
