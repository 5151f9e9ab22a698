"""What open conversations keep: pinned prefixes and processed media, within bounds. Host only.

A pin is weaker than a lock. Pages of a pinned prefix go after all that is merely cached, but they
do go when a sequence could not run otherwise: so a pin can delay nobody, and a conversation that
lost its pin is only slower.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from jaxmm.host.kept import Keep
from jaxmm.host.prefix_cache import Node, PrefixCache
from jaxmm.host.prefix_key import PrefixKey


class _Pin(NamedTuple):
    node: Node
    expires_at: float
    num_bytes: int
    """Of its processed pictures and videos, at the end of its turn."""


class Pins:
    """One prefix for each conversation, the least recently used given up first."""

    def __init__(
        self,
        cache: PrefixCache,
        max_pages: int,
        max_count: int,
        max_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pin nothing yet.

        Args:
            cache: Whose nodes are pinned.
            max_pages: Pages that all pins hold together at most.
            max_count: Conversations at most, at least one.
            max_bytes: Of processed pictures and videos, all conversations together.
            clock: Seconds.
        """
        self._cache = cache
        self._max_pages = max_pages
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = clock
        self._pins: OrderedDict[Keep, _Pin] = OrderedDict()  # oldest use first
        self._num_bytes = 0
        self._next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, keep: Keep) -> bool:
        """Whether a conversation keeps something; for any thread."""
        return keep in self._pins

    @property
    def seconds_left(self) -> float | None:
        """Time until `expire` has something to do; None when nothing is pinned."""
        return max(0.0, self._next_expiry - self._clock()) if self._pins else None

    def keep(self, keep: Keep, key: PrefixKey) -> None:
        """Pin what is cached of a conversation in place of what was; of a long one the beginning.

        Others lose theirs, the least recently used first, where the bounds ask for it. What
        is processed and beyond the bound alone is given back at once.
        """
        bound = self._max_pages * self._cache.page_size
        node = self._cache.match(PrefixKey(key.cache_ids[:bound], key.marks, key.salt)).node
        self._cache.pin(node)
        self._unpin(keep)
        num_bytes = keep.num_bytes
        if num_bytes > self._max_bytes:
            keep.release()
            num_bytes = 0
        self._pins[keep] = _Pin(node, self._clock() + keep.seconds, num_bytes)
        self._num_bytes += num_bytes
        self._note_expiry()
        while len(self._pins) > 1 and self._beyond_bounds():
            self.release_oldest()

    def drop(self, keep: Keep) -> None:
        """End what a conversation keeps; one that keeps nothing is no error."""
        self._unpin(keep)
        self._note_expiry()
        keep.release()

    def release_oldest(self) -> bool:
        """End what the least recently used conversation keeps; False when there is none."""
        if not self._pins:
            return False
        self.drop(next(iter(self._pins)))
        return True

    def expire(self) -> None:
        """End what has been kept long enough."""
        if not self._pins or (now := self._clock()) < self._next_expiry:
            return
        for keep in [k for k, pin in self._pins.items() if pin.expires_at <= now]:
            self.drop(keep)

    def clear(self) -> None:
        """End what all conversations keep."""
        while self.release_oldest():
            pass

    def _unpin(self, keep: Keep) -> None:
        pin = self._pins.pop(keep, None)
        if pin is not None:
            self._cache.unpin(pin.node)
            self._num_bytes -= pin.num_bytes

    def _beyond_bounds(self) -> bool:
        return (
            self._cache.num_pinned > self._max_pages
            or len(self._pins) > self._max_count
            or self._num_bytes > self._max_bytes
        )

    def _note_expiry(self) -> None:
        self._next_expiry = min((p.expires_at for p in self._pins.values()), default=math.inf)
