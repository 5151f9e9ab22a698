"""Rows are handed out once, found again by their full key, and come back."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxmm.host.arena import Arena, OutOfRows, RowKey


def key_of(name, num_rows=4, salt="", grid=(1, 2, 2)):
    return RowKey(salt, name.encode(), grid, num_rows)


def encode(arena, key):
    lease = arena.reserve(key)
    lease.ready = True
    return lease


def test_slots_are_whole_pages_in_row_order():
    arena = Arena(12, 4)
    np.testing.assert_array_equal(arena.reserve(key_of("a", 6)).slots, [0, 1, 2, 3, 4, 5])
    assert arena.num_free == 4


def test_rows_stay_after_their_lease():
    arena = Arena(8, 4)
    lease = encode(arena, key_of("a"))
    arena.release(lease)
    assert arena.lookup(key_of("a")) is lease
    assert (arena.hits, arena.misses, arena.hit_rows, arena.miss_rows) == (1, 1, 4, 4)


@pytest.mark.parametrize(
    "other",
    [key_of("b"), key_of("a", 3), key_of("a", salt="x"), key_of("a", grid=(2, 2, 1))],
    ids=["identity", "num_rows", "salt", "grid"],
)
def test_every_part_of_the_key_must_agree(other):
    arena = Arena(8, 4)
    encode(arena, key_of("a"))
    assert arena.lookup(other) is None


def test_rows_that_were_never_written_do_not_stay():
    arena = Arena(8, 4)
    arena.release(arena.reserve(key_of("a")))
    assert (arena.lookup(key_of("a")), arena.num_free) == (None, 8)


def test_the_least_recently_released_item_goes_first():
    arena = Arena(8, 4)
    a, b = encode(arena, key_of("a")), encode(arena, key_of("b"))
    arena.release(b)
    arena.release(a)
    encode(arena, key_of("c"))
    assert key_of("a") in arena
    assert key_of("b") not in arena


def test_leased_rows_are_not_evicted():
    arena = Arena(8, 4)
    encode(arena, key_of("a"))
    arena.release(encode(arena, key_of("b")))
    with pytest.raises(OutOfRows, match="5 rows asked for, 4 can be had"):
        arena.reserve(key_of("c", 5))
    assert key_of("b") in arena


class ArenaMachine(RuleBasedStateMachine):
    """Against a list of items from the least to the most recently released, and their holders."""

    def __init__(self):
        super().__init__()
        self.arena = Arena(16, 2)
        self.holders: dict[RowKey, int] = {}
        self.leases = {}
        self.released: list[RowKey] = []

    def used(self):
        return sum(-(-key.num_rows // 2) for key in self.holders)

    @rule(name=st.sampled_from("abcd"), num_rows=st.integers(1, 9))
    def lease(self, name, num_rows):
        key = key_of(name, num_rows)
        lease = self.arena.lookup(key)
        assert (lease is not None) == (key in self.holders)
        if lease is None:
            self.reserve(key)
            return
        assert lease is self.leases[key]
        self.holders[key] += 1
        self.released = [k for k in self.released if k != key]

    def reserve(self, key):
        need = -(-key.num_rows // 2)
        idle = sum(-(-k.num_rows // 2) for k in self.released)
        if need > 8 - self.used() + idle:
            with pytest.raises(OutOfRows):
                self.arena.reserve(key)
            return
        while need > 8 - self.used():
            del self.holders[self.released.pop(0)]
        lease = self.leases[key] = self.arena.reserve(key)
        lease.ready = True
        self.holders[key] = 1

    @precondition(lambda self: any(self.holders.values()))
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(k for k, n in self.holders.items() if n)))
        self.arena.release(self.leases[key])
        self.holders[key] -= 1
        if not self.holders[key]:
            self.released.append(key)

    @rule()
    def clear(self):
        self.arena.clear()
        for key in self.released:
            del self.holders[key]
        self.released = []

    @invariant()
    def no_row_has_two_items(self):
        slots = [row for key in self.holders for row in self.leases[key].slots.tolist()]
        assert len(set(slots)) == len(slots)
        assert all(0 <= row < 16 for row in slots)

    @invariant()
    def counts_agree(self):
        assert self.arena.num_free == 16 - 2 * self.used()
        assert self.arena.num_evictable == 2 * sum(-(-k.num_rows // 2) for k in self.released)
        assert all(key in self.arena for key in self.holders)


TestArenaMachine = ArenaMachine.TestCase
