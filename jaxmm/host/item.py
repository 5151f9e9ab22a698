"""One image, or one time step of a video, of a request, and the prompt it stands in. Host only."""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
"""Patches by (time, height, width), before merging."""
Allocate = Callable[[int, int], npt.NDArray[np.uint8]]
"""(N, U) -> uint8[N, U] to fill."""


def new_array(num_patches: int, num_values: int) -> npt.NDArray[np.uint8]:
    """uint8[N, U], to be filled."""
    return np.empty((num_patches, num_values), np.uint8)


class Modality(Enum):
    """What an item is."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class Span(NamedTuple):
    """Half-open interval `[start, stop)` of tokens."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """One item of a request, processed.

    At most one of `features` and `embeddings` is set. Both are None when the media map knew the
    file already: the engine then asks for the features only if the rows are in no cache.
    """

    modality: Modality
    features: npt.NDArray[np.uint8] | None
    """uint8[N, U]: patches in encoder order, columns channel, y, x; not normalised. Of a step of a
    video uint8[N, 2 * U]: its two frames."""
    embeddings: npt.NDArray[np.float32] | None
    """float32[M, D]: finished rows given by the caller."""
    grid_thw: Grid
    num_rows: int
    identity: bytes
    """32 bytes: SHA-256 of content, shape and processor settings."""
    sentinels: tuple[int, int, int, int]
    offsets: tuple[Span, ...] = ()
    """Where the rows stand in the expanded prompt, ascending and disjoint."""
    step: int = 0
    """Which time step of its video; each is an item of its own."""
    time: int | None = None
    """M-RoPE time from the video's first step on; None: it is numbered as a picture is."""
    overview_patches: int = 0
    """Patches of a view of the whole, beside those of the tiles, which `grid_thw` counts."""
    kept: npt.NDArray[np.int32] | None = None
    """int32[kept]: rows that have tokens, of a step of a pruned video; None: all."""
    pruning: bytes = b""
    """32 bytes: the whole video and the rate, of a step of a pruned video."""

    @property
    def continues(self) -> bool:
        """Its positions count from where the first step of its video stands."""
        return self.step > 0 and self.time is not None

    @property
    def mark(self) -> bytes:
        """32 bytes for all that decides its tokens' KV behind an equal prefix: the content, of
        a later step of a video when it is, and of a pruned one what is left of it."""
        mark = mark_of(self.identity, self.step, self.time)
        return mark if self.kept is None else kept_mark(mark, self.kept, self.pruning)

    @property
    def num_tokens(self) -> int:
        """Rows that have tokens."""
        return self.num_rows if self.kept is None else len(self.kept)

    @property
    def num_patches(self) -> int:
        """Patches that the encoder takes."""
        t, h, w = self.grid_thw
        return t * h * w + self.overview_patches


def mark_of(identity: bytes, step: int, time: int | None) -> bytes:
    """See `Item.mark`; of a caller's hash in place of the identity likewise."""
    if step == 0 or time is None:
        return identity
    return hashlib.sha256(b"jaxmm.step.1" + struct.pack("<q", time) + identity).digest()


def kept_mark(name: bytes, kept: npt.NDArray[np.int32], pruning: bytes) -> bytes:
    """32 bytes for what is left of a step: a name of the step, its rows that have tokens, and the
    whole video with its rate, which decides where the text after stands."""
    parts = (name, kept.astype("<i4").tobytes(), pruning)
    lengths = struct.pack("<3q", *map(len, parts))
    return hashlib.sha256(b"jaxmm.kept.1" + lengths + b"".join(parts)).digest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A request's prompt, expanded: every item row has its token, but those that were pruned.

    All arrays have the length T of the expanded prompt.
    """

    ids: npt.NDArray[np.int64]
    """int64[T]: what the device sees; items are runs of the in-vocabulary placeholder id."""
    cache_ids: npt.NDArray[np.int64]
    """int64[T]: `ids` with the items' sentinels in place of placeholders; the prefix cache key."""
    item_index: npt.NDArray[np.int32]
    """int32[T]: index into `items`, -1 for text."""
    row_index: npt.NDArray[np.int32]
    """int32[T]: row of that item, -1 for text."""
    positions: npt.NDArray[np.int32]
    """int32[3, T]: M-RoPE positions (time, height, width)."""
    delta: int
    """M-RoPE position minus token index for every token after the prompt."""
    items: tuple[Item, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.ids.shape[0])
