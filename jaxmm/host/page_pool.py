"""Ref-counted pages of the KV cache: numbers only, the device holds what is in them. Host only."""

from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """Fewer pages are free than were asked for. The scheduler answers it; it never leaves it."""


class PagePool:
    """Pages `0 … num_pages - 1`, each free or held by one or more owners.

    Device steps run in the order of their plans, so a page may be given out again by the plan
    after the one in which its last owner still used it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take free pages, all or none; the caller is their one owner.

        Raises:
            OutOfPages: Fewer than `num_pages` are free; nothing was taken.
        """
        keep = len(self._free) - num_pages
        if keep < 0:
            raise OutOfPages(f"{num_pages} pages asked for, {len(self._free)} free")
        pages = self._free[keep:]
        del self._free[keep:]
        for page in pages:
            self._owners[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one owner to each page; all must have one already."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free and cannot be retained"
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one owner from each page; pages without owners are free again."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free and cannot be released"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def num_owners(self, page: int) -> int:
        return self._owners[page]
