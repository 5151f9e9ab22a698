"""How many fetches run at once: over all, and from one host. Host only."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gates:
    """Lets so many through; the others wait in the order in which they came.

    The host's turn is awaited first: those that wait for a slow host keep no place from others.
    """

    def __init__(self, max_concurrent: int, max_per_host: int) -> None:
        self._all = asyncio.Semaphore(max_concurrent)
        self._max_per_host = max_per_host
        self._hosts: dict[str, _Gate] = {}

    @contextlib.asynccontextmanager
    async def passing(self, host: str) -> AsyncIterator[None]:
        """Wait for a turn with `host`, and keep it for the length of the block."""
        gate = self._hosts.setdefault(host, _Gate(self._max_per_host))
        gate.num_users += 1
        try:
            async with gate.turns, self._all:
                yield
        finally:
            gate.num_users -= 1
            if gate.num_users == 0:  # a server that runs for months meets many hosts
                del self._hosts[host]

    @property
    def num_hosts(self) -> int:
        """Hosts that are being asked or waited for."""
        return len(self._hosts)


class _Gate:
    def __init__(self, max_concurrent: int) -> None:
        self.turns = asyncio.Semaphore(max_concurrent)
        self.num_users = 0
