"""Ways to cut a slice into replicas, ranked by arithmetic alone. Host only."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxmm.device.backend import rests, spread_kv_heads
from jaxmm.errors import ConfigError
from jaxmm.planner.floors import decode_floor, extend_floor, residual_sums, sums_floor
from jaxmm.planner.question import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Replicas of a model, each over some devices of the slice."""

    tensor_parallel: int
    replicas: int
    num_pages: int
    """Of each replica."""
    running: int
    """Requests of the given length that each decodes together."""
    decode_seconds: float
    """At least, of one such step."""
    extend_seconds: float
    """At least, of the largest chunk of a prompt."""
    obstacle: str = ""
    """Why it cannot be; then the figures are 0."""

    @property
    def tokens(self) -> float:
        """Tokens a second that all replicas decode at most."""
        return 0.0 if self.obstacle else self.replicas * self.running / self.decode_seconds


class Splits(tuple[Split, ...]):
    """All splits, best first."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [
            ("tensor_parallel", "replicas", "requests", "decode", "extend", "tokens/s"),
            *map(_row, self),
        ]
        return "\n".join("  ".join(cell.rjust(15) for cell in row).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{self}</pre>"


def suggest(question: Question, length: int = 4096) -> Splits:
    """Rank the splits of a slice by the tokens that it decodes in a second, at most.

    Args:
        question: What `read_question` gave.
        length: Tokens of each request, prompt and output together.
    """
    ranked = sorted(_splits(question, length), key=lambda s: (-s.tokens, s.tensor_parallel))
    return Splits(ranked)


def _splits(question: Question, length: int) -> Iterator[Split]:
    total = len(question.devices)
    for num_chips in (n for n in range(1, total + 1) if total % n == 0):
        if not any(rests(question.model, num_chips, split_encoder=question.split_encoder)):
            yield _split(question, num_chips, length)


def _split(question: Question, num_chips: int, length: int) -> Split:
    chip, itemsize = question.chip, question.itemsize
    model, replicas = spread_kv_heads(question.model, num_chips), len(question.devices) // num_chips
    none = Split(
        tensor_parallel=num_chips,
        replicas=replicas,
        num_pages=0,
        running=0,
        decode_seconds=0.0,
        extend_seconds=0.0,
        obstacle="no room",
    )
    try:
        sizes = question.settle(num_chips)
    except ConfigError:
        return none
    running = min(sizes.max_running, sizes.num_pages // -(-length // sizes.page_size))
    if not running or length > sizes.max_model_len:
        return none
    chunk = sizes.buckets.tokens[-1]
    links = [
        sums_floor(chip, num_chips, *residual_sums(model, tokens, itemsize))
        for tokens in (running, chunk)
    ]
    decode = decode_floor(
        model,
        chip,
        num_chips,
        num_requests=running,
        length=length,
        itemsize=itemsize,
        links=links[0],
    )
    extend = extend_floor(
        model, chip, num_chips, num_tokens=chunk, itemsize=itemsize, links=links[1]
    )
    return Split(
        tensor_parallel=num_chips,
        replicas=replicas,
        num_pages=sizes.num_pages,
        running=running,
        decode_seconds=decode.seconds,
        extend_seconds=extend.seconds,
    )


def _row(split: Split) -> tuple[str, ...]:
    ends = (str(split.tensor_parallel), str(split.replicas))
    if split.obstacle:
        return (*ends, split.obstacle, "", "", "")
    return (
        *ends,
        str(split.running),
        f"{split.decode_seconds * 1e3:.2f} ms",
        f"{split.extend_seconds * 1e3:.1f} ms",
        f"{split.tokens:.0f}",
    )
