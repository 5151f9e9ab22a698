"""The steps of one replica on its followers: told, timed, compared. Host only.

Every process of a replica runs the same steps and must come to the same tokens. What a frame is
about stands in its first two bytes, the replica's number.
"""

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from jaxmm.errors import PeerLost
from jaxmm.pod.channel import Buffers
from jaxmm.pod.messages import Kind, unpack_arrays

REPLICA = struct.Struct("<H")
DONE = struct.Struct("<HQ16s")
"""A replica, a step's number from 0 up, and the digest of the tokens of all steps up to it."""

TellOne = Callable[[int, Kind, Buffers], None]
OnResult = Callable[[list[npt.NDArray[Any] | None]], None]


class Track:
    """One replica as process 0 sees it; one thread tells, any may read."""

    def __init__(
        self,
        replica: int,
        names: dict[int, str],
        tell_one: TellOne,
        fail: Callable[[PeerLost], None],
        on_result: OnResult | None = None,
    ) -> None:
        """Begin with no step.

        Args:
            replica: Its number.
            names: Of its followers, by process id.
            tell_one: Sends one of them a frame.
            fail: Told that one came to other tokens, or is too slow.
            on_result: Given what the followers read, where process 0 has no chip of the replica.
        """
        self._head = REPLICA.pack(replica)
        self._names = names
        self._tell_one = tell_one
        self._fail = fail
        self._on_result = on_result
        self._lock = threading.Lock()
        self._began: dict[int, float] = {}
        self._expected: dict[int, bytes] = {}
        self._told: dict[int, dict[int, bytes]] = {}
        self._done = dict.fromkeys(names, -1)

    @property
    def num_open(self) -> int:
        """Steps that not all have come to the end of."""
        return len(self._began.keys() | self._expected.keys() | self._told.keys())

    def tell(self, kind: Kind, payload: Buffers = ()) -> None:
        """Send all of its followers the same.

        Raises:
            PeerLost: The pod is at its end.
        """
        for process_id in self._names:
            self.tell_one(process_id, kind, payload)

    def tell_one(self, process_id: int, kind: Kind, payload: Buffers) -> None:
        """Send one of them something that only it needs. Raises as `tell`."""
        self._tell_one(process_id, kind, [self._head, *payload])

    def began(self, step: int) -> None:
        """Note when a step was told."""
        with self._lock:
            self._began[step] = time.monotonic()

    def finished(self, step: int, digest: bytes) -> None:
        """Note what process 0 makes of a step's tokens."""
        with self._lock:
            self._expected[step] = digest
            wrong = self._compare(step)
        self._blame(wrong)

    def heard_done(self, process_id: int, step: int, digest: bytes) -> None:
        """Note what a follower makes of a step's tokens."""
        with self._lock:
            self._done[process_id] = step
            self._told.setdefault(step, {})[process_id] = digest
            wrong = self._compare(step)
        self._blame(wrong)

    def heard_result(self, payload: bytes) -> None:
        """Take what a follower has read, behind the replica's number."""
        assert self._on_result is not None, "process 0 reads what its own chips give itself"
        self._on_result(unpack_arrays(payload))

    def check_time(self, step_seconds: float) -> None:
        """Blame whoever has not finished a step in its time."""
        with self._lock:
            oldest = min(self._began.items(), default=None)
            if oldest is None or time.monotonic() - oldest[1] <= step_seconds:
                return
            slow = [self._names[i] for i, done in self._done.items() if done < oldest[0]]
        if slow:
            names = " and ".join(slow)
            self._fail(PeerLost(f"{names} did not finish step {oldest[0]} in {step_seconds:g} s"))

    def _blame(self, wrong: str | None) -> None:
        if wrong is not None:
            self._fail(PeerLost(wrong))

    def _compare(self, step: int) -> str | None:
        """Under the lock: compare what is known of a step, and forget it when all have told.

        Returns:
            What is wrong with it, if anything.
        """
        expected, told = self._expected.get(step), self._told.get(step, {})
        if expected is None:
            return None
        for process_id, digest in told.items():
            if digest != expected:
                name = self._names[process_id]
                return f"{name} came to other tokens than process 0 by step {step}"
        if len(told) == len(self._names):
            for table in (self._expected, self._told, self._began):
                table.pop(step, None)
        return None
