"""Conversations keep their prefixes within bounds and for a time, the least recently used last."""

import numpy as np
import numpy.typing as npt
import pytest

from jaxmm.host.decodes import Found
from jaxmm.host.kept import Keep, KeptMedium
from jaxmm.host.media_map import Known
from jaxmm.host.page_pool import PagePool
from jaxmm.host.pins import Pins
from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.prefix_key import PrefixKey

SIZE = 4


class Clock:
    """Stands still until told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Kit:
    """Pins of at most 6 pages, 3 conversations and 100 bytes, in a pool of 32 pages."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pool = PagePool(32)
        self.cache = PrefixCache(self.pool, SIZE)
        self.pins = Pins(self.cache, 6, 3, 100, clock=self.clock)

    def key(self, *pages: int) -> PrefixKey:
        ids: npt.NDArray[np.int64] = np.repeat(np.array(pages, np.int64), SIZE)
        return PrefixKey(ids, (), "")

    def turn(self, keep: Keep, *pages: int) -> None:
        """Compute a conversation, given by the content of its pages, and keep it."""
        key = self.key(*pages)
        fresh = self.pool.allocate(len(pages))
        self.cache.insert(key, fresh)
        self.pool.release(fresh)
        self.pins.keep(keep, key)

    def num_cached(self, *pages: int) -> int:
        return self.cache.num_matching(self.key(*pages)) // SIZE


@pytest.fixture
def kit() -> Kit:
    return Kit()


def test_pinned_pages_outlive_what_is_merely_cached(kit: Kit) -> None:
    kit.turn(Keep(seconds=9), 1, 2, 3)
    fresh = kit.pool.allocate(2)
    kit.cache.insert(kit.key(7, 8), fresh)
    kit.pool.release(fresh)
    assert kit.cache.evict(99) == 2
    assert (kit.num_cached(1, 2, 3), kit.cache.num_pinned) == (3, 3)


def test_turn_takes_the_place_of_the_one_before(kit: Kit) -> None:
    keep = Keep(seconds=9)
    kit.turn(keep, 1, 2)
    kit.turn(keep, 1, 2, 3, 4)
    assert (len(kit.pins), kit.cache.num_pinned) == (1, 4)
    kit.pins.drop(keep)
    assert (len(kit.pins), kit.cache.num_pinned, kit.cache.num_evictable) == (0, 0, 4)
    kit.pins.drop(keep)


def test_common_beginning_is_counted_once(kit: Kit) -> None:
    first, second = Keep(seconds=9), Keep(seconds=9)
    kit.turn(first, 1, 2, 3, 4)
    kit.turn(second, 1, 2, 3, 5)
    assert (len(kit.pins), kit.cache.num_pinned) == (2, 5)
    kit.pins.drop(first)
    assert (kit.cache.evict(99), kit.num_cached(1, 2, 3, 5)) == (1, 4)


def test_beyond_the_share_of_pages_the_oldest_loses_its_own(kit: Kit) -> None:
    keeps = [Keep(seconds=9) for _ in range(2)]
    kit.turn(keeps[0], 1, 2, 3, 4)
    kit.turn(keeps[1], 5, 6)
    kit.turn(keeps[0], 1, 2, 3, 4)  # used again
    kit.turn(Keep(seconds=9), 7, 8)
    assert (len(kit.pins), kit.cache.num_pinned) == (2, 6)
    kit.cache.clear()
    assert [kit.num_cached(1, 2, 3, 4), kit.num_cached(5, 6), kit.num_cached(7, 8)] == [4, 0, 2]


def test_beyond_the_number_of_conversations_too(kit: Kit) -> None:
    for page in range(5):
        kit.turn(Keep(seconds=9), page)
    kit.cache.clear()
    assert [kit.num_cached(page) for page in range(5)] == [0, 0, 1, 1, 1]


def with_pictures(*sizes: int) -> Keep:
    """A conversation with processed pictures of so many bytes."""
    keep = Keep(seconds=9, pictures=[KeptMedium(b"") for _ in sizes])
    for picture, size in zip(keep.pictures, sizes, strict=True):
        known = Known(b"", (1, 1, 1), 1)
        picture.take(Found(known, np.zeros((1, size), np.uint8), np.zeros(1, np.float32)), (1, 1))
    return keep


def test_beyond_the_bytes_of_pictures_the_oldest_loses_its_own(kit: Kit) -> None:
    """Of 100 bytes; each picture has four more in its rows."""
    first, second, third = with_pictures(26, 26), with_pictures(36), with_pictures(1)
    kit.turn(first, 1)
    kit.turn(second, 2)
    assert (first.num_bytes, second.num_bytes, len(kit.pins)) == (60, 40, 2)
    kit.turn(third, 3)
    assert (first.num_bytes, second.num_bytes, third.num_bytes) == (0, 40, 5)
    assert first not in kit.pins and second in kit.pins


def test_pictures_beyond_the_bound_alone_go_and_their_prefix_stays(kit: Kit) -> None:
    small, large = with_pictures(6), with_pictures(50, 50)
    kit.turn(small, 1)
    kit.turn(large, 2)
    assert (small.num_bytes, large.num_bytes, len(kit.pins)) == (10, 0, 2)
    kit.cache.clear()
    assert kit.num_cached(2) == 1


def test_longer_conversation_than_the_share_keeps_its_beginning(kit: Kit) -> None:
    kit.turn(Keep(seconds=9), *range(9))
    kit.cache.clear()
    assert kit.num_cached(*range(9)) == 6


def test_each_is_given_back_when_its_time_is_over(kit: Kit) -> None:
    assert kit.pins.seconds_left is None
    kit.turn(Keep(seconds=30), 1)
    kit.turn(Keep(seconds=10), 2)
    assert kit.pins.seconds_left == 10
    kit.clock.now = 10
    kit.pins.expire()
    assert (len(kit.pins), kit.pins.seconds_left) == (1, 20)
    kit.clock.now = 99
    assert kit.pins.seconds_left == 0
    kit.pins.expire()
    assert (len(kit.pins), kit.cache.num_pinned) == (0, 0)


def test_oldest_first_when_the_room_is_needed(kit: Kit) -> None:
    kit.turn(Keep(seconds=9), 1)
    kit.turn(Keep(seconds=9), 2)
    assert kit.pins.release_oldest()
    kit.cache.clear()
    assert [kit.num_cached(1), kit.num_cached(2)] == [0, 1]
    kit.pins.clear()
    assert not kit.pins.release_oldest()


def test_nothing_is_pinned_without_a_prefix_cache() -> None:
    pool = PagePool(8)
    pins = Pins(PrefixCache(pool, SIZE, enabled=False), 4, 2, 100)
    pins.keep(keep := Keep(seconds=1), PrefixKey(np.zeros(8, np.int64), (), ""))
    pins.drop(keep)
    assert pool.num_free == 8
