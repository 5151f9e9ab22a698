"""Pages are handed out once, counted, and come back."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxmm.host.page_pool import OutOfPages, PagePool


def test_a_short_pool_gives_nothing():
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_no_pages_asked_for_are_no_pages():
    assert len(PagePool(2).allocate(0)) == 0


def test_a_page_is_free_when_its_last_owner_is_gone():
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 0
    pool.release(pages)
    assert pool.num_free == 1


def test_a_free_page_cannot_be_released():
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="a free page cannot be released"):
        pool.release(np.array([0], np.int32))


class PagePoolMachine(RuleBasedStateMachine):
    """Against a dict from page to number of owners."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(8)
        self.owners: dict[int, int] = {}

    @rule(num_pages=st.integers(0, 9))
    def allocate(self, num_pages):
        if num_pages > 8 - len(self.owners):
            with pytest.raises(OutOfPages):
                self.pool.allocate(num_pages)
            return
        pages = self.pool.allocate(num_pages).tolist()
        assert len(set(pages)) == num_pages
        assert not self.owners.keys() & set(pages)
        self.owners |= dict.fromkeys(pages, 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), retain=st.booleans())
    def retain_or_release(self, data, retain):
        page = data.draw(st.sampled_from(sorted(self.owners)))
        (self.pool.retain if retain else self.pool.release)(np.array([page], np.int32))
        self.owners[page] += 1 if retain else -1
        if not self.owners[page]:
            del self.owners[page]

    @invariant()
    def counts_agree(self):
        assert self.pool.num_free == 8 - len(self.owners)
        assert all(self.pool.num_owners(page) == n for page, n in self.owners.items())


TestPagePoolMachine = PagePoolMachine.TestCase
