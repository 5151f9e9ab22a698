"""The radix tree finds the longest beginning it has seen, and never another's pages."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jaxmm.host.page_pool import PagePool
from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.prefix_key import PrefixKey
from tests.jaxmm.host.prompts import Picture, make_prompt

SIZE = 4


def key_of(*parts, salt=""):
    prompt = make_prompt(*parts)
    return PrefixKey.of(prompt.cache_ids, prompt.items, salt)


def insert(cache, pool, key):
    """Compute a prompt and leave it to the cache alone."""
    pages = pool.allocate(len(key.cache_ids) // SIZE)
    match = cache.insert(key, pages)
    pool.release(pages)
    return match


@pytest.fixture
def pool():
    return PagePool(16)


@pytest.fixture
def cache(pool):
    return PrefixCache(pool, SIZE)


def test_a_match_is_whole_pages(cache, pool):
    inserted = insert(cache, pool, key_of([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    match = cache.match(key_of([1, 2, 3, 4, 5, 6, 7, 9]))
    assert (match.num_tokens, [*match.pages]) == (4, [*inserted.pages[:1]])


def test_a_split_node_keeps_both_ends(cache, pool):
    long = insert(cache, pool, key_of([1] * 4 + [2] * 4 + [3] * 4))
    other = insert(cache, pool, key_of([1] * 4 + [2] * 4 + [4] * 4))
    assert [*other.pages[:2]] == [*long.pages[:2]]
    for end, pages in ((3, long.pages), (4, other.pages)):
        assert [*cache.match(key_of([1] * 4 + [2] * 4 + [end] * 4)).pages] == [*pages]
    assert cache.num_pages == 4


def test_the_first_pages_stay_when_the_same_tokens_come_again(cache, pool):
    first = insert(cache, pool, key_of([1] * 8))
    pages = pool.allocate(2)
    assert [*cache.insert(key_of([1] * 8), pages).pages] == [*first.pages]
    assert [pool.num_owners(page) for page in pages] == [1, 1]


def test_a_picture_of_a_forged_hash_does_not_match(cache, pool):
    insert(cache, pool, key_of([1] * 4, Picture("cat", 8, forged=True)))
    assert cache.match(key_of([1] * 4, Picture("dog", 8, forged=True))).num_tokens == 4
    assert cache.match(key_of([1] * 4, Picture("cat", 8, forged=True))).num_tokens == 12


def test_both_pictures_of_one_forged_hash_can_be_kept(cache, pool):
    for name in ("cat", "dog"):
        insert(cache, pool, key_of(Picture(name, 8, forged=True)))
    matches = [cache.match(key_of(Picture(n, 8, forged=True))) for n in ("cat", "dog")]
    assert len({page for match in matches for page in match.pages}) == 4


def test_tenants_do_not_see_each_other(cache, pool):
    insert(cache, pool, key_of([1] * 8, salt="a"))
    assert cache.match(key_of([1] * 8, salt="b")).num_tokens == 0


def test_the_least_recently_used_leaf_goes_first_and_from_its_tail(cache, pool):
    insert(cache, pool, key_of([1] * 12))
    insert(cache, pool, key_of([2] * 8))
    cache.match(key_of([1] * 12))
    assert cache.evict(1) == 1
    assert cache.num_matching(key_of([2] * 8)) == 4
    assert cache.evict(2) == 2
    assert cache.num_matching(key_of([2] * 8)) == 0
    assert cache.num_matching(key_of([1] * 12)) == 8


def test_a_locked_path_stays(cache, pool):
    node = insert(cache, pool, key_of([1] * 8)).node
    insert(cache, pool, key_of([1] * 12))
    cache.lock(node)
    assert cache.num_evictable == 1
    assert cache.evict(9) == 1
    cache.unlock(node)
    assert cache.evict(9) == 2
    assert pool.num_free == 16


def test_a_lock_survives_a_split(cache, pool):
    node = insert(cache, pool, key_of([1] * 8)).node
    cache.lock(node)
    insert(cache, pool, key_of([1] * 4 + [2] * 4))
    assert cache.evict(9) == 1
    cache.unlock(node)
    assert cache.num_evictable == 2


def test_looking_changes_nothing(cache, pool):
    insert(cache, pool, key_of([1] * 8))
    insert(cache, pool, key_of([2] * 4))
    cache.num_matching(key_of([1] * 4 + [3] * 4))
    cache.evict(2)
    assert cache.num_matching(key_of([2] * 4)) == 4


def test_a_disabled_cache_keeps_nothing():
    pool = PagePool(4)
    cache = PrefixCache(pool, SIZE, enabled=False)
    insert(cache, pool, key_of([1] * 8))
    assert (cache.match(key_of([1] * 8)).num_tokens, pool.num_free) == (0, 4)


def test_the_tree_keeps_no_reference_to_the_prompt(cache, pool):
    key = key_of([1] * 8)
    insert(cache, pool, key)
    key.cache_ids[:] = 5
    assert cache.num_matching(key_of([1] * 8)) == 8


PROMPTS = st.tuples(
    st.lists(
        st.one_of(
            st.lists(st.integers(1, 2), min_size=1, max_size=6),
            st.builds(
                Picture,
                st.sampled_from("ab"),
                st.sampled_from([4, 7]),
                st.just(True),
                st.just(True),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["", "tenant"]),
)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Against a dict from the content of every cached prefix of whole pages to its last page."""

    locked = Bundle("locked")
    pinned = Bundle("pinned")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(24)
        self.cache = PrefixCache(self.pool, SIZE)
        self.model: dict[tuple, int] = {}
        self.locked_pages: dict[int, int] = {}
        self.pinned_pages: dict[int, int] = {}

    def prefixes(self, parts, salt):
        prompt = make_prompt(*parts)
        contents = [
            (int(c), prompt.items[i].identity if i >= 0 else b"")
            for c, i in zip(prompt.cache_ids, prompt.item_index, strict=True)
        ]
        stops = range(SIZE, len(contents) + 1, SIZE)
        return [(salt, *contents[:stop]) for stop in stops]

    def expected(self, parts, salt):
        pages = []
        for prefix in self.prefixes(parts, salt):
            if prefix not in self.model:
                break
            pages.append(self.model[prefix])
        return pages

    def make_room(self, num_pages):
        if self.cache.evict(num_pages - self.pool.num_free):
            self.forget_evicted()
        return self.pool.num_free >= num_pages

    def forget_evicted(self):
        gone = [prefix for prefix, page in self.model.items() if not self.pool.num_owners(page)]
        for prefix in gone:
            page = self.model.pop(prefix)
            assert page not in self.locked_pages and page not in self.pinned_pages

    @rule(prompt=PROMPTS)
    def insert(self, prompt):
        parts, salt = prompt
        prefixes = self.prefixes(parts, salt)
        if not self.make_room(len(prefixes)):
            return
        pages = self.pool.allocate(len(prefixes))
        match = self.cache.insert(key_of(*parts, salt=salt), pages)
        for prefix, page in zip(prefixes, pages.tolist(), strict=True):
            self.model.setdefault(prefix, page)
        assert match.pages.tolist() == self.expected(parts, salt)
        self.pool.release(pages)

    @rule(prompt=PROMPTS)
    def look(self, prompt):
        parts, salt = prompt
        key = key_of(*parts, salt=salt)
        assert self.cache.num_matching(key) == SIZE * len(self.expected(parts, salt))
        match = self.cache.match(key)
        assert match.pages.tolist() == self.expected(parts, salt)
        assert match.node.stop == match.num_tokens == SIZE * len(match.pages)

    @rule(target=locked, prompt=PROMPTS)
    def lock(self, prompt):
        parts, salt = prompt
        match = self.cache.match(key_of(*parts, salt=salt))
        self.cache.lock(match.node)
        for page in match.pages.tolist():
            self.locked_pages[page] = self.locked_pages.get(page, 0) + 1
        return match

    @rule(match=consumes(locked))
    def unlock(self, match):
        self.cache.unlock(match.node)
        for page in match.pages.tolist():
            self.locked_pages[page] -= 1
            if not self.locked_pages[page]:
                del self.locked_pages[page]

    @rule(target=pinned, prompt=PROMPTS)
    def pin(self, prompt):
        parts, salt = prompt
        match = self.cache.match(key_of(*parts, salt=salt))
        self.cache.pin(match.node)
        for page in match.pages.tolist():
            self.pinned_pages[page] = self.pinned_pages.get(page, 0) + 1
        return match

    @rule(match=consumes(pinned))
    def unpin(self, match):
        self.cache.unpin(match.node)
        for page in match.pages.tolist():
            self.pinned_pages[page] -= 1
            if not self.pinned_pages[page]:
                del self.pinned_pages[page]

    @rule(num_pages=st.integers(1, 4))
    def evict(self, num_pages):
        wanted = min(num_pages, self.cache.num_evictable)
        assert self.cache.evict(num_pages) == wanted
        self.forget_evicted()

    @rule()
    def clear(self):
        self.cache.clear()
        self.forget_evicted()
        assert set(self.model.values()) == self.locked_pages.keys() | self.pinned_pages.keys()

    @invariant()
    def counts_agree(self):
        assert self.cache.num_pages == len(self.model) == 24 - self.pool.num_free
        assert len(set(self.model.values())) == len(self.model)
        assert self.cache.num_unlocked == len(self.model) - len(self.locked_pages)
        assert self.cache.num_pinned == len(self.pinned_pages)
        held = self.locked_pages.keys() | self.pinned_pages.keys()
        assert self.cache.num_evictable == len(self.model) - len(held)


