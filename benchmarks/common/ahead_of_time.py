"""Compile for a GPU or a TPU on a machine that has neither, as far as the wheels that are installed allow."""

import contextlib
import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

# ptxas and nvlink of NVIDIA's wheels, behind those that are on the path already.
if spec := importlib.util.find_spec("nvidia"):
    wheels = [
        os.path.join(folder, "cu13", "bin")
        for folder in spec.submodule_search_locations or ()
    ]
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", ""), *filter(os.path.isdir, wheels)]
    )

# Read by the plugins when they are loaded: no GPU's driver, and no server that describes a TPU, is asked for. Several
# processes may load a TPU's library at once, as two test workers do.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

# From NVIDIA's H100 datasheet and the CUDA programming guide's table for compute capability 9.0.
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  device_memory_size: 85899345920 memory_bandwidth: 3350000000000
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""

NO_DEVICE = "no device: compiled ahead of time, counted and modeled"


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is compiled for.

    Attributes:
      name: Of the chip, as the tables say it.
      platform: "gpu" or "tpu", as `jax.default_backend()` would say it there.
      kind: As `jax.Device.device_kind` would say it there.
      topology: For `topologies.get_topology_desc`: a TPU's name for one chip, or a GPU's description.
      cores: Streaming multiprocessors of a GPU; 1 for a TPU, whose cores run one program together.
      options: For XLA.
    """

    name: str
    platform: str
    kind: str
    topology: str
    cores: int = 1
    options: tuple[tuple[str, Any], ...] = ()


# Without a device XLA can't time Triton's products against cuBLAS's: cuBLAS it is, which most large ones get.
_CUBLAS = (("xla_gpu_enable_triton_gemm", False),)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("H100", "gpu", "NVIDIA H100 80GB HBM3", H100, 132, _CUBLAS),
        Chip("v5e", "tpu", "TPU v5 lite", "v5e:1x1"),
        Chip("v5p", "tpu", "TPU v5", "v5p:1x1x1"),
        Chip("v6e", "tpu", "TPU v6 lite", "v6e:1x1"),
    )
}


def missing(platform: str) -> str | None:
    """What has to be installed before this machine can compile for "gpu" or "tpu"; None if nothing."""
    if platform == "tpu":
        has_libtpu = importlib.util.find_spec("libtpu")
        return None if has_libtpu else 'libtpu is missing; pip install "muonjax[tpu]"'
    if not importlib.util.find_spec("jax_cuda13_plugin"):
        return 'the CUDA 13 plugin is missing; pip install "muonjax[cuda13]" on Python 3.12'
    if not shutil.which("ptxas"):
        return "ptxas is not on the path; it comes with nvidia-cuda-nvcc"
    return None


def devices(chip: Chip, count: int = 1) -> list[Any]:
    """Descriptions of `count` devices of one kind; nothing can run on them."""
    if chip.platform == "gpu":
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=chip.topology, topology=f"1x1x{count}"
        )
    elif count == 1:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=chip.topology, chips_per_host_bounds=[1, 1, 1]
        )
    else:
        raise ValueError(
            f"devices(count={count}): describe several TPUs by their topology."
        )
    return topology.devices


@contextlib.contextmanager
def traced_for(chip: Chip) -> Iterator[None]:
    """Trace as a process would whose default device is `chip`."""
    device = AbstractDevice(
        device_kind=chip.kind, platform=chip.platform, num_cores=chip.cores
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def compile_for(
    chip: Chip, f: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Compile f for one device.

    Args:
      chip: One of `CHIPS`.
      f: Traceable.
      arguments: Trees of shapes or arrays; those without a sharding are on the device.
      options: For `jax.jit`.
    """
    here = on_device(chip)

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None) or here
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with traced_for(chip):
        lowered = jax.jit(f, **options).lower(*jax.tree.map(placed, arguments))
        return lowered.compile(compiler_options=dict(chip.options))


def on_device(chip: Chip) -> NamedSharding:
    """The sharding of whole arrays on one device."""
    return NamedSharding(
        Mesh(np.array(devices(chip)[:1]), ("device",)), PartitionSpec()
    )


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes that lie where the shardings say."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
