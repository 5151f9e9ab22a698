"""Files that cost a decoding process its life, refused for a while. Host only."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from jaxmm.errors import MediaError


class Quarantine:
    """Remembers such files, and what a caller asked of them, by SHA-256; thread-safe.

    A process is replaced in a fraction of a second, so that one bad file costs little; the same
    file sent over and over would cost a process each time. It is forgotten after a while, because
    it may have been innocent: the system may have ended the process for reasons of its own. What
    one caller asks of a file, hundreds of its frames say, is no offence of what another asks.
    """

    def __init__(
        self,
        seconds: float,
        *,
        capacity: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Refuse each file for `seconds` from its last offence; 0 refuses nothing.

        Args:
            capacity: Files remembered; one beyond it pushes out the oldest.
        """
        self._seconds = seconds
        self._capacity = capacity
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, task: bytes, data: bytes) -> None:
        """Let a file pass.

        Args:
            task: What is asked of it, as far as it changes what decoding takes.
            data: Its bytes.

        Raises:
            MediaError: It is refused; says for how many more seconds.
        """
        with self._lock:
            self._forget()
            if not self._until:
                return  # the usual case, at no cost
        digest = _digest(task, data)
        with self._lock:
            left = self._until.get(digest, 0.0) - self._clock()
        if left > 0:
            raise MediaError(
                "the same file has ended the process that decoded it; "
                f"it is refused for {left:.0f} more seconds"
            )

    def add(self, task: bytes, data: bytes) -> None:
        """Refuse a file for a task from now on."""
        digest = _digest(task, data)
        with self._lock:
            self._until[digest] = self._clock() + self._seconds
            self._until.move_to_end(digest)
            self._forget()
            if len(self._until) > self._capacity:
                self._until.popitem(last=False)

    def __len__(self) -> int:
        with self._lock:
            self._forget()
            return len(self._until)

    def _forget(self) -> None:
        """Drop what is over; the order is that of the times. Under the lock."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


def _digest(task: bytes, data: bytes) -> bytes:
    digest = hashlib.sha256(len(task).to_bytes(8))
    digest.update(task)
    digest.update(data)
    return digest.digest()
