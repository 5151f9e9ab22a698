"""What a waiting sequence can read instead of computing it, now or soon. Host only."""

from collections.abc import Iterable

from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.prefix_key import num_shared
from jaxmm.host.sequence import Sequence


def num_usable(sequence: Sequence, cache: PrefixCache, *, whole_items: bool) -> int:
    """Count the tokens to read from the prefix cache: whole pages, never the last token.

    Args:
        whole_items: Extends may not begin inside an item either.
    """
    size = cache.page_size
    num_tokens = cache.num_matching(sequence.prefix_key(sequence.num_known - 1))
    while whole_items and (cut := sequence.item_start(num_tokens) // size * size) < num_tokens:
        num_tokens = cut
    return num_tokens


def is_being_computed(
    sequence: Sequence, cached: int, extending: Iterable[Sequence], page_size: int
) -> bool:
    """Tell whether one of the others computes most of what a sequence would have to compute.

    Args:
        cached: Tokens of the sequence that are in the prefix cache.
        extending: Sequences whose extends are not all in the prefix cache yet; those that wait
            for features do not count.
    """
    wanted = max(page_size, (sequence.num_known - cached) // 2)
    return any(
        _num_readable(sequence, other, cached, page_size) - cached >= wanted
        for other in extending
        if not other.missing
    )


def num_shared_soon(
    sequence: Sequence, cached: int, others: Iterable[Sequence], page_size: int
) -> int:
    """Count the tokens to read from the prefix cache once one of the others is extended, or the
    `cached` that it has already.

    Args:
        others: Sequences that are not all extended yet, running or waiting.
    """
    readable = (_num_readable(sequence, other, cached, page_size) for other in others)
    return max(cached, max(readable, default=0))


def _num_readable(sequence: Sequence, other: Sequence, cached: int, page_size: int) -> int:
    """Tokens that a sequence can read once another is extended, if more than `cached`."""
    reached = other.extend_stop or other.num_known
    stop = min(sequence.num_known - 1, reached) // page_size * page_size
    if stop <= cached:
        return 0
    ours, theirs = sequence.prefix_key(stop), other.prefix_key(stop)
    if ours.cache_ids[cached] != theirs.cache_ids[cached]:
        return 0  # most pairs end here, for the price of one token
    return num_shared(ours, theirs) // page_size * page_size
