"""One replica under the loop: its steps on their way, and whether it can get on. Host only."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.dispatch import Dispatcher, Fetched, Pending, Sampled
from jaxmm.host.plan import Plan, ScoreJob
from jaxmm.start import Parts

Scores = Iterator[tuple[ScoreJob, npt.NDArray[np.float32]]]

_AHEAD = 1  # steps dispatched beyond the one whose tokens are read


class _Flight(NamedTuple):
    """A step on the device."""

    pending: Pending
    fetched: "Future[Fetched] | None"
    """What it sampled, when a thread waits for it; None: whoever reads it waits."""


class Replica:
    """What the loop drives: plans go in, sampled tokens come out, in the same order.

    The loop of a single replica waits for its device itself. One of several waits for none of
    them: a thread for each does, and wakes it.
    """

    def __init__(self, parts: Parts, wake: Callable[[], None] | None) -> None:
        """Take the parts of a replica.

        Args:
            parts: Those of this replica.
            wake: Called, on another thread, when a step has come to its end; None: nobody waits
                beside the loop.
        """
        self.parts = parts
        self.scheduler = parts.scheduler
        self.stalled = False
        """The last plan had nothing to compute; nothing has changed since."""
        self._dispatcher = Dispatcher(parts)
        self._flights: deque[_Flight] = deque()
        self._wake = wake
        self._waiting_since: float | None = None
        self._threads = None if wake is None else ThreadPoolExecutor(1, "jaxmm-fetch")

    @property
    def num_flying(self) -> int:
        """Steps that have not been read."""
        return len(self._flights)

    @property
    def plannable(self) -> bool:
        """A plan could give something, and there is room for another step."""
        has_room = len(self._flights) <= _AHEAD
        return has_room and self.scheduler.has_work and not self.stalled

    @property
    def can_go(self) -> bool:
        """Something can be done for it without waiting, or by waiting for its device."""
        return self.readable or (self.plannable and not self.awaits_tokens)

    @property
    def readable(self) -> bool:
        """There is a step to read; with several replicas, one that has ended."""
        if not self._flights:
            return False
        fetched = self._flights[0].fetched
        return fetched is None or fetched.done()

    @property
    def awaits_tokens(self) -> bool:
        """No next step before the one on its way has been read: its grammars need the tokens."""
        return bool(self._flights) and self.scheduler.awaits_tokens

    @property
    def is_ahead(self) -> bool:
        """As many steps are on their way as may be."""
        return len(self._flights) > _AHEAD

    @property
    def waiting_seconds(self) -> float:
        """How long its device has been at the step that is next to be read. For any thread."""
        since = self._waiting_since
        return 0.0 if since is None or self._threads is None else time.monotonic() - since

    @property
    def seconds_left(self) -> float | None:
        """Time until something is to be done that nobody asks for; None: never."""
        times = [self.scheduler.pins.seconds_left]
        if not self.scheduler.has_work:
            times.append(self.parts.rehearsal.seconds_left)
        return min((seconds for seconds in times if seconds is not None), default=None)

    def rehearse(self) -> None:
        """The loop has nothing to do."""
        if not self.scheduler.has_work:
            self.parts.rehearsal.go_on()

    def dispatch(self, plan: Plan) -> None:
        """Start a step."""
        pending = self._dispatcher.dispatch(plan)
        fetched = None
        if self._threads is not None:
            fetched = self._threads.submit(self._dispatcher.fetch, pending)
            fetched.add_done_callback(lambda _: self._wake and self._wake())
        if not self._flights:
            self._waiting_since = time.monotonic()
        self._flights.append(_Flight(pending, fetched))

    def read(self) -> tuple[Scores, Iterator[Sampled]]:
        """Wait for the oldest step's scores and tokens."""
        flight = self._flights.popleft()
        self._waiting_since = time.monotonic() if self._flights else None
        pending, dispatcher = flight.pending, self._dispatcher
        fetched = dispatcher.fetch(pending) if flight.fetched is None else flight.fetched.result()
        return dispatcher.scored(pending, fetched), dispatcher.sampled(pending, fetched)

    def settle(self) -> None:
        """Wait for the steps on their way, of which nobody wants to know any more."""
        while self._flights:
            self.read()

    def close(self, *, wait: bool) -> None:
        """End the thread that waits, after the step on its way, or without waiting for one that
        hangs."""
        if self._threads is not None:
            self._threads.shutdown(wait=wait, cancel_futures=True)
