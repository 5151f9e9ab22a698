"""What a body asks of the engine, whatever endpoint it came to. Host only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxmm.host.chat import ChatTokenizer
from jaxmm.request import Request
from serving.answers import Writer

Pictures = Mapping[str, bytes]
"""Encoded bytes by their place in the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What endpoints must know of the model that is served."""

    model: str
    """The name that requests use."""
    tokenizer: ChatTokenizer
    default_max_tokens: int
    low_detail_pixels: int | None
    """Pixels of a picture at `detail: low`; None: every picture has the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A body that has been read and checked; only its pictures are missing."""

    id: str
    """Of the answer; its requests have it, or begin with it."""
    model: str | None
    stream: bool
    urls: Mapping[str, str]
    """Place of each picture, video and frame in the body, to its URL, in the prompt's order."""
    num_items: int
    """Pictures and videos."""
    requests: Callable[[Pictures], tuple[Request, ...]]
    """Builds the engine's requests, at least one."""
    writer: Writer


class Endpoint(Protocol):
    """Reads the bodies of one path."""

    def read(self, body: bytes) -> Ask:
        """Read and check a body.

        Raises:
            RequestError: It cannot be served as it stands; names the field at fault.
        """
        ...
