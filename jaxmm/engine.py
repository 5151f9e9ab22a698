"""The engine: prepare on the host, plan, step on the device, fetch, emit. Host only.

One thread runs the loop. It dispatches step n + 1 before it reads what step n sampled, so the
device never waits for Python; the device itself feeds each sampled token to the next step.
Pictures are decoded and prompts built on other threads and processes, before a request reaches
the loop.
"""

import asyncio
import dataclasses
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Sequence_
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from jaxmm.answer import Answer, OnEvent
from jaxmm.config import EngineConfig
from jaxmm.errors import EngineStopped, JaxmmError, Overloaded, RequestError
from jaxmm.host.batch import SampleRow, build_batch, sampled_rows
from jaxmm.host.item import Item, Prompt
from jaxmm.host.lanes import pack_lane, packed_patches
from jaxmm.host.messages import read_text
from jaxmm.host.plan import EncodeJob, Plan
from jaxmm.host.sequence import Sequence, Status
from jaxmm.request import Delta, Request, TokenLogprob
from jaxmm.start import Parts, build_parts

logger = logging.getLogger(__name__)

_PREPARE_THREADS = 4
_AHEAD = 1  # steps dispatched beyond the one whose tokens are read


class _Pending(NamedTuple):
    """A step on the device whose tokens have not been read."""

    rows: list[SampleRow]
    sampled: Any
    logprobs: bool


