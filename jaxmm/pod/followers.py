"""The followers as process 0 sees them: told, watched, and named when one is lost. Host only.

One thread hears them, for all replicas. A follower that closes its connection is lost at once; one
that is silent, or does not finish a step, within its time; one whose tokens differ when it has told
them.
"""

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from jaxmm.errors import PeerLost
from jaxmm.pod.channel import Buffers, Channel
from jaxmm.pod.messages import Kind
from jaxmm.pod.track import DONE, REPLICA, OnResult, Track

logger = logging.getLogger(__name__)

LOADING_SECONDS = 300.0
"""Silence of a process that loads and compiles, which can keep its threads from speaking."""
_PATIENCE_SECONDS = 30.0
_LAST_WORDS_SECONDS = 3.0
"""From the failure of the pod to the end of this process: callers hear of it meanwhile."""


class Followers:
    """All of them; any thread may tell, one thread tells steps."""

    def __init__(
        self,
        channels: Mapping[int, Channel],
        *,
        silence_seconds: float,
        step_seconds: float,
        on_leave: Callable[[str], None],
    ) -> None:
        """Begin to watch.

        Args:
            channels: By process id; closed with this.
            silence_seconds: After so long without a word a follower is lost.
            step_seconds: So long a step may take.
            on_leave: Told once that a follower was asked to end, and which.
        """
        self._channels = dict(channels)
        self._silence_seconds = silence_seconds
        self._beat_seconds = min(1.0, silence_seconds / 8)
        self._step_seconds = step_seconds
        self._on_leave = on_leave
        self._listeners: list[Callable[[PeerLost], None]] = []
        self._lock = threading.Lock()
        self._asked: dict[int, float] = {}
        self._ready: set[int] = set()
        self._serving = False
        self._leaving = False
        self._tracks: dict[int, Track] = {}
        self.failure: PeerLost | None = None
        self._failed = threading.Event()
        self._closed = False
        for channel in channels.values():
            channel.set_timeout(LOADING_SECONDS)
        self._thread = threading.Thread(target=self._watch, name="jaxmm-followers", daemon=True)
        self._thread.start()

    def on_failure(self, listener: Callable[[PeerLost], None]) -> None:
        """Have something told, once, that the pod is at its end, and why."""
        with self._lock:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def track(
        self, replica: int, process_ids: Iterable[int], on_result: OnResult | None = None
    ) -> Track:
        """The steps of a replica, on those of its processes that are followers; see `Track`."""
        names = {i: self._channels[i].name for i in process_ids if i in self._channels}
        track = self._tracks[replica] = Track(
            replica, names, self.tell_one, self._end_for, on_result
        )
        return track

    def tell(self, kind: Kind, payload: Buffers = ()) -> None:
        """Send all of them the same.

        Raises:
            PeerLost: The pod is at its end.
        """
        for process_id in self._channels:
            self.tell_one(process_id, kind, payload)

    def tell_one(self, process_id: int, kind: Kind, payload: Buffers) -> None:
        """Send one of them something that only it needs. Raises as `tell`."""
        if self.failure is not None:
            raise self.failure
        try:
            self._channels[process_id].send(kind, payload)
        except PeerLost as error:
            raise self._fail(error) from None

    def wait_ready(self) -> None:
        """Wait until all have their weights and executables; from then on silence counts.

        Raises:
            PeerLost: One is gone.
        """
        patience = time.monotonic() + _PATIENCE_SECONDS
        while missing := self._channels.keys() - self._ready:
            if self._failed.wait(0.05):
                assert self.failure is not None, "told after it is set"
                raise self.failure
            if time.monotonic() > patience:
                patience += _PATIENCE_SECONDS
                names = ", ".join(self._channels[i].name for i in sorted(missing))
                logger.info("waiting for %s to load and compile", names)
        self.tell(Kind.READY)
        for channel in self._channels.values():
            channel.set_timeout(self._silence_seconds)
        self._serving = True

    def named(self, seconds: float) -> PeerLost | None:
        """Who is at fault for an error of the devices, if that is told within some time."""
        self._failed.wait(seconds)
        return self.failure

    def end(self, reason: str) -> None:
        """Tell all that the pod ends, as far as they hear it, and stop watching; once is enough."""
        if self._closed:
            return
        self._closed = True
        for channel in self._channels.values():
            try:
                channel.send(Kind.END, [reason.encode()])
            except PeerLost:
                logger.debug("not told of the end: %s", channel.name)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        """Close the connections; `end` came before."""
        for channel in self._channels.values():
            channel.close()

    def _watch(self) -> None:
        beat = 0.0
        with selectors.DefaultSelector() as selector:
            for process_id, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, process_id)
            while not self._closed:
                try:
                    for key, _ in selector.select(self._beat_seconds / 4):
                        self._hear(key.data)
                    if time.monotonic() >= beat:
                        beat = time.monotonic() + self._beat_seconds
                        self._beat()
                    self._check_time()
                except PeerLost as error:
                    self._fail(error)

    def _beat(self) -> None:
        """Ask all for a word. Silence is what lies between the question and the answer, so that a
        process 0 that was held up itself blames nobody."""
        now = time.monotonic()
        for process_id in self._channels:
            self._asked.setdefault(process_id, now)
        self.tell(Kind.BEAT)

    def _hear(self, process_id: int) -> None:
        kind, payload = self._channels[process_id].receive()
        self._asked.pop(process_id, None)
        if kind is Kind.READY:
            self._ready.add(process_id)
        elif kind is Kind.DONE:
            replica, step, digest = DONE.unpack(payload)
            self._tracks[replica].heard_done(process_id, step, digest)
        elif kind is Kind.RESULT:
            (replica,) = REPLICA.unpack_from(payload)
            self._tracks[replica].heard_result(payload[REPLICA.size :])
        elif payload == b"\x01" and not self._leaving:
            self._leaving = True
            self._on_leave(self._channels[process_id].name)

    def _check_time(self) -> None:
        now = time.monotonic()
        allowed = self._silence_seconds if self._serving else LOADING_SECONDS
        for process_id, asked in self._asked.items():
            if now - asked > allowed:
                name = self._channels[process_id].name
                raise PeerLost(f"{name} was lost: no word from it for {now - asked:.0f} s")
        for track in list(self._tracks.values()):
            track.check_time(self._step_seconds)

    def _end_for(self, error: PeerLost) -> None:
        self._fail(error)

    def _fail(self, error: PeerLost) -> PeerLost:
        """End the pod at the first failure, and give that back.

        This process ends soon after, whatever its threads wait for: a chip that waits for a host
        that is gone does so for ever.
        """
        with self._lock:
            if self.failure is not None or self._closed:
                return self.failure or error
            self.failure = error
            listeners = list(self._listeners)
        logger.critical("the pod ends: %s", error)
        last = threading.Timer(_LAST_WORDS_SECONDS, os._exit, (1,))
        last.daemon = True
        last.start()
        self._failed.set()
        for listener in listeners:
            listener(error)
        self.end(str(error))
        return error
