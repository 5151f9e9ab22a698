"""Work that could hold up the event loop, done on a few threads. Host only."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_THREADS = 2
"""To compute on. More would wait for Python's lock, and make the event loop wait behind them."""
SHORT = 1 << 14
"""Bytes that cost less to work on than to pass to a thread."""


class Offload:
    """Threads for one kind of work; what does not fit them waits in the order in which it came."""

    def __init__(self, num_threads: int = _THREADS) -> None:
        self._num_threads = num_threads
        self._threads: ThreadPoolExecutor | None = None

    async def run(
        self,
        num_bytes: int,
        work: Callable[_Args, _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """Do some work, here where it is about few bytes.

        Args:
            num_bytes: That the work reads or writes, about.
            work: Thread-safe; goes on to its end although the caller is cancelled.
            *args: Of the work.
            **kwargs: Of the work.
        """
        if num_bytes <= SHORT:
            return work(*args, **kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="jaxmm-http")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))

    async def join(self, pieces: Sequence[bytes]) -> bytes:
        """Put what came in pieces together, tens of megabytes maybe.

        `join` lets other threads run meanwhile, from a megabyte on. A buffer would not: its pages
        are touched one by one as it is made, which takes 40 ms for 33 MB.
        """
        return await self.run(sum(map(len, pieces)), b"".join, pieces)

    def close(self) -> None:
        """Forget what waits; what runs comes to its end. The next `run` begins anew."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
