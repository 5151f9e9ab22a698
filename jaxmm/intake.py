"""Requests on their way to the loop: pictures decoded, prompts built, sampling checked. Host only.

What blocks or can fail because of what a caller sent happens here, on preparing threads; the loop
gets sequences that are ready to run.
"""

import dataclasses
import logging
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.answer import Answer, OnEvent, tell
from jaxmm.cost import Cost, estimate
from jaxmm.errors import EngineStopped, JaxmmError, Overloaded, RequestError
from jaxmm.host.decodes import Gone
from jaxmm.host.item import Item, Modality, Prompt
from jaxmm.host.limits import check_fits
from jaxmm.host.messages import read_text
from jaxmm.host.placeholders import fold_expanded
from jaxmm.host.prepare import PreparedClip
from jaxmm.host.pruning import check_rate, clip_of
from jaxmm.host.scoring import Scores, Scoring
from jaxmm.host.sequence import Sequence
from jaxmm.loop import Loop
from jaxmm.places import check_expanded, check_pixel_limits, check_places, split_hashes
from jaxmm.pruner import PrunedVideos, Pruner
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

    def __init__(
        self,
        replicas: Tokens[Parts],
        loop: Loop,
        *,
        max_waiting: int,
        pruning_rate: float = 0.0,
    ) -> None:
        """Take the parts of each replica.

        Args:
            max_waiting: Bounds requests in preparation and in the queues.
            pruning_rate: Of videos, where a request does not say.
        """
        self._parts = parts = replicas[0]  # what is used here they share
        self._schedulers = [replica.scheduler for replica in replicas]
        self._loop = loop
        self._max_waiting = max_waiting
        self._pruning_rate = pruning_rate
        self._pruner = Pruner(parts.known_prunings)
        self._preparing: dict[str, _Entry] = {}
        self._num_estimates = 0
        self._refusal: EngineStopped | None = None
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(_PREPARE_THREADS, thread_name_prefix="jaxmm-prepare")

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Start preparing a request; see `Engine.submit`."""
        with self._lock:
            self._check_room()
            if request.id in self._preparing or self._loop.serves(request.id):
                raise RequestError(f"request id {request.id!r} is in use")
            entry = self._preparing[request.id] = _Entry(request, on_event, Future())
            self._threads.submit(self._prepare, entry)

    def estimate(self, request: Request) -> Future[Cost]:
        """Work out what a request would cost; it is prepared like any other, and not run.

        Raises:
            EngineStopped, Overloaded: As `submit`.
        """
        future: Future[Cost] = Future()
        with self._lock:
            self._check_room()
            self._num_estimates += 1
            self._threads.submit(self._estimate, request, future)
        future.add_done_callback(self._estimated)
        return future

    @property
    def num_preparing(self) -> int:
        """Requests that are being prepared."""
        return len(self._preparing)

    def abort(self, request_id: str) -> None:
        """Drop a request that is still being prepared, and the decodes that only it waits for."""
        with self._lock:
            entry = self._preparing.pop(request_id, None)
        if entry is not None:
            entry.gone.set_result(None)

    def load_features(self, answer: Answer, sequence: Sequence, index: int) -> None:
        """Decode an item whose rows turned out to be in no cache; the loop hears of it.

        On the loop's thread. All steps of a video come together, with the first that is missing.
        """
        span = clip_of(sequence.prompt.items, index)
        if not any(step in sequence.missing for step in range(span.start, index)):
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

    def _check_room(self) -> None:
        """Under the lock."""
        if self._refusal is not None:
            raise EngineStopped(str(self._refusal))
        preparing = len(self._preparing) + self._num_estimates
        waiting = sum(scheduler.num_waiting for scheduler in self._schedulers)
        if preparing + waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._max_waiting} requests are waiting, which is the limit "
                "(max_waiting). Send the request again later."
            )

    def _estimate(self, request: Request, future: Future[Cost]) -> None:
        gone: Gone = Future()
        future.add_done_callback(lambda _: gone.set_result(None))
        entry = _Entry(request, lambda _: None, gone)
        try:
            videos = self._videos(entry, self._prompt(entry))
            self._check_steps(videos)
            sequence = self._answer(entry, videos.expected()).sequences[0]
        except Exception as error:  # noqa: BLE001  # as in _prepare
            _settle(future, _refusal(error, request))
            return
        scored = frozenset(index for clip, _ in videos.unknown.values() for index in clip)
        self._loop.post(lambda: self._tell_cost(request, sequence, scored, future))

    def _tell_cost(
        self, request: Request, sequence: Sequence, scored: frozenset[int], future: Future[Cost]
    ) -> None:
        """On the loop's thread."""
        try:
            cost = estimate(sequence, self._loop.home_of(sequence, request.keep), scored)
        except Exception as error:  # noqa: BLE001  # as in _prepare
            _settle(future, _refusal(error, request))
            return
        _settle(future, cost)

    def _estimated(self, _: Future[Cost]) -> None:
        with self._lock:
            self._num_estimates -= 1

    def _prepare(self, entry: "_Entry") -> None:
        """Turn a request into sequences, and hand them to the loop.

        Where its videos are pruned and not known, they are encoded first; see `_finish`.
        """
        if entry.gone.done():
            return  # aborted in the queue: its pictures need no decoding
        try:
            videos = self._videos(entry, self._prompt(entry))
            if videos.unknown:
                self._score(entry, videos)
                return
        except Exception as error:  # noqa: BLE001  # a fault here must cost this request alone
            self._refuse(entry, error)
            return
        self._finish(entry, videos, [])

    def _finish(self, entry: "_Entry", videos: PrunedVideos, scores: list[Scores]) -> None:
        """With the scores of the videos that were not known."""
        try:
            self._pruner.choose(videos, scores)
            answer = self._answer(entry, videos.pruned())
            answer.home = videos.home
        except Exception as error:  # noqa: BLE001  # as in _prepare
            self._refuse(entry, error)
            return
        self._loop.post(lambda: self._hand_over(entry, answer))

    def _videos(self, entry: "_Entry", prompt: Prompt) -> PrunedVideos:
        rate = entry.request.video_pruning_rate
        rate = self._pruning_rate if rate is None else check_rate(rate)
        return self._pruner.find(prompt, rate, entry.request.salt)

    def _score(self, entry: "_Entry", videos: PrunedVideos) -> None:
        """Have videos encoded, unless the request is refused for what is known of it already."""
        parts = self._parts
        sequences = self._answer(entry, videos.expected()).sequences
        check_fits(sequences[0], parts.scheduler.config, parts.pool, parts.arena)
        self._check_steps(videos)
        scoring = Scoring(
            self._pruner.load_unknown(
                videos,
                lambda clip: self._load_steps(entry.request, entry.gone, videos.prompt.items, clip),
            ),
            videos.salt,
            lambda scores: self._threads.submit(self._finish, entry, videos, scores),
            num_tokens=sum(map(parts.scheduler.expected_tokens, sequences)),
            is_gone=entry.gone.done,
        )

        def begin() -> None:
            videos.home = self._loop.score(scoring, entry.request.keep)

        self._loop.post(begin)

    def _check_steps(self, videos: PrunedVideos) -> None:
        for first in videos.unknown:
            self._parts.scheduler.scorings.check(videos.prompt.items[first])

    def _refuse(self, entry: "_Entry", error: Exception) -> None:
        if self._leave(entry):
            tell(entry.request, entry.on_event, _refusal(error, entry.request))

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
        if request.videos and not parts.preparer.takes_videos:
            raise RequestError(f"{parts.model_name} takes no videos; send pictures")
        expanded = None
        if request.messages is not None:
            ids, slots = tokenizer.encode_chat(request.messages, request.tools)
        elif request.text is not None:
            ids, slots = tokenizer.encode_text(request.text), np.zeros(0, np.int64)
        else:
            ids = parts.check_ids(request.token_ids or ())
            slots = np.flatnonzero(np.isin(ids, parts.placeholder_ids))
            if len(slots) > len(request.images) + len(request.videos) and parts.markers:
                expanded = ids
                ids, slots = fold_expanded(ids, *parts.markers, *parts.placeholder_ids)
        is_video = ids[slots] == parts.model.video_token_id
        check_places(request, is_video, is_expanded=expanded is not None)
        prompt = parts.preparer.prompt_of(ids, slots, self._media(entry, is_video))
        if expanded is not None:
            check_expanded(expanded, prompt)
        for item in prompt.items:  # refused here, before the loop could meet it
            if item.embeddings is None:
                parts.sizes.buckets.lane_patches(parts.packed_patches(item))
        return prompt

    def _media(self, entry: "_Entry", is_video: npt.NDArray[np.bool_]) -> list[Item | PreparedClip]:
        """A request's images and videos in the order of their places."""
        request, preparer = entry.request, self._parts.preparer
        check_pixel_limits(request)
        preparer.check_count(len(is_video), "images and videos" if is_video.any() else "images")
        hashes = split_hashes(request.mm_hashes, is_video)
        common: dict[str, Any] = {
            "max_pixels": request.max_pixels,
            "salt": request.salt,
            "gone": entry.gone,
        }
        images: Iterator[Item] = iter(
            preparer.prepare_items(
                request.images, min_pixels=request.min_pixels, mm_hashes=hashes[0], **common
            )
        )
        clips: Iterator[PreparedClip] = iter(
            preparer.prepare_clips(
                request.videos,
                fps=request.fps,
                num_frames=request.num_frames,
                mm_hashes=hashes[1],
                **common,
            )
        )
        return [next(clips) if video else next(images) for video in is_video]

    def _answer(self, entry: "_Entry", prompt: Prompt) -> Answer:
        parts, request, params = self._parts, entry.request, entry.request.sampling
        parts.check_sampling(params)
        grammar = None if params.grammar is None else parts.grammars.compile(params.grammar)
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
        if grammar is not None:
            for sequence in sequences:
                sequence.matcher = grammar.start(sequence.held_back(parts.eos_ids))
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
        items = sequence.prompt.items
        span = clip_of(items, index)
        try:
            if items[index].modality is Modality.VIDEO:
                features = self._load_steps(answer.request, answer.gone, items, span)
            else:
                features = [self._load_image(answer, items, index)]
        except Exception as error:  # noqa: BLE001  # as in _prepare
            failure = _refusal(error, answer.request)
            self._loop.post(lambda: self._loop.fail(sequence, failure))
            return
        found = [
            dataclasses.replace(item, features=part)
            for item, part in zip(items[span.start : span.stop], features, strict=True)
        ]
        self._loop.post(lambda: self._loop.provide(sequence, span.start, found))

    def _load_image(
        self, answer: Answer, items: tuple[Item, ...], index: int
    ) -> npt.NDArray[np.uint8]:
        request = answer.request
        number = sum(item.modality is Modality.IMAGE for item in items[:index])
        return self._parts.preparer.load_features(
            request.images[number],
            items[index],
            min_pixels=request.min_pixels,
            max_pixels=request.max_pixels,
            num_images=len(request.images),
            salt=request.salt,
            gone=answer.gone,
        )

    def _load_steps(
        self, request: Request, gone: Gone, items: tuple[Item, ...], span: range
    ) -> list[npt.NDArray[np.uint8]]:
        begins = [i.modality is Modality.VIDEO and i.step == 0 for i in items[: span.start]]
        return self._parts.preparer.load_steps(
            request.videos[sum(begins)],
            items[span.start : span.stop],
            fps=request.fps,
            num_frames=request.num_frames,
            max_pixels=request.max_pixels,
            salt=request.salt,
            gone=gone,
        )


def _settle(future: Future[Cost], outcome: Cost | JaxmmError) -> None:
    if not future.set_running_or_notify_cancel():
        return  # nobody waits for it any more
    if isinstance(outcome, JaxmmError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _refusal(error: Exception, request: Request) -> JaxmmError:
    """What a caller hears of an error; of a fault of ours the type alone, the log has the rest, and
    it is no `RequestError`: the request may be right, and can be tried again."""
    if isinstance(error, JaxmmError):
        return error
    logger.error("prepare failed request=%s", request.id, exc_info=error)
    return JaxmmError(f"the request could not be prepared: {type(error).__name__}")


def _seed_words(seed: int | None, index: int) -> tuple[int, int]:
    """The key of one completion's draws, as two int32 words; fresh where no seed is given."""
    entropy = None if seed is None else [seed & (2**64 - 1), index]
    first, second = np.random.SeedSequence(entropy).generate_state(2).view(np.int32).tolist()
    return first, second
