"""TPU slices by name, `v5e:4x8`: chips, hosts, machines, and what the clouds call them. Host only.

The facts are those of the Cloud TPU and GKE documentation, "TPU versions" and "Plan TPUs in GKE".
"""

import math
import re
from dataclasses import dataclass

from jaxmm.errors import ConfigError

_HOST_CHIPS = 4  # of every machine that is one of several
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What all slices of a TPU generation have in common."""

    name: str
    gke_accelerator: str
    """Value of the node label `cloud.google.com/gke-tpu-accelerator`."""
    machine: str
    """GKE machine type, with `{chips}` for those of one machine."""
    slice_prefix: str
    """Accelerator type of Cloud TPU, before the number."""
    counts_cores: bool
    """That number counts cores, two a chip, instead of chips."""
    dimensions: int
    """Axes of a topology: 2 for a torus in the plane, 3 in space."""


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation(
            name="v4",
            gke_accelerator="tpu-v4-podslice",
            machine="ct4p-hightpu-{chips}t",
            slice_prefix="v4",
            counts_cores=True,
            dimensions=3,
        ),
        Generation(
            name="v5e",
            gke_accelerator="tpu-v5-lite-podslice",
            machine="ct5lp-hightpu-{chips}t",
            slice_prefix="v5litepod",
            counts_cores=False,
            dimensions=2,
        ),
        Generation(
            name="v5p",
            gke_accelerator="tpu-v5p-slice",
            machine="ct5p-hightpu-{chips}t",
            slice_prefix="v5p",
            counts_cores=True,
            dimensions=3,
        ),
        Generation(
            name="v6e",
            gke_accelerator="tpu-v6e-slice",
            machine="ct6e-standard-{chips}t",
            slice_prefix="v6e",
            counts_cores=False,
            dimensions=2,
        ),
        Generation(
            name="tpu7x",
            gke_accelerator="tpu7x",
            machine="tpu7x-standard-{chips}t",
            slice_prefix="tpu7x",
            counts_cores=True,
            dimensions=3,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice: a generation and how its chips are wired."""

    generation: Generation
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.generation.name}:{self.wiring}"

    @property
    def wiring(self) -> str:
        """The shape as GKE writes it, `4x8`."""
        return "x".join(map(str, self.shape))

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def chips_per_host(self) -> int:
        """The plane has machines of one, four and eight chips; a slice of several has fours."""
        if self.generation.dimensions == 2 and self.num_chips <= 8:
            return self.num_chips
        return _HOST_CHIPS

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host

    @property
    def machine_type(self) -> str:
        """Of the GKE node pool."""
        return self.generation.machine.format(chips=self.chips_per_host)

    @property
    def accelerator_type(self) -> str:
        """Of Cloud TPU."""
        number = self.num_chips * (2 if self.generation.counts_cores else 1)
        return f"{self.generation.slice_prefix}-{number}"


def parse_topology(text: str) -> Topology:
    """Read `GENERATION:SHAPE`.

    Raises:
        ConfigError: No such generation, or it has no slice of that shape.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", text)
    if match is None:
        raise ConfigError(f"topology {text!r} is not of the form v5e:4x8")
    generation = GENERATIONS.get(match[1])
    if generation is None:
        raise ConfigError(
            f"topology {text!r}: no TPU generation {match[1]!r}; there are {', '.join(GENERATIONS)}"
        )
    shape = tuple(map(int, match[2].split("x")))
    if not _exists(generation, shape):
        raise ConfigError(f"topology {text!r} is no slice; {_shapes(generation)}")
    return Topology(generation, shape)


def _exists(generation: Generation, shape: tuple[int, ...]) -> bool:
    if generation.dimensions == 2:
        return shape in _FLAT
    if shape in _SMALL_CUBES:
        return True
    ascending = shape == tuple(sorted(shape))
    return len(shape) == 3 and ascending and all(n and n % 4 == 0 for n in shape)


def _shapes(generation: Generation) -> str:
    if generation.dimensions == 2:
        return f"{generation.name} has {', '.join('x'.join(map(str, s)) for s in _FLAT)}"
    small = ", ".join("x".join(map(str, s)) for s in _SMALL_CUBES)
    return f"{generation.name} has {small}, and multiples of 4 in ascending order such as 4x4x8"
