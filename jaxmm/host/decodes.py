"""Pictures and videos known, held, or on their way: one decode for all requests that send the same.
Host only."""

import functools
import threading
import weakref
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.errors import EngineStopped
from jaxmm.host.decode import ClipTask, Decoder, Frames, Processed, ProcessedClip
from jaxmm.host.media_map import Known, KnownClip, MediaMap

Gone = Future[None]
"""Done when nobody wants a request's pictures any more."""
Content = bytes | npt.NDArray[np.uint8] | Frames
"""An encoded file, uint8[H, W, 3] pixels, or the frames of a video."""
Task = tuple[int, int] | ClipTask
"""Lower and upper pixel limit of a picture; or what is wanted of a video."""
Done = Processed | ProcessedClip


class Found(NamedTuple):
    """What a picture or video is; its features only while an item holds them, or just decoded."""

    known: Known | KnownClip
    features: npt.NDArray[np.uint8] | None
    embeddings: npt.NDArray[np.float32] | None = None
    """Rows that came in place of a picture."""


class _Decode:
    """One decode, and how many requests wait for it."""

    __slots__ = ("future", "num_waiting")

    def __init__(self, future: Future[Done]) -> None:
        self.future = future
        self.num_waiting = 0


class Decodes:
    """Finds pictures by their key; thread-safe."""

    def __init__(self, decoder: Decoder, media_map: MediaMap) -> None:
        """Keep the parts; the caller owns and closes the decoder."""
        self._decoder = decoder
        self._media_map = media_map
        self._lock = threading.RLock()  # an inline decoder calls back within submit
        self._on_their_way: dict[bytes, _Decode] = {}
        self._held: weakref.WeakValueDictionary[bytes, npt.NDArray[np.uint8]] = (
            weakref.WeakValueDictionary()
        )

    @property
    def num_running(self) -> int:
        """Decodes that somebody waits for."""
        return len(self._on_their_way)

    @property
    def num_held(self) -> int:
        """Pictures whose features are in memory."""
        return len(self._held)

    def find(
        self, key: bytes, content: Content, task: Task, gone: Gone | None = None
    ) -> "Found | Future[Done]":
        """Give what is known of a picture, or a decode to wait for with `wait`."""
        with self._lock:
            known = self._media_map.get(key)
            if known is not None:
                return Found(known, self._held.get(key))
            return self._join(key, content, task, gone)

    def decode(
        self, key: bytes, content: Content, task: Task, gone: Gone | None = None
    ) -> Future[Done]:
        """Decode a picture whether it is known or not.

        Args:
            key: See `media_key` and `clip_key`; equal keys share a decode that is on its way.
            content: What the key was made of.
            task: How it is to be processed.
            gone: When done, this caller waits no longer; a decode that nobody waits for is
                abandoned.
        """
        with self._lock:
            return self._join(key, content, task, gone)

    def _join(self, key: bytes, content: Content, task: Task, gone: Gone | None) -> Future[Done]:
        decode = self._on_their_way.get(key)
        if decode is None:
            decode = _Decode(self._submit(content, task))
            self._on_their_way[key] = decode
            decode.future.add_done_callback(functools.partial(self._arrived, key))
        decode.num_waiting += 1
        own: Future[Done] = Future()
        decode.future.add_done_callback(functools.partial(_pass_on, own))
        if gone is not None:
            gone.add_done_callback(lambda _: self._leave(key, decode, own))
        return own

    def _submit(self, content: Any, task: Task) -> Future[Any]:
        if isinstance(task, ClipTask):
            return self._decoder.submit_clip(content, task)
        return self._decoder.submit(content, *task)

    def _leave(self, key: bytes, decode: _Decode, own: Future[Done]) -> None:
        if not own.cancel():
            return  # it has come
        with self._lock:
            decode.num_waiting -= 1
            if decode.num_waiting:
                return
            self._forget(key, decode.future)
        self._decoder.abandon(decode.future)

    def _arrived(self, key: bytes, future: Future[Done]) -> None:
        with self._lock:
            self._forget(key, future)
            if not future.cancelled() and future.exception() is None:
                processed = future.result()
                self._media_map.put(key, known_of(processed))
                self._held[key] = processed.features

    def _forget(self, key: bytes, future: Future[Done]) -> None:
        decode = self._on_their_way.get(key)
        if decode is not None and decode.future is future:
            del self._on_their_way[key]


def wait(future: Future[Done]) -> Found:
    """Wait for a decode.

    Raises:
        RequestError: The picture cannot be used.
        EngineStopped: The decoder was closed, or the caller's request is gone.
    """
    try:
        processed = future.result()
    except CancelledError:
        raise EngineStopped("the engine was closed while pictures waited; make a new one") from None
    return Found(known_of(processed), processed.features)


def known_of(processed: Done) -> Known | KnownClip:
    """The part of a decode that is remembered."""
    if isinstance(processed, ProcessedClip):
        grid, rows = processed.grid_thw, processed.num_rows
        return KnownClip(processed.identities, grid, rows, processed.timing)
    return Known(processed.identity, processed.grid_thw, processed.num_rows)


def _pass_on(own: Future[Done], done: Future[Done]) -> None:
    """Give one of the waiting requests what its decode gave, unless it has left."""
    if done.cancelled():
        own.cancel()
    elif own.set_running_or_notify_cancel():
        error = done.exception()
        if error is None:
            own.set_result(done.result())
        else:
            own.set_exception(error)
