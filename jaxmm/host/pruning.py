"""EVS: which rows of a video keep their tokens, and the prompt without the others
(arXiv:2510.14624). Host only.

A row is kept for how much it differs from the row in the same place one time step earlier. How many
are kept follows from the video's size and the rate, so a request is refused or admitted before
anything is encoded; which ones, from what the encoder gave. Steps are encoded whole and each for
itself, so that one encoding serves every rate.

Pruning takes tokens away and moves none: every token that is left, the text after the video
included, has the M-RoPE position that it has in the prompt that is not pruned.
"""

import dataclasses
import hashlib
import numbers
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.errors import RequestError
from jaxmm.host.identity import sentinels_for
from jaxmm.host.item import Item, Modality, Prompt, Span, kept_mark

Rows = npt.NDArray[np.int32]
"""int32[kept], ascending: rows of one time step that have tokens."""

_FIRST_STEP = 255.0
"""Score of every row of the first step, above any other: it is kept whole."""
_MAX_KNOWN = 4096


class Pruning(NamedTuple):
    """What is left of one video."""

    kept: tuple[Rows, ...]
    """For each time step; a step may keep nothing."""
    digest: bytes
    """`pruning_digest` of the video and the rate."""


def check_rate(rate: Any) -> float:
    """A rate as requests give it.

    Raises:
        RequestError: No number in [0, 1).
    """
    is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    if not (is_number and 0.0 <= rate < 1.0):  # false for NaN
        raise RequestError(
            f"video_pruning_rate={rate!r} is not a number in [0, 1), the share of a video's "
            "tokens that is dropped",
            "video_pruning_rate",
        )
    return float(rate)


def num_kept(num_steps: int, step_rows: int, rate: float) -> int:
    """Rows that a video keeps: the first step's at least; every order of operations is vLLM's."""
    return max(step_rows, int(num_steps * step_rows * (1.0 - rate)))


def choose_rows(change_TM: npt.NDArray[np.float32], rate: float) -> tuple[Rows, ...]:
    """The rows that changed most.

    Args:
        change_TM: For each step and row 1 minus the cosine similarity with the step before; of the
            first step not read.
        rate: Share that is dropped.

    Returns:
        For each step the rows that are kept. Of equal rows the earlier is kept.
    """
    num_steps, step_rows = change_TM.shape
    scores = np.array(change_TM, np.float32)
    scores[0] = _FIRST_STEP
    order = np.argsort(-scores, axis=None, kind="stable")
    is_kept = np.zeros(scores.size, bool)
    is_kept[order[: num_kept(num_steps, step_rows, rate)]] = True
    return tuple(np.flatnonzero(row).astype(np.int32) for row in is_kept.reshape(scores.shape))


def expected_rows(num_steps: int, step_rows: int, rate: float) -> tuple[Rows, ...]:
    """As many rows as will be kept, the first ones: for what must be known before encoding."""
    count = num_kept(num_steps, step_rows, rate)
    return tuple(
        np.arange(min(max(count - step * step_rows, 0), step_rows), dtype=np.int32)
        for step in range(num_steps)
    )


def pruning_digest(steps: Sequence[Item], rate: float) -> bytes:
    """32 bytes: all steps of a video, and the rate."""
    head = struct.pack("<dq", rate, len(steps))
    return hashlib.sha256(
        b"jaxmm.pruning.1" + head + b"".join(item.mark for item in steps)
    ).digest()


def clips_of(items: Sequence[Item]) -> Iterator[range]:
    """The items of each video, in order."""
    for index, item in enumerate(items):
        if item.modality is Modality.VIDEO and item.step == 0:
            yield clip_of(items, index)


def clip_of(items: Sequence[Item], index: int) -> range:
    """The items of the video that one is a step of; of an image, itself."""
    if items[index].modality is not Modality.VIDEO:
        return range(index, index + 1)
    start = index - items[index].step
    stop = index + 1
    while stop < len(items) and items[stop].modality is Modality.VIDEO and items[stop].step:
        stop += 1
    return range(start, stop)


def prune(prompt: Prompt, prunings: Mapping[int, Pruning]) -> Prompt:
    """Take the tokens of rows that are not kept out of an expanded prompt.

    Args:
        prompt: Of which each step of a video has one span.
        prunings: By the index of each video's first item.
    """
    if not prunings:
        return prompt
    stays = np.ones(prompt.num_tokens, bool)
    items = list(prompt.items)
    for first, pruning in prunings.items():
        for index, rows in enumerate(pruning.kept, start=first):
            ((start, stop),) = items[index].offsets
            stays[start:stop] = False
            stays[start + rows] = True
            items[index] = _kept_only(items[index], rows, pruning.digest)
    before = np.concatenate([[0], np.cumsum(stays)]).tolist()
    cache_ids = prompt.cache_ids[stays]
    for index, item in enumerate(items):
        spans = (Span(before[start], before[stop]) for start, stop in item.offsets)
        offsets = tuple(span for span in spans if span)
        items[index] = dataclasses.replace(item, offsets=offsets)
        if item.kept is not None:
            for start, stop in offsets:
                cache_ids[start:stop] = np.resize(np.array(item.sentinels), stop - start)
    return Prompt(
        ids=prompt.ids[stays],
        cache_ids=cache_ids,
        item_index=prompt.item_index[stays],
        row_index=prompt.row_index[stays],
        positions=prompt.positions[:, stays],
        delta=prompt.delta + int(np.count_nonzero(~stays)),
        items=tuple(items),
    )


def _kept_only(item: Item, rows: Rows, digest: bytes) -> Item:
    name = struct.pack("<4q", *item.sentinels)  # the caller's hash is in them, if there is one
    return dataclasses.replace(
        item,
        kept=rows,
        pruning=digest,
        sentinels=sentinels_for(kept_mark(name, rows, digest)),
    )


class KnownPrunings:
    """What was kept of videos seen before, so that a repeat needs no encoder; thread-safe."""

    def __init__(self) -> None:
        self._table: OrderedDict[tuple[str, bytes], Pruning] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, salt: str, digest: bytes) -> Pruning | None:
        """What is known under a `pruning_digest`, of one tenant."""
        with self._lock:
            pruning = self._table.get((salt, digest))
            if pruning is not None:
                self._table.move_to_end((salt, digest))
            return pruning

    def put(self, salt: str, pruning: Pruning) -> None:
        """Remember; the one used longest ago is forgotten."""
        with self._lock:
            self._table[salt, pruning.digest] = pruning
            while len(self._table) > _MAX_KNOWN:
                self._table.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._table.clear()
