"""Compiles for TPU generations with libtpu on a machine that has no TPU. No TPU is opened.

`prepare()` must run before anything loads libtpu; importing this module does it.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # These three only silence warnings; any topology can still be described.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402  after the environment
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

ONE_CHIP = ("v5e:1x1", "v6e:1x1", "v5p:1x1x1", "tpu7x:1x1x1")
"""The generations that kernels are built for, by the smallest topology of each."""


def mesh_of(topology: str, axes: dict[str, int] | None = None) -> Mesh:
    """Mesh over the first devices of a described topology such as `v5e:2x2` or `v5p:2x2x1`.

    Args:
        topology: Generation and chips along each axis.
        axes: Mesh axis to size; None: one device.
    """
    chips = tuple(int(n) for n in topology.partition(":")[2].split("x"))
    options = {"chips_per_host_bounds": (*chips, 1)[:3]} if math.prod(chips) < 4 else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    axes = axes or {"x": 1}
    devices = described.devices[: math.prod(axes.values())]
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    specs: Sequence[Any] | None = None,
    donate: Sequence[int] = (),
) -> Any:
    """Compile a function for the chips of a mesh.

    Args:
        args: Pytrees of `jax.ShapeDtypeStruct`.
        specs: A PartitionSpec for each argument; None: all replicated.
        donate: Arguments whose memory the results may take.

    Returns:
        A `jax.stages.Compiled`, which cannot be run here.
    """
    placed = [
        jax.tree.map(
            lambda leaf, spec=spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            arg,
        )
        for arg, spec in zip(args, specs or [PartitionSpec()] * len(args), strict=True)
    ]
    jitted = jax.jit(function, donate_argnums=tuple(donate))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells Pallas the generation
        return jitted.lower(*placed).compile()


def copied_bytes(hlo: str, at_least: int = 1 << 20) -> int:
    """Bytes of the copies and transposes in a compiled module that move a large array."""
    total = 0
    for kind, dims in re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:copy|transpose|copy-start)\(", hlo):
        size = math.prod(map(int, dims.split(","))) * max(1, int(re.sub(r"\D", "", kind) or 8) // 8)
        total += size if size >= at_least else 0
    return total


def collectives(hlo: str) -> dict[str, int]:
    """How often each kind of collective stands in a compiled module."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\(", hlo)
    return {kind: found.count(kind) for kind in sorted(set(found))}
