"""Whether there are other hosts: what settings and surroundings say, without jax. Host only."""

import os
from pathlib import Path

from jaxmm.config import EngineConfig


def is_pod(config: EngineConfig) -> bool:
    """Whether this process is one of several, by its settings or by what the cloud says."""
    if config.num_processes == 1:
        return False
    return bool(config.coordinator) or _on_tpu_hosts()


def _on_tpu_hosts() -> bool:
    """Whether this may be one host of a TPU slice; JAX then finds out about the others."""
    if os.environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu":
        return False
    names = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if names is not None:
        return "," in names
    devices = Path("/dev")
    return any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*"))
