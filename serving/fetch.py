"""Pictures from the URLs of a request: data URIs, http(s), and files where allowed. Host only."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxmm.errors import MediaError, MediaTooLarge
from serving.config import FetchConfig
from serving.data_uri import decode_data_uri
from serving.errors import FetchError
from serving.gates import Gates
from serving.lifting import Url
from serving.local_files import read_file_url
from serving.offload import Offload
from serving.remote import Remote, parse_url

_FILE_THREADS = 8
"""A disk of the network may make each wait for long; nobody who reads no files waits for them."""


class Budget:
    """Bytes that the pictures of one request may still take together."""

    def __init__(self, num_bytes: int, hold: Callable[[int], None]) -> None:
        self._limit = self._left = num_bytes
        self._hold = hold

    def take(self, num_bytes: int) -> None:
        """Count bytes that came.

        Raises:
            MediaTooLarge: They are too many.
            JaxmmError: What `hold` raises.
        """
        self._left -= num_bytes
        if self._left < 0:
            raise MediaTooLarge(
                f"the images and videos are larger than {self._limit} bytes together"
            )
        self._hold(num_bytes)


class Fetcher:
    """Gets pictures; one for a server. What takes long is done off the event loop's thread."""

    def __init__(
        self, config: FetchConfig, offload: Offload, *, max_bytes: int, max_total_bytes: int
    ) -> None:
        """Take threads, and limits: bytes of one picture, and of all pictures of one request."""
        self._config = config
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._folder = Path(config.file_folder) if config.file_folder else None
        gates = Gates(config.max_concurrent, config.max_concurrent_per_host)
        self._remote = Remote(config, gates, max_bytes)
        self._offload = offload
        self._files = Offload(_FILE_THREADS)

    async def aclose(self) -> None:
        """Give connections and threads back."""
        self._files.close()
        await self._remote.aclose()

    async def fetch_all(
        self, urls: Mapping[str, Url], hold: Callable[[int], None] = lambda _: None
    ) -> dict[str, bytes]:
        """Get several pictures at once; equal URLs of hosts are asked once.

        Args:
            urls: Where the picture stands in the request (for messages), to its URL.
            hold: Told of all bytes that come, and may refuse them by raising.

        Returns:
            The bytes of each, by where it stands.

        Raises:
            MediaError: One cannot be had, or they are too large together; the others are given up.
        """
        budget = Budget(self._max_total_bytes, hold)
        asked: dict[Url, asyncio.Task[bytes]] = {}
        tasks: dict[str, asyncio.Task[bytes]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for where, url in urls.items():
                    task = None if _is_data(url) else asked.get(url)
                    if task is None:
                        task = group.create_task(self._fetch_at(where, url, budget))
                    if not _is_data(url):  # hashing megabytes is work for nothing
                        asked[url] = task
                    tasks[where] = task
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return {where: task.result() for where, task in tasks.items()}

    async def _fetch_at(self, where: str, url: Url, budget: Budget) -> bytes:
        try:
            return await self._fetch(url, budget)
        except MediaError as e:
            raise type(e)(f"{where}: {e}", where) from e

    async def _fetch(self, url: Url, budget: Budget) -> bytes:
        if isinstance(url, memoryview) or _is_data(url):
            data = await self._offload.run(len(url), decode_data_uri, url, self._max_bytes)
            budget.take(len(data))
            return data
        if self._folder is not None and url[:5].lower() == "file:":
            data = await self._files.run(
                self._max_bytes, read_file_url, url, self._folder, self._max_bytes
            )
            budget.take(len(data))
            return data
        target = parse_url(url)
        if target.scheme not in self._config.schemes:
            raise FetchError(schemes_message(self._config))
        return await self._offload.join(await self._remote.get(target, budget.take))


def schemes_message(config: FetchConfig) -> str:
    """The same for every refused URL, so that it tells nothing about files."""
    schemes = ["data", *config.schemes, *(["file"] if config.file_folder else [])]
    return f"images and videos are taken from {', '.join(f'{scheme}:' for scheme in schemes)} URLs"


def _is_data(url: Url) -> bool:
    return isinstance(url, memoryview) or url[:5].lower() == "data:"
