"""The engine as its callers see it: submit, stream, abort, close. Host only.

submit -> intake.py    pictures decoded and prompts built, on preparing threads
       -> loop.py      plan, step, read, emit: one thread
       -> dispatch.py  what the loop's plans become on the device
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from jaxmm.answer import OnEvent
from jaxmm.config import EngineConfig
from jaxmm.cost import Cost
from jaxmm.errors import EngineStopped, JaxmmError
from jaxmm.host.kept import Keep
from jaxmm.intake import Intake
from jaxmm.loop import Loop
from jaxmm.request import Delta, Request
from jaxmm.session import Session
from jaxmm.start import Parts, build_parts
from jaxmm.stats import EngineStats, stats_of

logger = logging.getLogger(__name__)

_HUNG_SECONDS = 5.0
"""For the thread of an engine that was given up: its step may have been slow and not hung."""


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
        self.replicas: tuple[Parts, ...] = build_parts(self.config)
        self._parts = self.replicas[0]
        self.tokenizer = self._parts.tokenizer
        self.model_name = self._parts.model_name
        self.sizes = self._parts.sizes
        self.ledger = self._parts.ledger
        self.scheduler = self._parts.scheduler
        self._loop = Loop(self.replicas)
        self._intake = Intake(
            self.replicas,
            self._loop,
            max_waiting=self.config.max_waiting,
            pruning_rate=self.config.media.video_pruning_rate,
        )
        self._closing = threading.Lock()
        self._closed = False
        self._given_up = False
        self._over = threading.Event()
        """The loop has ended, or is not waited for any more."""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxmm-engine", daemon=True)
        self._thread.start()

    @property
    def pictures_are_alike(self) -> bool:
        """Every picture becomes the same size, whatever its own."""
        return self._parts.model.vision.picture_side > 0

    @property
    def healthy(self) -> bool:
        """The loop runs."""
        return self._thread.is_alive() and self._failure is None

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if something did."""
        return self._failure

    @property
    def turn_seconds(self) -> float:
        """How long the turn of the loop in progress takes already; 0 while it waits for work."""
        return self._loop.turn_seconds

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
        self._intake.submit(request, on_event)

    def abort(self, request_id: str) -> None:
        """End a request at once; an unknown id is no error. Its caller hears nothing more."""
        self._intake.abort(request_id)
        self._loop.post(lambda: self._loop.abort(request_id))

    async def astream(self, request: Request) -> AsyncGenerator[Delta, None]:
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

    def session(
        self,
        system: str | None = None,
        *,
        salt: str = "",
        expire_seconds: float | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
        video_pruning_rate: float | None = None,
    ) -> Session:
        """Begin a conversation whose turns send only what is new; see `Session`.

        Args:
            system: What the model is told first.
            salt: The tenant.
            expire_seconds: Time after a turn until what is kept is given back; None: the setting
                `sessions.expire_seconds`.
            fps: Frames of each second of its videos to look at; see `generate`.
            num_frames: Frames of each of its videos, instead of `fps`.
            video_pruning_rate: Share of each video's tokens to drop.

        Raises:
            RequestError: `expire_seconds` is outside its range.
        """
        seconds = self.config.sessions.expire_seconds if expire_seconds is None else expire_seconds
        return Session(
            self,
            system,
            salt=salt,
            expire_seconds=seconds,
            fps=fps,
            num_frames=num_frames,
            video_pruning_rate=video_pruning_rate,
        )

    def forget(self, keep: Keep) -> None:
        """Give back what a conversation keeps, after its running turn if there is one."""
        keep.closed = True

        def drop() -> None:
            for replica in self.replicas:
                replica.scheduler.pins.drop(keep)

        self._loop.post(drop)

    def keeps(self, keep: Keep) -> bool:
        """Whether the prefix of a conversation is pinned."""
        return any(keep in replica.scheduler.pins for replica in self.replicas)

    async def cost(self, request: Request) -> Cost:
        """Tell what a request would cost now, without running it.

        Raises:
            RequestError, Overloaded, EngineStopped: As the request itself would.
        """
        future = asyncio.wrap_future(self._intake.estimate(request))
        try:
            while not future.done():
                await asyncio.wait([future], timeout=1.0)
                if not self.healthy and not future.done():
                    raise self._stopped()
            return future.result()
        finally:
            future.cancel()  # of no effect on one that is done

    def stats(self) -> EngineStats:
        """What the engine has done and holds."""
        return stats_of(self.replicas, preparing=self._intake.num_preparing)

    def flush_caches(self) -> None:
        """Forget all prefixes, image rows and known pictures that no running request uses.

        Conversations lose what they keep, and go on more slowly.
        """
        done = threading.Event()

        def flush() -> None:
            for replica in self.replicas:
                replica.scheduler.pins.clear()
                replica.prefix_cache.clear()
                replica.arena.clear()
            self._parts.media_map.clear()
            self._parts.known_prunings.clear()
            done.set()

        self._loop.post(flush)
        while not done.wait(0.1):
            if not self.healthy:
                raise self._stopped()

    def give_up(self, reason: str) -> None:
        """End all requests although the loop's thread does not come back, as from a hung device.

        The engine is not healthy any more; its thread and memory go with the process, unless the
        thread does come back: then it ends, and `close` frees everything.
        """
        self._failure = self._failure or EngineStopped(reason)
        self._given_up = True
        self._loop.stop()
        self._intake.end_all(self._stopped())
        self._loop.end_all(self._stopped())
        self._over.set()

    def close(self) -> None:
        """End all requests with EngineStopped and free what the engine holds.

        The step in progress is waited for, and once the engine is given up, before or meanwhile,
        no longer than some seconds.

        Raises:
            RuntimeError: A listener called this, on the engine's own thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("an engine cannot be closed on its own thread, by a listener")
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._intake.refuse_all(self._stopped())
        self._loop.stop()
        self._over.wait()
        self._thread.join(_HUNG_SECONDS)
        self._intake.close()
        if self._thread.is_alive():
            logger.error("closed in a step that hangs: device memory goes with the process")
            self._parts.decoder.close()
            return
        self._loop.close(wait=not self._given_up)
        for replica in self.replicas:
            replica.scheduler.pins.clear()
            replica.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        """The engine's thread."""
        self.ledger.serve_from(threading.get_ident())
        try:
            self._loop.run(self._intake.load_features)
        except BaseException as error:  # told to every caller
            self._failure = self._failure or error
            logger.exception("engine loop ended")
        finally:
            self._intake.end_all(self._stopped())
            self._loop.end_all(self._stopped())
            self._over.set()

    def _stopped(self) -> EngineStopped:
        return EngineStopped(f"the engine has stopped: {self._failure or 'it was closed'}")
