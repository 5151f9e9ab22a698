"""Requests on their way to the loop: pictures decoded, prompts built, sampling checked. Host only.

What blocks or can fail because of what a caller sent happens here, on preparing threads; the loop
gets sequences that are ready to run.
"""

import dataclasses
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxmm.answer import Answer, OnEvent, tell
from jaxmm.errors import EngineStopped, JaxmmError, Overloaded, RequestError
from jaxmm.host.decodes import Gone
from jaxmm.host.item import Prompt
from jaxmm.host.messages import read_text
from jaxmm.host.sequence import Sequence
from jaxmm.loop import Loop
from jaxmm.request import Request
from jaxmm.start import Parts

logger = logging.getLogger(__name__)

_PREPARE_THREADS = 4


class _Entry(NamedTuple):
    """A request that is being prepared."""

    request: Request
    on_event: OnEvent
    gone: Gone


class Intake:
    """Prepares requests and hands them to the loop; thread-safe."""

    def __init__(self, parts: Parts, loop: Loop, max_waiting: int) -> None:
        """Take the parts; `max_waiting` bounds requests in preparation and in the queue."""
        self._parts = parts
        self._loop = loop
        self._max_waiting = max_waiting
        self._preparing: dict[str, _Entry] = {}
        self._refusal: EngineStopped | None = None
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(_PREPARE_THREADS, thread_name_prefix="jaxmm-prepare")

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Start preparing a request; see `Engine.submit`."""
        with self._lock:
            if self._refusal is not None:
                raise EngineStopped(str(self._refusal))
            if len(self._preparing) + self._parts.scheduler.num_waiting >= self._max_waiting:
                raise Overloaded(
                    f"{self._max_waiting} requests are waiting, which is the limit "
                    "(max_waiting). Send the request again later."
                )
            if request.id in self._preparing or self._loop.serves(request.id):
                raise RequestError(f"request id {request.id!r} is in use")
            entry = self._preparing[request.id] = _Entry(request, on_event, Future())
            self._threads.submit(self._prepare, entry)

    def abort(self, request_id: str) -> None:
        """Drop a request that is still being prepared, and the decodes that only it waits for."""
        with self._lock:
            entry = self._preparing.pop(request_id, None)
        if entry is not None:
            entry.gone.set_result(None)

    def load_features(self, answer: Answer, sequence: Sequence, index: int) -> None:
        """Decode a picture whose rows turned out to be in no cache; the loop hears of it."""
        self._threads.submit(self._load_features, answer, sequence, index)

    def refuse_all(self, error: EngineStopped) -> None:
        """Take no more requests."""
        with self._lock:
            self._refusal = self._refusal or error

    def end_all(self, error: EngineStopped) -> None:
        """End every request that is being prepared, and take no more."""
        self.refuse_all(error)
        with self._lock:  # whatever is still being prepared finds itself gone from here
            entries = list(self._preparing.values())
            self._preparing.clear()
        for entry in entries:
            entry.gone.set_result(None)
            tell(entry.request, entry.on_event, error)

    def close(self) -> None:
        """Wait for the preparing threads and end them."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, entry: "_Entry") -> None:
        """Turn a request into sequences, and hand them to the loop."""
        if entry.gone.done():
            return  # aborted in the queue: its pictures need no decoding
        try:
            answer = self._answer(entry, self._prompt(entry))
        except Exception as error:  # noqa: BLE001  # a fault here must cost this request alone
            if self._leave(entry):
                tell(entry.request, entry.on_event, _refusal(error, entry.request))
            return
        self._loop.post(lambda: self._hand_over(entry, answer))

    def _hand_over(self, entry: "_Entry", answer: Answer) -> None:
        """On the loop's thread."""
        with self._lock:  # at no moment is its id in neither place
            wanted = self._leave(entry)
            if wanted:
                self._loop.enter(answer)
        if wanted:
            self._loop.start(answer)

    def _leave(self, entry: "_Entry") -> bool:
        """End a preparation; False when the request was aborted, or ended with the engine."""
        with self._lock:
            wanted = self._preparing.get(entry.request.id) is entry
            if wanted:
                del self._preparing[entry.request.id]
            return wanted

    def _prompt(self, entry: "_Entry") -> Prompt:
        request = entry.request
        given = [request.messages, request.text, request.token_ids]
        if sum(value is not None for value in given) != 1:
            raise RequestError("give exactly one of messages, text and token_ids")
        read_text("salt", request.salt)
        parts, tokenizer = self._parts, self._parts.tokenizer
        if request.messages is not None:
            ids, slots = tokenizer.encode_chat(request.messages)
        elif request.text is not None:
            ids, slots = tokenizer.encode_text(request.text), np.zeros(0, np.int64)
        else:
            ids = parts.check_ids(request.token_ids or ())
            slots = np.flatnonzero(ids == parts.model.image_token_id)
        if len(slots) != len(request.images):
            raise RequestError(
                f"the prompt has places for {len(slots)} images and {len(request.images)} were sent"
            )
        items = parts.preparer.prepare_items(
            request.images,
            min_pixels=request.min_pixels,
            max_pixels=request.max_pixels,
            mm_hashes=request.mm_hashes,
            salt=request.salt,
            gone=entry.gone,
        )
        for item in items:  # refused here, before the loop could meet it
            parts.sizes.buckets.lane_patches(parts.packed_patches(item))
        return parts.preparer.prompt(ids, slots, items)

    def _answer(self, entry: "_Entry", prompt: Prompt) -> Answer:
        parts, request, params = self._parts, entry.request, entry.request.sampling
        parts.check_sampling(params)
        sequences = tuple(
            Sequence(
                request_id=request.id,
                index=i,
                prompt=prompt,
                sampling=params,
                salt=request.salt,
                seed=_seed_words(params.seed, i),
            )
            for i in range(params.n)
        )
        return Answer.start(
            request,
            sequences,
            entry.on_event,
            token_bytes=parts.tokenizer.token_bytes,
            special_ids=parts.tokenizer.special_ids,
            eos_ids=parts.eos_ids,
            gone=entry.gone,
        )

    def _load_features(self, answer: Answer, sequence: Sequence, index: int) -> None:
        request = answer.request
        item = sequence.prompt.items[index]
        try:
            features = self._parts.preparer.load_features(
                request.images[index],
                item,
                min_pixels=request.min_pixels,
                max_pixels=request.max_pixels,
                salt=request.salt,
                gone=answer.gone,
            )
        except Exception as error:  # noqa: BLE001  # as in _prepare
            failure = _refusal(error, request)
            self._loop.post(lambda: self._loop.fail(sequence, failure))
            return
        found = dataclasses.replace(item, features=features)
        self._loop.post(lambda: self._loop.provide(sequence, index, found))


def _refusal(error: Exception, request: Request) -> JaxmmError:
    """What a caller hears of an error; of a fault of ours the type alone, the log has the rest."""
    if isinstance(error, JaxmmError):
        return error
    logger.error("prepare failed request=%s", request.id, exc_info=error)
    return RequestError(f"the request could not be prepared: {type(error).__name__}")


def _seed_words(seed: int | None, index: int) -> tuple[int, int]:
    """The key of one completion's draws, as two int32 words; fresh where no seed is given."""
    entropy = None if seed is None else [seed & (2**64 - 1), index]
    first, second = np.random.SeedSequence(entropy).generate_state(2).view(np.int32).tolist()
    return first, second
