"""Where items stand in a prompt: expanding placeholders, writing sentinels. Host only.

Two conventions: one placeholder for each item (`expand_slots`), or spans that are there already,
found by their markers (`find_spans`) and folded to one placeholder each, so that only one rule
expands. No function touches its input.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jaxmm.errors import PlaceholderError
from jaxmm.host.identity import Sentinels, sentinel_array
from jaxmm.host.item import Item, Prompt, Span

Offsets = tuple[Span, ...]
Ids = npt.NDArray[np.int64]
PositionsFn = Callable[[int, Sequence[Item]], tuple[npt.NDArray[np.int32], int]]
"""(T, items with offsets) -> (int32[3, T] positions, delta); the model family's."""


_NOTHING: Ids = np.zeros(0, np.int64)


def check_slots(ids: npt.NDArray[np.integer], slots: npt.ArrayLike, *placeholder_ids: int) -> None:
    """Refuse ids whose placeholders, of any of the kinds, are not exactly the slots.

    Raises:
        PlaceholderError: Names both counts; a placeholder outside the slots would be read as text.
    """
    found = np.flatnonzero(np.isin(np.asarray(ids), placeholder_ids))
    if not np.array_equal(found, np.asarray(slots, np.int64)):
        raise PlaceholderError(
            f"the prompt has {found.size} placeholders "
            f"(id {' or '.join(map(str, placeholder_ids))}) for "
            f"{np.size(slots)} items; it needs one for each item, in place, and none in the text"
        )


def unfold(
    ids: npt.NDArray[np.integer],
    slots: npt.ArrayLike,
    steps: Sequence[Sequence[tuple[Ids, Ids]] | None],
) -> tuple[Ids, Ids]:
    """Give each time step of each video a placeholder of its own, with what stands around it.

    Args:
        ids: int[T0], one placeholder for each picture and each video.
        slots: int[I]: index of each in `ids`, ascending.
        steps: For each slot None for a picture; for a video what stands before and after the
            placeholder of each of its steps.

    Returns:
        int64 ids and int64 slots, with one placeholder for each picture and each step.
    """
    source = np.asarray(ids, np.int64)
    pieces: list[Ids] = []
    found: list[int] = []
    start = length = 0

    def add(piece: Ids) -> None:
        nonlocal length
        pieces.append(piece)
        length += len(piece)

    for slot, around in zip(np.asarray(slots, np.int64).tolist(), steps, strict=True):
        add(source[start:slot])
        for before, after in ((_NOTHING, _NOTHING),) if around is None else around:
            add(before)
            found.append(length)
            add(source[slot : slot + 1])
            add(after)
        start = slot + 1
    add(source[start:])
    return np.concatenate(pieces), np.array(found, np.int64)


def expand_slots(
    ids: npt.NDArray[np.integer], slots: npt.ArrayLike, num_rows: Sequence[int]
) -> tuple[Ids, tuple[Offsets, ...]]:
    """Repeat each item's placeholder until there is one for each of its rows.

    Args:
        ids: int[T0], one placeholder for each item.
        slots: int[I]: index of each item's placeholder in `ids`, ascending.
        num_rows: Rows of each item, at least 1.

    Returns:
        int64[T] expanded ids, and the offsets of each item in them.

    Raises:
        PlaceholderError: Slots and items do not match.
    """
    source = np.asarray(ids, np.int64)
    where = np.asarray(slots, np.int64).reshape(-1)
    rows = np.asarray(num_rows, np.int64).reshape(-1)
    _check_expansion(source.size, where, rows)
    counts = np.ones(source.size, np.int64)
    counts[where] = rows
    stops = np.cumsum(counts)[where].tolist()
    offsets = tuple((Span(stop - n, stop),) for stop, n in zip(stops, rows.tolist(), strict=True))
    return np.repeat(source, counts), offsets


def pad_expanded(
    ids: npt.NDArray[np.integer], offsets: Sequence[Offsets], sentinels: Sequence[Sentinels]
) -> Ids:
    """Cache ids of an expanded prompt: sentinels in every span, from the first word on.

    Args:
        ids: int[T], expanded.
        offsets: Spans of each item.
        sentinels: The four words of each item.

    Returns:
        int64[T], a new array.

    Raises:
        PlaceholderError: Spans that overlap, are empty or leave the prompt, or a wrong count.
    """
    if len(offsets) != len(sentinels):
        raise PlaceholderError(f"{len(sentinels)} items for {len(offsets)} lists of offsets")
    cache_ids = np.array(ids, np.int64)
    check_offsets(cache_ids.size, offsets)
    for spans, words in zip(offsets, sentinels, strict=True):
        for span in spans:
            cache_ids[span.start : span.stop] = sentinel_array(words, len(span))
    return cache_ids


