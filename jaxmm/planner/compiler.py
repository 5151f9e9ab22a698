"""The TPU compiler, on a machine without a TPU: what it says of a step. Host only.

libtpu compiles for chips that it is told of (`jax.experimental.topologies`); none is opened, and
what comes out cannot be run here.
"""

import math
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxmm.device.executables import Key
from jaxmm.device.lowering import Lowering
from jaxmm.errors import ConfigError
from jaxmm.planner.chips import chip_of

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # These three only silence warnings; any topology can still be described.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """What the compiler says of one step on one chip."""

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    hlo: str
    cpu_seconds: float
    """Of all threads of this process, tracing included."""

    @property
    def peak_bytes(self) -> int:
        """Most memory of a chip that the step takes, its arguments included."""
        results = self.output_bytes - self.aliased_bytes
        return self.argument_bytes + results + self.temporary_bytes

    def collectives(self) -> list[tuple[str, int]]:
        """Kind and bytes of each collective between chips, sampling left out.

        Sampling passes maxima and sums of rows around, a few hundred bytes each.
        """
        lines = [line for line in self.hlo.splitlines() if "/sample/" not in line]
        return [
            (match[2], _result_bytes(match[1], pair=match[3] is not None))
            for match in map(_COLLECTIVE.search, lines)
            if match
        ]

    @property
    def num_collectives(self) -> Counter[str]:
        """How many of each kind."""
        return Counter(kind for kind, _ in self.collectives())

    @property
    def collective_bytes(self) -> int:
        """Bytes of the arrays that they put together."""
        return sum(size for _, size in self.collectives())


def _result_bytes(text: str, *, pair: bool) -> int:
    """Bytes of a result; one that is only started names what goes in before what comes out."""
    sizes = [
        int(re.sub(r"\D", "", kind)) // 8 * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in _ARRAY.findall(text)
    ]
    return sizes[-1] if pair else sum(sizes)


def describe_devices(topology: str) -> list[Any]:
    """The devices of a topology such as `v5e:4x8`; of tpu7x two a chip.

    Raises:
        ConfigError: libtpu is not installed, or knows no such topology.
    """
    chip_of(topology)
    if find_spec("libtpu") is None:
        raise ConfigError(
            "planning needs the TPU compiler, which comes for Linux on x86-64: "
            "pip install 'jax[tpu]'"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read when libtpu is loaded, by the next call
    shape = topology.partition(":")[2]
    if not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise ConfigError(f"topology {topology!r} is not of the form v5e:4x8 or v5p:2x2x4")
    chips = tuple(map(int, shape.split("x")))
    small = math.prod(chips) < 4  # below what one host of the described kind has
    options = {"chips_per_host_bounds": (*chips, 1)[:3]} if small else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as e:
        raise ConfigError(f"libtpu knows no topology {topology!r}: {e}") from e
    return list(described.devices)


def mesh_of(devices: list[Any], axes: dict[str, int]) -> Mesh:
    """A mesh over the first of some described devices."""
    used = devices[: math.prod(axes.values())]
    return Mesh(np.array(used).reshape(tuple(axes.values())), tuple(axes))


def compile_step(steps: Lowering, mesh: Mesh, key: Key) -> CompiledStep:
    """Compile a step, such as `("language", 2048)`, of a lowering for the chips of a mesh.

    Raises:
        ConfigError: libtpu is not that of this jax.
    """
    start = time.process_time()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells Pallas the generation
        compiled = steps.all_steps()[key]().compile()
    memory: Any = compiled.memory_analysis()
    return CompiledStep(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        hlo=_hlo(compiled),
        cpu_seconds=time.process_time() - start,
    )


def _hlo(compiled: jax.stages.Compiled) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as e:
        raise ConfigError(
            f"libtpu {version('libtpu')} writes what jaxlib {version('jaxlib')} cannot read ({e}); "
            "install the one that belongs to it: pip install 'jax[tpu]'"
        ) from e


def chip_bytes(tree: Any) -> int:
    """Bytes of one chip's part of arrays that are described with their sharding."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
