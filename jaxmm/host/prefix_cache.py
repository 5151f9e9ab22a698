"""Radix tree of KV pages by the tokens that they hold: finished prefixes for reuse. Host only.

        root of salt ""                      one root a tenant, pages never cross
        └─ [sys sys sys sys | usr usr …]     a node: a run of whole pages, at least one
           ├─ [v0 v1 v2 v3 | v0 v1 …]        children differ in their first page
           └─ [hi …]

Ownership: the cache owns one reference to every page in the tree (`PagePool.retain`), beside
those of the sequences. A sequence keeps the path that it reads locked; an unlocked page has no
owner but the cache, so evicting it frees it, and `num_evictable` is exact. A pinned path is not
evicted either, but its owner unpins it when a sequence needs the room.
"""

import heapq
from itertools import count
from typing import NamedTuple

import numpy as np

from jaxmm.host.page_pool import NO_PAGES, PagePool, Pages
from jaxmm.host.prefix_key import Ids, Marks, PrefixKey, clip, num_equal

_NO_IDS: Ids = np.zeros(0, np.int64)


class _Edge(NamedTuple):
    """What leads to a node: the first page of it, or the salt of a root."""

    content: bytes
    marks: Marks = ()


class Node:
    """A run of whole pages below its parent; covers tokens `[start, stop)` of its path."""

    __slots__ = ("cache_ids", "children", "edge", "last_used", "locks", "marks", "pages",
                 "parent", "pins", "queued", "start")  # fmt: skip

    def __init__(
        self,
        parent: "Node | None",
        edge: _Edge,
        start: int,
        cache_ids: Ids,
        marks: Marks,
        pages: Pages,
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.cache_ids = cache_ids
        self.marks = clip(marks, start, start + len(cache_ids))
        self.pages = pages
        self.children: dict[_Edge, Node] = {}
        self.locks = self.pins = 0
        self.last_used = 0
        self.queued = False

    @property
    def stop(self) -> int:
        return self.start + len(self.cache_ids)


class PrefixMatch(NamedTuple):
    """The cached beginning of a prompt."""

    num_tokens: int
    """A multiple of the page size."""
    pages: Pages
    node: Node
    """Ends exactly at `num_tokens`. Lock it before the next call that may evict."""


class PrefixCache:
    """Pages by content; the least recently used unlocked leaves go first, from their tails."""

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True) -> None:
        """Make an empty cache.

        Args:
            pool: Owner of the pages.
            page_size: Tokens per page, at least 4, so that a page of an item holds all four
                sentinels.
            enabled: False: nothing is kept and nothing matches.
        """
        assert page_size >= 4, f"page_size={page_size} is below 4"
        self.page_size = page_size
        self.enabled = enabled
        self.num_pages = 0
        """Pages in the tree."""
        self.num_evictable = 0
        """Pages that `evict` can free now."""
        self.num_unlocked = 0
        """Pages that it could free if nothing were pinned."""
        self.num_pinned = 0
        self._pool = pool
        self._roots: dict[_Edge, Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap; stale entries are put right on pop
        self._order = count()

    def match(self, key: PrefixKey) -> PrefixMatch:
        """Find the longest cached beginning of `key`, in whole pages; counts as a use."""
        node, stop = self._descend(key, use=True)
        node = self._cut(node, stop)
        return PrefixMatch(stop, _path_pages(node), node)

    def num_matching(self, key: PrefixKey) -> int:
        """Tell how many tokens `match` would find; changes nothing."""
        return self._descend(key, use=False)[1]

    def insert(self, key: PrefixKey, pages: Pages, tail: Node | None = None) -> PrefixMatch:
        """Keep the whole pages of `key`.

        Where the tree has a page for the same tokens already, that one stays, and the caller's
        stays the caller's: to read on from the shared one, retain the returned pages, release
        its own. Pages new to the tree are retained by the cache; the caller's references to
        `pages` are never taken away.

        Args:
            key: Tokens whose KV has been written by the steps planned so far.
            pages: Pages of the same tokens in order; those beyond the last whole page are ignored.
            tail: The node that the caller has locked once, if any. It grows in place when nobody
                else holds it, so that a prompt cut into many chunks stays one node.

        Returns:
            Path of all whole pages of `key`, unlocked; empty when the cache is disabled.
        """
        if not self.enabled:
            return PrefixMatch(0, NO_PAGES, _root(key.salt))
        usable = self._whole(len(key.cache_ids))
        node, stop = self._descend(key, use=True)
        node = self._cut(node, stop)
        if stop < usable:
            pages = pages[stop // self.page_size : usable // self.page_size].copy()
            assert len(pages) * self.page_size == usable - stop, "fewer pages than tokens to keep"
            self._pool.retain(pages)
            self.num_pages += len(pages)
            if node is tail and node.parent is not None and _has_one_holder(node):
                self._lengthen(node, key, pages)
            else:
                node = self._add_leaf(node, key, pages)
        return PrefixMatch(node.stop, _path_pages(node), node)

    def lock(self, node: Node) -> None:
        """Keep the path from the root to `node` from eviction; locks are counted."""
        walk: Node | None = node
        while walk is not None:
            if walk.locks == 0:
                self.num_unlocked -= len(walk.pages)
                self.num_evictable -= 0 if walk.pins else len(walk.pages)
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        """Take one lock off the path from the root to `node`; counts as a use."""
        self._clock += 1
        walk: Node | None = node
        while walk is not None:
            assert walk.locks > 0, "a prefix was unlocked more often than locked"
            walk.locks -= 1
            walk.last_used = self._clock
            if walk.locks == 0:
                self.num_unlocked += len(walk.pages)
                self.num_evictable += 0 if walk.pins else len(walk.pages)
                self._offer(walk)
            walk = walk.parent

    def pin(self, node: Node) -> None:
        """Keep the path from the root to `node` from eviction until `unpin`; pins are counted."""
        walk: Node | None = node
        while walk is not None:
            if walk.pins == 0:
                self.num_pinned += len(walk.pages)
                self.num_evictable -= 0 if walk.locks else len(walk.pages)
            walk.pins += 1
            walk = walk.parent

    def unpin(self, node: Node) -> None:
        """Take one pin off the path from the root to `node`."""
        walk: Node | None = node
        while walk is not None:
            assert walk.pins > 0, "a prefix was unpinned more often than pinned"
            walk.pins -= 1
            if walk.pins == 0:
                self.num_pinned -= len(walk.pages)
                self.num_evictable += 0 if walk.locks else len(walk.pages)
                self._offer(walk)
            walk = walk.parent

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, least recently used first.

        Returns:
            Pages freed: `min(num_pages, num_evictable)`.
        """
        freed = 0
        while freed < num_pages and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.last_used == used and _is_free_leaf(node):
                freed += self._trim(node, num_pages - freed)
            else:
                self._offer(node)
        return freed

    def clear(self) -> None:
        """Free every page that is neither locked nor pinned."""
        self.evict(self.num_evictable)

    def _whole(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size

    def _edge(self, cache_ids: Ids, marks: Marks, start: int) -> _Edge:
        """Edge of the page that begins with token `start`, the first of `cache_ids`."""
        page = cache_ids[: self.page_size].tobytes()
        return _Edge(page, clip(marks, start, start + self.page_size))

    def _descend(self, key: PrefixKey, *, use: bool) -> tuple[Node, int]:
        """Walk down; the last node may go on beyond the tokens matched."""
        root = _root(key.salt)
        node, stop = self._roots.get(root.edge, root), 0
        usable = self._whole(len(key.cache_ids))
        self._clock += use
        while stop < usable and stop == node.stop:
            rest = key.cache_ids[stop:]
            child = node.children.get(self._edge(rest, key.marks, stop))
            if child is None:
                break
            equal = num_equal(child.cache_ids, child.marks, rest, key.marks, stop)
            node, stop = child, stop + self._whole(equal)
            if use:
                node.last_used = self._clock
        return node, stop

    def _cut(self, node: Node, stop: int) -> Node:
        """Make a node end at token `stop`; handles to `node` stay good, they mean its tail."""
        if stop == node.stop:
            return node
        parent, size = node.parent, stop - node.start
        assert parent is not None and size > 0, "a root has no tokens to cut"
        pages = size // self.page_size
        ids, marks = node.cache_ids, node.marks
        head = Node(parent, node.edge, node.start, ids[:size], marks, node.pages[:pages])
        head.locks, head.pins, head.last_used = node.locks, node.pins, node.last_used
        parent.children[head.edge] = head
        node.parent, node.edge, node.start = head, self._edge(ids[size:], marks, stop), stop
        node.cache_ids, node.pages = ids[size:], node.pages[pages:]
        node.marks = clip(marks, stop, node.stop)
        head.children[node.edge] = node
        return head

    def _lengthen(self, node: Node, key: PrefixKey, pages: Pages) -> None:
        node.pages = np.concatenate([node.pages, pages])
        node.cache_ids = key.cache_ids[node.start :][: len(node.pages) * self.page_size].copy()
        node.marks = clip(key.marks, node.start, node.stop)

    def _add_leaf(self, parent: Node, key: PrefixKey, pages: Pages) -> Node:
        start = parent.stop
        ids = key.cache_ids[start:][: len(pages) * self.page_size].copy()
        leaf = Node(parent, self._edge(ids, key.marks, start), start, ids, key.marks, pages)
        leaf.last_used = self._clock
        parent.children[leaf.edge] = leaf
        if parent.parent is None:
            self._roots[parent.edge] = parent
        self.num_unlocked += len(pages)
        self.num_evictable += len(pages)
        self._offer(leaf)
        return leaf

    def _offer(self, node: Node) -> None:
        """Put a leaf that may go where `evict` looks, once."""
        if node.queued or node.parent is None or not _is_free_leaf(node):
            return
        node.queued = True
        heapq.heappush(self._leaves, (node.last_used, next(self._order), node))

    def _trim(self, leaf: Node, num_pages: int) -> int:
        """Free the last pages of an unlocked leaf; a leaf without pages leaves the tree."""
        keep = max(0, len(leaf.pages) - num_pages)
        freed = leaf.pages[keep:]
        self._pool.release(freed)
        self.num_pages -= len(freed)
        self.num_unlocked -= len(freed)
        self.num_evictable -= len(freed)
        if keep == 0:
            self._remove(leaf)
            return len(freed)
        leaf.pages = leaf.pages[:keep]
        leaf.cache_ids = leaf.cache_ids[: keep * self.page_size]
        leaf.marks = clip(leaf.marks, leaf.start, leaf.stop)
        self._offer(leaf)
        return len(freed)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "a root has no pages to free"
        del parent.children[leaf.edge]
        self._offer(parent)
        if parent.parent is None and not parent.children:
            del self._roots[parent.edge]


def _root(salt: str) -> Node:
    return Node(None, _Edge(salt.encode()), 0, _NO_IDS, (), NO_PAGES)


def _is_free_leaf(node: Node) -> bool:
    return not (node.children or node.locks or node.pins)


def _has_one_holder(node: Node) -> bool:
    return node.locks == 1 and not (node.children or node.pins)


def _path_pages(node: Node) -> Pages:
    runs: list[Pages] = []
    walk: Node | None = node
    while walk is not None:
        runs.append(walk.pages)
        walk = walk.parent
    return np.concatenate(runs[::-1])
