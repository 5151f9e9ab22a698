"""What running sequences hold (pages, rows, state slot, cached path): taken and given back here.
Host only.

The locked path of a sequence holds its own first pages, no others: `settle` exchanges pages
where the cache had the same tokens already. Therefore what a sequence locks is never more than
what it owns, and everything else can be had by evicting and unpinning.
"""

import heapq

from jaxmm.host.arena import Arena
from jaxmm.host.page_pool import PagePool
from jaxmm.host.pins import Pins
from jaxmm.host.prefix_cache import PrefixCache, PrefixMatch
from jaxmm.host.sequence import Sequence
from jaxmm.host.staging import release_passed


class Residency:
    """The one place where sequences get and lose device memory."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache, pins: Pins, arena: Arena, num_slots: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._pins = pins
        self._arena = arena
        self._slots = list(range(num_slots))  # heap: low slots first keeps the batch dense

    @property
    def num_slots(self) -> int:
        """State slots that are free."""
        return len(self._slots)

    def can_have(self, num_pages: int) -> bool:
        """Tell whether so many pages are free or can be made so; pins do not count."""
        return num_pages <= self._pool.num_free + self._cache.num_unlocked

    def take(self, sequence: Sequence, match: PrefixMatch, num_pages: int) -> None:
        """Give a sequence its slot and, behind the matched ones, pages up to `num_pages`.

        Args:
            match: Its node has been locked for the sequence already.
            num_pages: All pages of the sequence; `can_have` said yes to those beyond the match.
        """
        sequence.slot = heapq.heappop(self._slots)
        sequence.node = match.node
        self._pool.retain(match.pages)
        sequence.pages.extend(match.pages)
        grown = self.grow(sequence, num_pages - len(match.pages))
        assert grown, "pages were promised that are not there"

    def grow(self, sequence: Sequence, num_pages: int) -> bool:
        """Add pages to a running sequence, evicting as needed; False: they cannot be had."""
        if not self.can_have(num_pages):
            return False
        self._make_room(num_pages - self._pool.num_free)
        sequence.pages.extend(self._pool.allocate(num_pages))
        return True

    def _make_room(self, num_pages: int) -> None:
        """Evict what is merely cached, then what conversations keep, oldest first."""
        missing = num_pages - self._cache.evict(num_pages)
        while missing > 0 and self._pins.release_oldest():
            missing -= self._cache.evict(missing)

    def settle(self, sequence: Sequence) -> None:
        """Share what the last plan computed, and give back rows that it passed."""
        release_passed(sequence, self._arena)
        match = self._share(sequence)
        if match is None:
            return
        gained, dropped = sequence.pages.exchange(match.pages)
        self._pool.retain(gained)
        self._pool.release(dropped)
        self._cache.lock(match.node)
        self._unlock(sequence)
        sequence.node = match.node

    def give_back(self, sequence: Sequence) -> None:
        """Take everything from a running sequence; its whole pages stay in the prefix cache."""
        self._share(sequence)
        self._pool.release(sequence.pages.clear())
        self._unlock(sequence)
        for lease in sequence.leases.values():
            self._arena.release(lease)
        sequence.leases.clear()
        heapq.heappush(self._slots, sequence.slot)
        sequence.slot = -1

    def _share(self, sequence: Sequence) -> PrefixMatch | None:
        """Put whole pages that are computed, and whose ids are known, into the prefix cache."""
        known = min(sequence.num_computed, sequence.num_known)
        shared = 0 if sequence.node is None else sequence.node.stop
        if not self._cache.enabled or known < shared + self._cache.page_size:
            return None
        return self._cache.insert(sequence.prefix_key(known), sequence.pages.array, sequence.node)

    def _unlock(self, sequence: Sequence) -> None:
        if sequence.node is not None:
            self._cache.unlock(sequence.node)
            sequence.node = None
