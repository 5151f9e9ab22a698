"""How far a chunk can go, by the items in it: leases their rows and plans their encodes.
Host only.

Rows are leased when the first token that reads them is extended and not before, so a prompt may
hold more items than the arena has room for at once. A chunk ends before the first item whose
rows cannot be had in this step.
"""

from enum import Enum

from jaxmm.host.arena import Arena, Lease, OutOfRows, RowKey
from jaxmm.host.item import Item
from jaxmm.host.plan import Draft
from jaxmm.host.sequence import Sequence


class Shortage(Enum):
    """What a sequence lacks to get on."""

    NONE = "none"
    TOKENS = "tokens"
    """The step's token budget."""
    PATCHES = "patches"
    """The step's patch budget."""
    ROWS = "rows"
    """Leases hold the arena."""
    PAGES = "pages"
    """Running sequences hold the pages, or will soon."""
    PREFILL = "prefill"
    """Another sequence computes most of what this one needs; it can be read soon."""
    FEATURES = "features"
    """An item was never decoded and its rows are gone."""

    @property
    def is_transient(self) -> bool:
        """It ends as running sequences get on, so that holding others back helps."""
        return self in (Shortage.TOKENS, Shortage.PATCHES, Shortage.ROWS)


def stage_chunk(sequence: Sequence, stop: int, arena: Arena, draft: Draft) -> tuple[int, Shortage]:
    """Lease the rows of the items in tokens `[num_computed, stop)`, encoding those not there.

    Returns:
        The token before which the chunk has to end, at least `num_computed`, and why; items
        from there on are neither leased nor encoded.
    """
    start = sequence.num_computed
    for span, index in sequence.spans_after(start):
        if span.start >= stop:
            break
        shortage = _stage_item(sequence, index, arena, draft)
        if shortage is not Shortage.NONE:
            return max(start, span.start), shortage
    return stop, Shortage.NONE


def ask_for_features(sequence: Sequence, start: int, arena: Arena, draft: Draft) -> bool:
    """Ask for the features that tokens from `start` on need and that are in no cache.

    Returns:
        Whether any are missing still.
    """
    missing = [
        index
        for index in sequence.items_after(start)
        if not _has_content(item := sequence.prompt.items[index])
        and RowKey.of(item, sequence.salt) not in arena
    ]
    for index in sorted(missing):
        _ask(sequence, index, draft)
    return bool(missing)


def release_passed(sequence: Sequence, arena: Arena) -> None:
    """End the leases of items whose last row is before `num_computed`."""
    for index in sequence.leases.keys() - sequence.items_after(sequence.num_computed):
        arena.release(sequence.leases.pop(index))


def peak_rows(sequence: Sequence, arena: Arena) -> int:
    """Rows that a sequence holds at once at most, if each chunk brings in one item only."""
    live: list[tuple[int, int, int]] = [
        (item.offsets[0].start, item.offsets[-1].stop, arena.rounded(item.num_rows))
        for item in sequence.prompt.items
        if item.offsets
    ]
    return max(
        (sum(rows for first, last, rows in live if first <= at < last) for at, _, _ in live),
        default=0,
    )


def _stage_item(sequence: Sequence, index: int, arena: Arena, draft: Draft) -> Shortage:
    if index in sequence.leases:
        return Shortage.NONE
    lease, shortage = lease_rows(sequence.prompt.items[index], sequence.salt, arena, draft)
    if lease is not None:
        sequence.leases[index] = lease
    elif shortage is Shortage.FEATURES:
        _ask(sequence, index, draft)
    return shortage


def lease_rows(item: Item, salt: str, arena: Arena, draft: Draft) -> tuple[Lease | None, Shortage]:
    """Lease an item's rows, planning its encode if they are not there.

    Returns:
        The lease, or None and what is lacking.
    """
    key = RowKey.of(item, salt)
    lease = arena.lookup(key)
    if lease is not None:
        return lease, Shortage.NONE
    if not _has_content(item):
        return None, Shortage.FEATURES
    if not draft.can_encode(item):
        return None, Shortage.PATCHES
    try:
        lease = arena.reserve(key)
    except OutOfRows:
        return None, Shortage.ROWS
    draft.encode(item, lease)
    return lease, Shortage.NONE


def _ask(sequence: Sequence, index: int, draft: Draft) -> None:
    if index not in sequence.missing:
        sequence.missing.add(index)
        draft.missing_features.append((sequence, index))


def _has_content(item: Item) -> bool:
    return item.features is not None or item.embeddings is not None
