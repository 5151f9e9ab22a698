"""How late the event loop is: what every client waits for, whatever it asks. Host only."""

import asyncio
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

BUSY_SECONDS = 0.05
"""Processor time at a stretch that no callback should take: everybody else waits for it."""
_INTERVAL_SECONDS = 0.01
_QUIET_SECONDS = 10.0
"""Between two warnings."""


class LagProbe:
    """Sleeps for 10 ms, again and again, and notes how late it wakes.

    A callback that computes for 100 ms shows as a lag of 90 to 100 ms, and as as much processor
    time of the loop's thread; a machine that had no core free for it shows as lag alone.
    """

    def __init__(self, observe: Callable[[float], object] = lambda _: None) -> None:
        """Tell `observe` of every lag, in seconds."""
        self.observe = observe
        self.max_seconds = 0.0
        """The longest lag since `take`."""
        self.max_busy_seconds = 0.0
        """The most processor time that the loop's thread took between two wakes."""

    def take(self) -> tuple[float, float]:
        """Give the longest lag and the most time busy, and begin anew."""
        taken = self.max_seconds, self.max_busy_seconds
        self.max_seconds = self.max_busy_seconds = 0.0
        return taken

    async def run(self) -> None:
        """Measure until cancelled, in the task of the loop that is measured."""
        warned_at = float("-inf")
        while True:
            due, busy = time.monotonic() + _INTERVAL_SECONDS, time.thread_time()
            await asyncio.sleep(_INTERVAL_SECONDS)
            now, busy = time.monotonic(), time.thread_time() - busy
            lag = max(0.0, now - due)
            self.max_seconds = max(self.max_seconds, lag)
            self.max_busy_seconds = max(self.max_busy_seconds, busy)
            if busy > BUSY_SECONDS and now - warned_at > _QUIET_SECONDS:
                logger.warning("event loop held busy_seconds=%.3f lag_seconds=%.3f", busy, lag)
                warned_at = now
            self.observe(lag)
