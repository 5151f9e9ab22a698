"""How fast answers end, for telling refused clients when to come again. Host only."""

import math
import time
from collections import deque
from collections.abc import Callable

ANSWER_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})
"""Requests to these are what the engine is busy with."""

_NUM_ENDS = 64
_LONGEST_SECONDS = 60
"""Nobody is sent away for longer: much can have changed by then."""


class Pace:
    """Counts answers that are being made, and remembers when the last ones ended.

    Its time stands still while none is being made: a quiet hour says nothing of how long one takes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet."""
        self._clock = clock
        self._num_open = 0
        self._idle_since = clock()
        self._idle_seconds = 0.0
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    def begin(self) -> None:
        """Note a request for an answer."""
        if self._num_open == 0:
            self._idle_seconds += self._clock() - self._idle_since
        self._num_open += 1

    def end(self, *, answered: bool) -> None:
        """Note its end; one that was refused at once says nothing of the time an answer takes."""
        if answered:
            self._ends.append(self._busy_seconds)
        self._num_open -= 1
        if self._num_open == 0:
            self._idle_since = self._clock()

    @property
    def retry_seconds(self) -> int:
        """Time until all that are open now will have ended, at the pace of the last ones; from 1 to
        60 s, and 1 where no answer has ended yet."""
        if not self._ends or not self._num_open:
            return 1
        seconds = (self._busy_seconds - self._ends[0]) / len(self._ends) * self._num_open
        return max(1, min(_LONGEST_SECONDS, math.ceil(seconds)))

    @property
    def _busy_seconds(self) -> float:
        """Time so far in which an answer was being made, while one is."""
        return self._clock() - self._idle_seconds
