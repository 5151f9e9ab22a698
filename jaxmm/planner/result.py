"""A plan: numbers, and the table that shows them. Host only."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxmm.planner.floors import Floor
from jaxmm.sizes import Sizes

_SIDE_BY_SIDE = 8  # steps that warm-up compiles at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one chip."""

    chip_bytes: int
    """What programs can use of it."""
    text_weights: int = 0
    vision_weights: int = 0
    kv: int = 0
    arena: int = 0
    state: int = 0
    """Of sampling: counts of each running request's tokens, and token masks."""
    layout: int = 0
    """What the compiler adds to arrays so that they fill tiles, and each step's small inputs."""
    temporaries: int = 0
    """Of the step that needs most."""

    @property
    def used(self) -> int:
        """Most bytes at any time."""
        held = self.text_weights + self.vision_weights + self.kv + self.arena + self.state
        return held + self.layout + self.temporaries

    @property
    def free(self) -> int:
        """What is left; negative: what is missing."""
        return self.chip_bytes - self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the whole model."""

    name: str
    temporary_bytes: int
    collectives: Mapping[str, int]
    """Count of each kind; sampling's few hundred bytes are left out."""
    collective_bytes: int
    floor: Floor
    """The least time that it can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests of one length."""

    length: int
    """Tokens of prompt and output."""
    pages: int
    """Of each."""
    fit: int
    """How many the pages hold at once; 0: the length is above `max_model_len`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Encoding one picture alone."""

    width: int
    height: int
    tokens: int
    lane: int
    """Patches of its bucket."""
    floor: Floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What serving a model on a slice takes; `print` it, or show it in a notebook."""

    model: str
    topology: str
    num_devices: int
    tensor_parallel: int
    """Devices of one replica."""
    sizes: Sizes | None
    """What the engine would settle on; None where there is no room for it."""
    memory: Memory
    steps: tuple[Step, ...] = ()
    """Decode, extend, encode."""
    decoded: int = 0
    """Requests in the decode step."""
    requests: tuple[Requests, ...] = ()
    pictures: tuple[Picture, ...] = ()
    max_pixels: int = 0
    """Larger pictures are made smaller; 0: the model has no such limit."""
    compile_seconds: float = 0.0
    """Processor time of all compiles of a first start."""
    layers: tuple[int, int, int] = (0, 0, 0)
    """Of the decoder: in the two compiles, and of the model."""
    vision_layers: tuple[int, int, int] = (0, 0, 0)
    obstacle: str = field(default="", repr=False)
    """Why nothing was compiled."""

    @property
    def fits(self) -> bool:
        """Whether a chip holds all of it."""
        return self.sizes is not None and self.memory.free >= 0

    @property
    def replicas(self) -> int:
        """How many of these the slice has room for."""
        return self.num_devices // self.tensor_parallel

    @property
    def decode_tokens(self) -> float:
        """Tokens a second that all replicas decode at most."""
        return self.replicas * self.decoded / self.steps[0].floor.seconds if self.steps else 0.0

    @property
    def highest_fraction(self) -> float:
        """`memory_fraction` up to which everything fits, in hundredths."""
        memory = self.memory
        beside = memory.state + memory.layout + memory.temporaries
        return int(100 * (1 - beside / memory.chip_bytes)) / 100

    def __str__(self) -> str:
        return "\n\n".join(_as_text(*table) for table in self._tables())

    def _repr_html_(self) -> str:
        """For notebooks."""
        return "".join(_as_html(*table) for table in self._tables())

    def _tables(self) -> "Iterator[_Table]":
        yield self._summary(), []
        yield "memory of a chip, GiB", self._memory_rows()
        if self.sizes is None:
            return
        yield (
            "steps",
            [
                ("", "at least", "bound by", "temporaries", "collectives"),
                *(_step_row(step) for step in self.steps),
            ],
        )
        yield (
            f"room in {self.sizes.num_pages} pages of {self.sizes.page_size} tokens",
            [
                ("tokens of a request", "pages", "requests"),
                *(
                    (str(r.length), str(r.pages), str(r.fit) if r.fit else "above max_model_len")
                    for r in self.requests
                ),
            ],
        )
        yield (
            "pictures, each alone" + self._picture_limit(),
            [
                ("", "tokens", "lane", "at least"),
                *(
                    (f"{p.width}x{p.height}", str(p.tokens), str(p.lane), _ms(p.floor.seconds))
                    for p in self.pictures
                ),
            ],
        )
        yield self._warm_up(), []

    def _summary(self) -> str:
        split = f"{self.replicas} of tensor_parallel={self.tensor_parallel}"
        name = f"{self.model} on {self.topology}, {split}: "
        size = _gib(abs(self.memory.free))
        if self.obstacle:
            return f"{name}does not fit. {self.obstacle}"
        if not self.fits:
            return f"{name}does not fit, {size} GiB a chip are missing; {self._remedy()}."
        return (
            f"{name}fits, {size} GiB a chip are free; memory_fraction up to "
            f"{self.highest_fraction} would fit. At most {self.decode_tokens:.0f} tokens/s decoded."
        )

    def _remedy(self) -> str:
        """What to change so that it fits."""
        most = max(self.steps, key=lambda step: step.temporary_bytes)
        memory = self.memory
        held = memory.text_weights + memory.vision_weights + memory.arena
        if self.highest_fraction * memory.chip_bytes > held:
            return f"memory_fraction={self.highest_fraction} does, with fewer pages"
        what = "media.max_pixels" if most is self.steps[-1] else "buckets.max_step_tokens"
        return f"to {most.name} takes {_gib(most.temporary_bytes)}: lower {what}"

    def _memory_rows(self) -> list[tuple[str, ...]]:
        memory = self.memory
        rows = [("text weights", memory.text_weights), ("encoder weights", memory.vision_weights)]
        if self.sizes is not None:
            rows += [
                ("KV pages", memory.kv),
                ("arena", memory.arena),
                ("sampling state", memory.state),
                ("filling of tiles", memory.layout),
                ("temporaries", memory.temporaries),
                ("together", memory.used),
            ]
        rows.append(("a chip has", memory.chip_bytes))
        return [(name, _gib(size)) for name, size in rows]

    def _picture_limit(self) -> str:
        limit = self.max_pixels
        return f"; above {limit} pixels they are made smaller" if limit else ""

    def _warm_up(self) -> str:
        assert self.sizes is not None, "tables ended before"
        return (
            f"{self.sizes.buckets.num_executables} executables; a first start compiles for about "
            f"{self.compile_seconds:.0f} s of this machine's processor time, "
            f"{_SIDE_BY_SIDE} at a time, later ones read them back.\n"
            f"Compiled with {_depths(self.layers)} layers of the decoder and "
            f"{_depths(self.vision_layers)} of the encoder; figures are extended along a line. "
            "Times are floors of memory, matrix units and links: real ones are longer."
        )


_Table = tuple[str, list[tuple[str, ...]]]


def _depths(layers: tuple[int, int, int]) -> str:
    return f"{layers[0]} and {layers[1]} of {layers[2]}"


def _step_row(step: Step) -> tuple[str, ...]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in step.collectives.items())
    talk = f"{kinds} ({step.collective_bytes / 2**20:.1f} MiB)" if kinds else "none"
    floor = step.floor
    return step.name, _ms(floor.seconds), floor.bound, f"{_gib(step.temporary_bytes)} GiB", talk


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _as_text(title: str, rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return title
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])


def _as_html(title: str, rows: list[tuple[str, ...]]) -> str:
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<p>{html.escape(title)}</p>" + (f"<table>{body}</table>" if body else "")
