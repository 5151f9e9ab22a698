"""TPU chips by generation: what a program can have of them at most. Host only.

Peaks are those of the Cloud TPU documentation, "TPU versions". What of the memory is left to
programs is what the compiler allows. A device is a chip; of tpu7x, which has two cores that JAX
sees as two devices, it is a core, and has half.
"""

from dataclasses import dataclass

from jaxmm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device of a generation."""

    name: str
    memory_bytes: int
    """HBM that programs can use."""
    bandwidth: float
    """HBM, bytes a second."""
    flops: float
    """Matrix units, bfloat16 operations a second."""
    link_bandwidth: float
    """To the other chips of its slice over all links, bytes a second out."""
    dimensions: int
    """Axes of the torus."""


def _gib(value: float) -> int:
    return int(value * 2**30)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            memory_bytes=_gib(15.75),
            bandwidth=819e9,
            flops=197e12,
            link_bandwidth=200e9,
            dimensions=2,
        ),
        Chip(
            name="v5p",
            memory_bytes=_gib(95.74),
            bandwidth=2765e9,
            flops=459e12,
            link_bandwidth=600e9,
            dimensions=3,
        ),
        Chip(
            name="v6e",
            memory_bytes=_gib(31.25),
            bandwidth=1640e9,
            flops=918e12,
            link_bandwidth=400e9,
            dimensions=2,
        ),
        Chip(
            name="tpu7x",
            memory_bytes=_gib(94.75),
            bandwidth=3690e9,
            flops=1153.5e12,
            link_bandwidth=300e9,
            dimensions=3,
        ),
    )
}
"""The generations that the kernels are built for."""


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v5e:4x8`.

    Raises:
        ConfigError: Its generation is not one that the kernels are built for.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ConfigError(
            f"topology {topology!r} is not of the form v5e:4x8, with one of {', '.join(CHIPS)}"
        )
    return CHIPS[name]