class Engine:
    """Serves requests with one model. Thread-safe; close it, or use it in a `with` block."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        """Load the model, compile every bucket, and start the loop.

        Args:
            config: Settings; the defaults serve the small model that jaxmm ships.

        Raises:
            ConfigError: Settings that cannot work together.
            ModelError: A checkpoint that cannot be loaded.
        """
        self.config = config or EngineConfig()
        self._parts: Parts = build_parts(self.config)
        self.tokenizer = self._parts.tokenizer
        self.model_name = self._parts.model_name
        self.sizes = self._parts.sizes
        self.ledger = self._parts.ledger
        self.scheduler = self._parts.scheduler
        self._answers: dict[str, Answer] = {}
        self._primed: dict[Sequence, int] = {}
        self._pending: deque[_Pending] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._preparing: dict[str, tuple[Request, OnEvent]] = {}
        self._lock = threading.Lock()
        self._prepare_pool = ThreadPoolExecutor(
            _PREPARE_THREADS, thread_name_prefix="jaxmm-prepare"
        )
        self._stop = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxmm-engine", daemon=True)
        self._thread.start()

    # Callers' side

    @property
    def healthy(self) -> bool:
        """The loop runs."""
        return self._thread.is_alive() and self._failure is None

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Start a request.

        Args:
            request: Its id must not be in use.
            on_event: Gets each Delta, on the engine's thread, or the one error that ends the
                request (then also from a preparing thread).

        Raises:
            EngineStopped: The engine is closed or its loop has failed.
            Overloaded: Too many requests are waiting.
            RequestError: The id is in use.
        """
        with self._lock:
            if not self.healthy or self._stop:
                raise EngineStopped(f"the engine has stopped: {self._failure or 'it was closed'}")
            if len(self._preparing) + self.scheduler.num_waiting >= self.config.max_waiting:
                raise Overloaded(
                    f"{self.config.max_waiting} requests are waiting, which is the limit "
                    "(max_waiting). Send the request again later."
                )
            if request.id in self._preparing or request.id in self._answers:
                raise RequestError(f"request id {request.id!r} is in use")
            self._preparing[request.id] = request, on_event
            self._prepare_pool.submit(self._prepare, request, on_event)

    def abort(self, request_id: str) -> None:
        """End a request at once; an unknown id is no error. Its caller hears nothing more."""
        with self._lock:
            self._preparing.pop(request_id, None)
        self._inbox.put(lambda: self._abort(request_id))

    async def astream(self, request: Request) -> AsyncIterator[Delta]:
        """Serve a request, giving what each step adds; leaving the loop early aborts it.

        Raises:
            RequestError, Overloaded, EngineStopped: See `submit`; the request has ended.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Delta | JaxmmError] = asyncio.Queue()

        def on_event(event: Delta | JaxmmError) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the caller's event loop is closed: nobody is left to hear
                self.abort(request.id)

        self.submit(request, on_event)
        num_open = request.sampling.n
        try:
            while num_open:
                event = await events.get()
                if isinstance(event, JaxmmError):
                    num_open = 0
                    raise event
                num_open -= event.finish_reason is not None
                yield event
        finally:
            if num_open:
                self.abort(request.id)

    def flush_caches(self) -> None:
        """Forget all prefixes, image rows and known files that no running request uses."""
        done = threading.Event()

        def flush() -> None:
            self._parts.prefix_cache.clear()
            self._parts.arena.clear()
            self._parts.media_map.clear()
            done.set()

        self._inbox.put(flush)
        while not done.wait(0.1):
            if not self.healthy:
                raise EngineStopped(f"the engine has stopped: {self._failure or 'it was closed'}")

    def close(self) -> None:
        """End all requests with EngineStopped and free what the engine holds."""
        with self._lock:
            if self._stop:
                return
            self._stop = True
        self._inbox.put(lambda: None)
        self._thread.join()
        self._prepare_pool.shutdown(wait=True, cancel_futures=True)
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Preparing threads

    def _prepare(self, request: Request, on_event: OnEvent) -> None:
        """Turn a request into sequences, and hand them to the loop."""
        if not self._is_preparing(request):
            return  # aborted in the queue: its pictures need no decoding
        try:
            prompt = self._prompt(request)
            answer = self._answer(request, prompt, on_event)
        except Exception as error:  # noqa: BLE001  # a fault here must cost this request alone
            self._refuse(request, on_event, _refusal(error, request))
            return
        self._inbox.put(lambda: self._add(answer))

    def _refuse(self, request: Request, on_event: OnEvent, error: JaxmmError) -> None:
        with self._lock:
            wanted = self._leave_preparing(request)
        if wanted:
            self._tell(request, on_event, error)

    def _is_preparing(self, request: Request) -> bool:
        """False once the request was aborted, or ended with the engine."""
        entry = self._preparing.get(request.id)
        return entry is not None and entry[0] is request

    def _leave_preparing(self, request: Request) -> bool:
        """Under the lock: whether the request was still wanted."""
        wanted = self._is_preparing(request)
        if wanted:
            del self._preparing[request.id]
        return wanted

    def _prompt(self, request: Request) -> Prompt:
        given = [request.messages, request.text, request.token_ids]
        if sum(value is not None for value in given) != 1:
            raise RequestError("give exactly one of messages, text and token_ids")
        read_text("salt", request.salt)
        preparer, tokenizer = self._parts.preparer, self.tokenizer
        if request.messages is not None:
            ids, slots = tokenizer.encode_chat(request.messages)
        elif request.text is not None:
            ids, slots = tokenizer.encode_text(request.text), np.zeros(0, np.int64)
        else:
            ids = self._parts.check_ids(request.token_ids or ())
            slots = np.flatnonzero(ids == self._parts.model.image_token_id)
        if len(slots) != len(request.images):
            raise RequestError(
                f"the prompt has places for {len(slots)} images and {len(request.images)} were sent"
            )
        items = preparer.prepare_items(
            request.images,
            min_pixels=request.min_pixels,
            max_pixels=request.max_pixels,
            mm_hashes=request.mm_hashes,
            salt=request.salt,
        )
        for item in items:  # refused here, before the loop could meet it
            self.sizes.buckets.lane_patches(self._packed(item))
        return preparer.prompt(ids, slots, items)

    def _answer(self, request: Request, prompt: Prompt, on_event: OnEvent) -> Answer:
        params = request.sampling
        self._parts.check_sampling(params)
        entropy = params.seed
        sequences = tuple(
            Sequence(
                request_id=request.id,
                index=i,
                prompt=prompt,
                sampling=params,
                salt=request.salt,
                seed=_seed_words(entropy, i),
            )
            for i in range(params.n)
        )
        return Answer.start(
            request,
            sequences,
            on_event,
            token_bytes=self.tokenizer.token_bytes,
            special_ids=self.tokenizer.special_ids,
            eos_ids=self._parts.eos_ids,
        )

    def _load_features(self, sequence: Sequence, index: int) -> None:
        """Decode a picture whose rows turned out to be in no cache."""
        request = self._answers[sequence.request_id].request
        item = sequence.prompt.items[index]

        def work() -> None:
            try:
                features = self._parts.preparer.load_features(
                    request.images[index],
                    item,
                    min_pixels=request.min_pixels,
                    max_pixels=request.max_pixels,
                    salt=request.salt,
                )
            except Exception as error:  # noqa: BLE001  # as in _prepare
                failure = _refusal(error, request)
                self._inbox.put(lambda: self._fail(sequence, failure))
                return
            found = dataclasses.replace(item, features=features)
            self._inbox.put(lambda: self._provide(sequence, index, found))

        self._prepare_pool.submit(work)

    # The loop

    def _run(self) -> None:
        self.ledger.serve_from(threading.get_ident())
        try:
            while not self._stop:
                self._take_inbox()
                self._turn()
        except BaseException as error:  # told to every caller
            self._failure = error
            logger.exception("engine loop ended")
        finally:
            self._end_all()

    def _take_inbox(self) -> None:
        """Do what other threads asked for; with nothing to compute, wait for that."""
        idle = not self._pending and not self._plannable
        while True:
            try:
                action = self._inbox.get(block=idle)
            except queue.Empty:
                return
            action()
            idle = False

    @property
    def _plannable(self) -> bool:
        return self.scheduler.has_work and not self._stalled

    _stalled = False
    """The last plan had nothing to compute, and nothing has changed since."""

    def _turn(self) -> None:
        """Dispatch the next step, then read the one before it."""
        plan = self.scheduler.plan() if self._plannable else None
        dispatched = False
        if plan is not None:
            for sequence, index in plan.missing_features:
                self._load_features(sequence, index)
            if plan.num_tokens:
                self._dispatch(plan)
                dispatched = True
        if self._pending and (len(self._pending) > _AHEAD or not dispatched):
            self._read(self._pending.popleft())
        elif not dispatched:
            self._stalled = True

    def _dispatch(self, plan: Plan) -> None:
        runner = self._parts.runner
        for jobs in self._lanes(plan.encodes):
            runner.encode(self._lane(jobs))
        self._prime(plan)
        layout = runner.layout(plan.num_tokens)
        batch = build_batch(
            plan,
            layout,
            page_size=self.sizes.page_size,
            num_ids=self.tokenizer.vocab_size,
            eos_ids=self._parts.eos_ids,
        )
        sampled = runner.step(batch)
        rows = sampled_rows(plan)
        logprobs = bool(batch["any_logprobs"])
        self._pending.append(_Pending(rows, sampled, logprobs))
        self._parts.padding.add(plan.num_tokens, layout.num_tokens)
        self.ledger.check(f"a step of {plan.num_tokens} tokens in bucket {layout.num_tokens}")

    def _lanes(self, jobs: Sequence_[EncodeJob]) -> list[list[EncodeJob]]:
        """Split jobs so that each part fits the largest lane, in order."""
        lanes: list[list[EncodeJob]] = []
        room = 0
        for job in jobs:
            size = self._packed(job.item)
            if size > room:
                lanes.append([])
                room = self.sizes.buckets.patches[-1]
            lanes[-1].append(job)
            room -= size
        return lanes

    def _lane(self, jobs: list[EncodeJob]) -> Any:
        lane_patches = self.sizes.buckets.lane_patches(sum(self._packed(j.item) for j in jobs))
        vision = self._parts.model.vision
        return pack_lane(
            [job.item.features for job in jobs if job.item.features is not None],
            [job.item.grid_thw for job in jobs],
            [job.lease.slots for job in jobs],
            lane_patches=lane_patches,
            patch_values=vision.patch_values,
            window_patches=vision.window_patches,
            with_sizes=vision.position_side > 0,
            drop_slot=self.sizes.num_rows,
        )

    def _packed(self, item: Item) -> int:
        return packed_patches(item.grid_thw, self._parts.model.vision.window_patches)

    def _prime(self, plan: Plan) -> None:
        """Tell the device the history of sequences that were just admitted and need it."""
        for sequence, _, _ in plan.extends:
            params = sequence.sampling
            if not params.changes_logits or self._primed.get(sequence) == sequence.num_admissions:
                continue
            self._primed[sequence] = sequence.num_admissions
            prompt = sequence.prompt
            self._parts.runner.prime(
                sequence.slot,
                prompt.ids[prompt.item_index < 0],
                np.array(sequence.output_ids, np.int64),
                dict(params.logit_bias),
            )

    def _read(self, pending: _Pending) -> None:
        """Wait for a step's tokens, and pass them on."""
        fetched = self._parts.runner.fetch(pending.sampled, logprobs=pending.logprobs)
        tokens: list[int] = fetched.token_B[: len(pending.rows)].tolist()
        for r, (row, token) in enumerate(zip(pending.rows, tokens, strict=True)):
            sequence = row.sequence
            if sequence.status is Status.FINISHED:
                continue  # it stopped, or was aborted, while this step was on its way
            self.scheduler.append(sequence, token)
            wanted = sequence.sampling.logprobs
            logprob = None if wanted is None else _token_logprob(fetched, r, token, wanted)
            answer = self._answers[sequence.request_id]
            delta = answer.take(sequence, token, logprob)
            if delta.finish_reason is not None:  # all is given back before anybody hears of it
                self.scheduler.finish(sequence, delta.finish_reason)
                self._close(answer, sequence)
            self._tell(answer.request, answer.on_event, delta)
        self._stalled = False

    def _add(self, answer: Answer) -> None:
        with self._lock:
            if not self._leave_preparing(answer.request):
                return
            self._answers[answer.request.id] = answer
        try:
            self.scheduler.add(*answer.sequences)
        except JaxmmError as error:
            del self._answers[answer.request.id]
            self._tell(answer.request, answer.on_event, error)
            return
        self._stalled = False

    def _abort(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self.scheduler.abort(request_id)
            for sequence in answer.sequences:
                self._primed.pop(sequence, None)
            self._stalled = False

    def _fail(self, sequence: Sequence, error: JaxmmError) -> None:
        answer = self._answer_of(sequence)
        if answer is not None:
            self._abort(sequence.request_id)
            self._tell(answer.request, answer.on_event, error)

    def _provide(self, sequence: Sequence, index: int, item: Item) -> None:
        if self._answer_of(sequence) is not None:
            self.scheduler.provide_features(sequence, index, item)
            self._stalled = False

    def _answer_of(self, sequence: Sequence) -> Answer | None:
        """None when the request has ended, even if another one has its id now."""
        answer = self._answers.get(sequence.request_id)
        return answer if answer is not None and sequence in answer.sequences else None

    def _close(self, answer: Answer, sequence: Sequence) -> None:
        self._primed.pop(sequence, None)
        if answer.num_open == 0:
            del self._answers[answer.request.id]

    def _end_all(self) -> None:
        error = EngineStopped(f"the engine has stopped: {self._failure or 'it was closed'}")
        with self._lock:  # whatever is still being prepared finds itself gone from here
            listeners = list(self._preparing.values())
            listeners += [(answer.request, answer.on_event) for answer in self._answers.values()]
            self._preparing.clear()
            self._answers.clear()
        for request, on_event in listeners:
            self._tell(request, on_event, error)

    def _tell(self, request: Request, on_event: OnEvent, event: Delta | JaxmmError) -> None:
        """Pass an event on; a listener that fails ends its own request, and nobody else's."""
        try:
            on_event(event)
        except Exception:
            logger.exception("listener failed request=%s", request.id)
            self.abort(request.id)


_counter = itertools.count()


def new_request_id(prefix: str = "req") -> str:
    """An id that this process has not used."""
    return f"{prefix}-{next(_counter)}"


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


def _token_logprob(fetched: Any, row: int, token: int, num_top: int) -> TokenLogprob:
    ids = fetched.top_id_BX[row, :num_top].tolist()
    values = fetched.top_logprob_BX[row, :num_top].tolist()
    return TokenLogprob(
        token_id=token,
        logprob=float(fetched.logprob_B[row]),
        top=tuple(zip(ids, values, strict=True)),
    )
