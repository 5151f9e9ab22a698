"""The engine as its callers see it: submit, stream, abort, close. Host only.

submit -> intake.py    pictures decoded and prompts built, on preparing threads
       -> loop.py      plan, step, read, emit: one thread
       -> dispatch.py  what the loop's plans become on the device
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from jaxmm.answer import OnEvent
from jaxmm.config import EngineConfig
from jaxmm.errors import EngineStopped, JaxmmError
from jaxmm.intake import Intake
from jaxmm.loop import Loop
from jaxmm.request import Delta, Request
from jaxmm.start import Parts, build_parts

logger = logging.getLogger(__name__)


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
        self._loop = Loop(self._parts)
        self._intake = Intake(self._parts, self._loop, self.config.max_waiting)
        self._closing = threading.Lock()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxmm-engine", daemon=True)
        self._thread.start()

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
        self._intake.submit(request, on_event)

    def abort(self, request_id: str) -> None:
        """End a request at once; an unknown id is no error. Its caller hears nothing more."""
        self._intake.abort(request_id)
        self._loop.post(lambda: self._loop.abort(request_id))

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

        self._loop.post(flush)
        while not done.wait(0.1):
            if not self.healthy:
                raise self._stopped()

    def close(self) -> None:
        """End all requests with EngineStopped and free what the engine holds."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._intake.refuse_all(self._stopped())
        self._loop.stop()
        self._thread.join()
        self._intake.close()
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

    def _run(self) -> None:
        """The engine's thread."""
        self.ledger.serve_from(threading.get_ident())
        try:
            self._loop.run(self._intake.load_features)
        except BaseException as error:  # told to every caller
            self._failure = error
            logger.exception("engine loop ended")
        finally:
            self._intake.end_all(self._stopped())
            self._loop.end_all(self._stopped())

    def _stopped(self) -> EngineStopped:
        return EngineStopped(f"the engine has stopped: {self._failure or 'it was closed'}")


_counter = itertools.count()


def new_request_id(prefix: str = "req") -> str:
    """An id that this process has not used."""
    return f"{prefix}-{next(_counter)}"