TestPrefixCacheMachine = PrefixCacheMachine.TestCase


def grow_in_chunks(cache, pool, ids, chunk):
    """Insert a prompt chunk by chunk as one running sequence does; returns its last node."""
    pages, node = pool.allocate(len(ids) // cache.page_size), None
    for stop in range(chunk, len(ids) + 1, chunk):
        match = cache.insert(PrefixKey(ids[:stop], (), ""), pages, node)
        cache.lock(match.node)
        if node is not None:
            cache.unlock(node)
        node = match.node
    pool.release(pages)
    return node


def test_a_prompt_of_many_chunks_is_one_node(cache, pool):
    ids = np.arange(64, dtype=np.int64)
    node = grow_in_chunks(cache, pool, ids, 16)
    assert (node.start, node.stop) == (0, 64)
    assert (cache.num_pages, cache.num_evictable) == (16, 0)
    cache.unlock(node)
    assert cache.evict(99) == 16
    assert pool.num_free == 16


def test_a_node_that_another_holds_does_not_grow(cache, pool):
    ids = np.arange(32, dtype=np.int64)
    first = grow_in_chunks(cache, pool, ids[:16], 16)
    cache.lock(first)
    pages = np.concatenate([cache.match(PrefixKey(ids, (), "")).pages, pool.allocate(4)])
    second = cache.insert(PrefixKey(ids, (), ""), pages, first).node
    assert (first.stop, second.start, second.stop) == (16, 16, 32)


def test_a_pinned_node_does_not_grow(cache, pool):
    ids = np.arange(32, dtype=np.int64)
    first = grow_in_chunks(cache, pool, ids[:16], 16)
    cache.pin(first)
    pages = np.concatenate([cache.match(PrefixKey(ids, (), "")).pages, pool.allocate(4)])
    second = cache.insert(PrefixKey(ids, (), ""), pages, first).node
    assert (first.stop, second.start, second.stop) == (16, 16, 32)
    assert cache.num_pinned == 4
