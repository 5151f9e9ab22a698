"""Ref-counted pages of the KV cache: numbers only, the device holds what is in them. Host only."""

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
"""int32[num_pages]: distinct pages."""

NO_PAGES: Pages = np.zeros(0, np.int32)


class OutOfPages(Exception):
    """Fewer pages are free than were asked for. The scheduler answers it; it never leaves it."""


class PagePool:
    """Pages `0 … num_pages - 1`, each free or held by one or more owners.

    Device steps run in the order of their plans, so a page may be given out again by the plan
    after the one in which its last owner still used it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # stack of num_free
        self._owners = np.zeros(num_pages, np.int32)

    def allocate(self, num_pages: int) -> Pages:
        """Take free pages, all or none; the caller is their one owner.

        Raises:
            OutOfPages: Fewer than `num_pages` are free; nothing was taken.
        """
        keep = self.num_free - num_pages
        if keep < 0:
            raise OutOfPages(f"{num_pages} pages asked for, {self.num_free} free")
        pages = self._free[keep : self.num_free][::-1].copy()
        self.num_free = keep
        self._owners[pages] = 1
        return pages

    def retain(self, pages: Pages) -> None:
        """Add one owner to each page; all must have one already."""
        assert self._owners[pages].all(), "a free page cannot be retained"
        self._owners[pages] += 1

    def release(self, pages: Pages) -> None:
        """Remove one owner from each page; pages without owners are free again."""
        owners = self._owners[pages]
        assert owners.all(), "a free page cannot be released"
        self._owners[pages] = owners - 1
        freed = pages[owners == 1][::-1]  # so that they are handed out in the same order again
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def num_owners(self, page: int) -> int:
        return int(self._owners[page])
