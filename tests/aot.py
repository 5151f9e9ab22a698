"""Compiles for TPU generations with libtpu on a machine that has no TPU. No TPU is opened.

`prepare()` must run before anything loads libtpu; importing this module does it.
"""

import functools
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
from jax.experimental.layout import Format, Layout  # noqa: E402
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
    out_specs: Sequence[Any] | None = None,
    donate: Sequence[int] = (),
) -> Any:
    """Compile a function for the chips of a mesh.

    Args:
        args: Pytrees of `jax.ShapeDtypeStruct`.
        specs: A PartitionSpec for each argument; None: all replicated.
        out_specs: The same for each array that comes back.
        donate: Arguments whose memory the results may take.

    Returns:
        A `jax.stages.Compiled`, which cannot be run here.
    """
    specs = specs or [PartitionSpec()] * len(args)
    placed = [
        jax.tree.map(functools.partial(_place, mesh, spec), arg)
        for arg, spec in zip(args, specs, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells Pallas the generation
        leaves, tree = jax.tree.flatten(jax.eval_shape(function, *placed))
        out_specs = out_specs or [PartitionSpec()] * len(leaves)
        formats = [_format(mesh, spec, x) for x, spec in zip(leaves, out_specs, strict=True)]
        jitted = jax.jit(
            function, donate_argnums=tuple(donate), out_shardings=tree.unflatten(formats)
        )
        return jitted.lower(*placed).compile()


def _place(mesh: Mesh, spec: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_format(mesh, spec, leaf))


def _format(mesh: Mesh, spec: PartitionSpec, leaf: Any) -> Format:
    """Last axis along the lanes, as other operations hand arrays over; XLA may turn heads of 80."""
    return Format(Layout(tuple(range(leaf.ndim))), NamedSharding(mesh, spec))


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


def chip_of(mesh: Mesh) -> dict[str, float]:
    """Peak figures of one core: bf16 flops and HBM bytes a second, clock in Hz.

    The clock is what the peak implies: a unit of 128 columns takes a row a cycle, one of 256 two.
    """
    from jax._src.pallas.mosaic import tpu_info

    kind = mesh.devices.flat[0].device_kind
    version = tpu_info.chip_version_from_device_kind(kind)
    assert version is not None, f"{kind} is not a TPU that JAX knows"
    info = tpu_info._get_tpu_info_impl(version, 2 if version.supports_megacore else 1)
    rows = 1 if info.mxu_column_size == 128 else 2
    per_cycle = 2 * info.num_mxus * info.mxu_column_size**2 * rows
    return {
        "flops": float(info.bf16_ops_per_second),
        "bandwidth": float(info.mem_bw_bytes_per_second),
        "clock": info.bf16_ops_per_second / per_cycle,
    }