def find_spans(ids: npt.NDArray[np.integer], start_id: int, end_id: int) -> Offsets:
    """Spans between the outermost start and end markers; inner pairs belong to the outer item.

    Returns:
        What stands between the markers, without them, in order.

    Raises:
        PlaceholderError: A marker without its other one, or a pair with nothing between.
    """
    opens, closes = np.asarray(ids) == start_id, np.asarray(ids) == end_id
    depth = np.cumsum(opens.astype(np.int64) - closes)
    if start_id == end_id or (depth.size and (depth.min() < 0 or depth[-1] != 0)):
        raise PlaceholderError(
            f"{int(opens.sum())} start markers (id {start_id}) and {int(closes.sum())} end markers "
            f"(id {end_id}) do not pair up"
        )
    starts = np.flatnonzero(opens & (depth == 1)) + 1
    stops = np.flatnonzero(closes & (depth == 0))
    if (starts == stops).any():
        raise PlaceholderError(
            "a start marker stands right before its end marker; no token between"
        )
    return tuple(map(Span, starts.tolist(), stops.tolist()))


def fold_expanded(
    ids: npt.NDArray[np.integer], start_id: int, end_id: int, *placeholder_ids: int
) -> tuple[Ids, Ids]:
    """Undo an expansion: one placeholder where anything with some stands between two markers.

    Args:
        ids: int[T], expanded. A pair of markers may hold others, as a video's holds its steps'.
        start_id: Marker before an item.
        end_id: Marker behind it.
        placeholder_ids: Of any of the kinds.

    Returns:
        int64 ids, and int64 slots: the index of every placeholder in them.

    Raises:
        PlaceholderError: Markers that do not pair.
    """
    folded = np.array(ids, np.int64)
    stays = np.ones(folded.size, bool)
    for start, stop in find_spans(folded, start_id, end_id):
        inside = folded[start:stop]
        kinds = inside[np.isin(inside, placeholder_ids)]
        if kinds.size:
            folded[start] = kinds[0]
            stays[start + 1 : stop] = False
    folded = folded[stays]
    return folded, np.flatnonzero(np.isin(folded, placeholder_ids))


def build_prompt(
    ids: npt.NDArray[np.integer],
    slots: npt.ArrayLike,
    items: Sequence[Item],
    positions_fn: PositionsFn,
) -> Prompt:
    """Expand a prompt that has one placeholder for each item.

    Args:
        ids: int[T0].
        slots: int[I]: index of each item's placeholder in `ids`, ascending.
        items: In the order of their slots; their offsets are not read.
        positions_fn: The model family's.

    Raises:
        PlaceholderError: Items and places do not match.
    """
    expanded, offsets = expand_slots(ids, slots, [item.num_rows for item in items])
    return prompt_of_spans(expanded, offsets, items, positions_fn)


def prompt_of_spans(
    ids: npt.NDArray[np.integer],
    offsets: Sequence[Offsets],
    items: Sequence[Item],
    positions_fn: PositionsFn,
) -> Prompt:
    """Make a prompt of ids that are expanded already; arguments as `pad_expanded`."""
    cache_ids = pad_expanded(ids, offsets, [item.sentinels for item in items])
    placed = tuple(
        dataclasses.replace(item, offsets=spans) for item, spans in zip(items, offsets, strict=True)
    )
    item_index = np.full(cache_ids.size, -1, np.int32)
    row_index = np.full(cache_ids.size, -1, np.int32)
    for index, item in enumerate(placed):
        _check_rows(index, item)
        row = 0
        for span in item.offsets:
            item_index[span.start : span.stop] = index
            row_index[span.start : span.stop] = np.arange(row, row + len(span), dtype=np.int32)
            row += len(span)
    positions, delta = positions_fn(cache_ids.size, placed)
    return Prompt(
        ids=np.array(ids, np.int64),
        cache_ids=cache_ids,
        item_index=item_index,
        row_index=row_index,
        positions=positions,
        delta=delta,
        items=placed,
    )


def check_offsets(num_tokens: int, offsets: Sequence[Offsets]) -> None:
    """Refuse spans that are empty, leave the prompt, overlap, or descend within an item.

    Raises:
        PlaceholderError: Names the spans at fault.
    """
    for index, spans in enumerate(offsets, start=1):
        if any(a.start > b.start for a, b in itertools.pairwise(spans)):
            raise PlaceholderError(f"the spans of item {index} are not in ascending order")
    ordered = sorted(span for spans in offsets for span in spans)
    for span in ordered:
        if not 0 <= span.start < span.stop <= num_tokens:
            raise PlaceholderError(f"span {tuple(span)} is empty or leaves [0, {num_tokens})")
    for before, after in itertools.pairwise(ordered):
        if after.start < before.stop:
            raise PlaceholderError(f"spans {tuple(before)} and {tuple(after)} overlap")


def _check_expansion(num_ids: int, slots: Ids, num_rows: Ids) -> None:
    if slots.size != num_rows.size:
        raise PlaceholderError(
            f"the prompt has {slots.size} placeholders for {num_rows.size} items; "
            "it needs one for each"
        )
    if slots.size and (slots[0] < 0 or slots[-1] >= num_ids or (np.diff(slots) <= 0).any()):
        raise PlaceholderError(f"slots {slots.tolist()} do not ascend within [0, {num_ids})")
    if (num_rows < 1).any():
        raise PlaceholderError(f"items of {num_rows.tolist()} rows; each needs at least one")


def _check_rows(index: int, item: Item) -> None:
    tokens = sum(map(len, item.offsets))
    if tokens != item.num_rows:
        raise PlaceholderError(
            f"item {index + 1} has {item.num_rows} rows and {tokens} tokens in the prompt"
        )
