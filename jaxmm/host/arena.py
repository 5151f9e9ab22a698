"""Which device row holds which row of which item: encoded once, kept while there is room.
Host only."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.host.item import Item
from jaxmm.host.page_pool import PagePool, Pages


class OutOfRows(Exception):
    """Leases hold too many rows for another item. The scheduler answers it; it never leaves it."""


class RowKey(NamedTuple):
    """Everything that must be equal before one item's rows stand in for another's."""

    salt: str
    identity: bytes
    grid_thw: tuple[int, int, int]
    num_rows: int

    @classmethod
    def of(cls, item: Item, salt: str) -> "RowKey":
        return cls(salt, item.identity, item.grid_thw, item.num_rows)


class Lease:
    """The rows of one item, shared by all sequences that need them now."""

    __slots__ = ("key", "num_holders", "pages", "ready", "slots")

    def __init__(self, key: RowKey, pages: Pages, slots: npt.NDArray[np.int32]) -> None:
        self.key = key
        self.pages = pages
        self.slots = slots
        """int32[num_rows], read-only: device row of each row of the item."""
        self.num_holders = 1
        self.ready = False
        """A step planned so far encodes the item, so that steps after it can read the rows."""


class Arena:
    """Device rows `0 … num_rows - 1`, taken and freed `page_rows` at a time.

    Rows outlive their leases: they stay until others need the room, least recently used first.
    """

    def __init__(self, num_rows: int, page_rows: int) -> None:
        """Make an empty arena; rows beyond the last whole page are never used."""
        self.num_rows = num_rows // page_rows * page_rows
        self.page_rows = page_rows
        self.hits = 0
        """Items whose rows were there."""
        self.misses = 0
        """Items that had to be encoded."""
        self.hit_rows = 0
        self.miss_rows = 0
        self._pool = PagePool(num_rows // page_rows)
        self._leases: dict[RowKey, Lease] = {}
        self._idle: OrderedDict[RowKey, Lease] = OrderedDict()  # oldest use first
        self._idle_pages = 0

    @property
    def num_free(self) -> int:
        """Rows that hold nothing."""
        return self._pool.num_free * self.page_rows

    @property
    def num_evictable(self) -> int:
        """Rows of items that nobody leases."""
        return self._idle_pages * self.page_rows

    def __contains__(self, key: RowKey) -> bool:
        return key in self._leases

    def is_leased(self, key: RowKey) -> bool:
        """Whether the rows of an item are here and somebody leases them."""
        lease = self._leases.get(key)
        return lease is not None and lease.num_holders > 0

    def rounded(self, num_rows: int) -> int:
        """Rows that an item takes, up to whole pages."""
        return -(-num_rows // self.page_rows) * self.page_rows

    def lookup(self, key: RowKey) -> Lease | None:
        """Lease the rows of an item if they are here; the caller becomes one more holder."""
        lease = self._leases.get(key)
        if lease is None:
            return None
        if lease.num_holders == 0:
            del self._idle[key]
            self._idle_pages -= len(lease.pages)
        lease.num_holders += 1
        self.hits += 1
        self.hit_rows += key.num_rows
        return lease

    def reserve(self, key: RowKey) -> Lease:
        """Lease rows for an item that is not here; the caller is the first holder.

        Sets nothing on the device: the caller plans the encode and then sets `ready`.

        Raises:
            OutOfRows: Too few rows are free or unleased; nothing was evicted.
        """
        assert key not in self._leases, "the rows of this item are here already"
        num_pages = self.rounded(key.num_rows) // self.page_rows
        if num_pages > self._pool.num_free + self._idle_pages:
            room = self.num_free + self.num_evictable
            raise OutOfRows(f"{key.num_rows} rows asked for, {room} can be had")
        while num_pages > self._pool.num_free:
            self._evict_oldest()
        lease = self._leases[key] = self._make(key, self._pool.allocate(num_pages))
        self.misses += 1
        self.miss_rows += key.num_rows
        return lease

    def release(self, lease: Lease) -> None:
        """End one holder's lease; rows that were never written are free at once."""
        assert lease.num_holders > 0, "a lease was released more often than taken"
        lease.num_holders -= 1
        if lease.num_holders:
            return
        if lease.ready:
            self._idle[lease.key] = lease
            self._idle_pages += len(lease.pages)
        else:
            self._forget(lease)

    def clear(self) -> None:
        """Forget every item that nobody leases."""
        while self._idle:
            self._evict_oldest()

    def _make(self, key: RowKey, pages: Pages) -> Lease:
        first = pages[:, None] * self.page_rows
        rows = first + np.arange(self.page_rows, dtype=np.int32)
        slots = rows.astype(np.int32).reshape(-1)[: key.num_rows]
        slots.flags.writeable = False
        return Lease(key, pages, slots)

    def _evict_oldest(self) -> None:
        _, lease = self._idle.popitem(last=False)
        self._idle_pages -= len(lease.pages)
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        del self._leases[lease.key]
        self._pool.release(lease.pages)
