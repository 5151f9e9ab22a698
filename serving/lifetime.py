"""When the server ends: at a signal, after its requests; at once when its engine has. Host only."""

import asyncio
import logging
import socket
import time
from types import FrameType

import uvicorn

from serving.config import ServerConfig
from serving.engine import ServedEngine

logger = logging.getLogger(__name__)

LAST_STEP_SECONDS = 5.0
"""For the step that is in progress when all requests have ended."""
_TICK_SECONDS = 0.1


class Server(uvicorn.Server):
    """uvicorn's server, which also watches the engine, ten times a second.

    At SIGTERM or SIGINT `/ready` turns to 503; after `drain_delay_seconds` no connection is taken
    any more, and the requests in progress have `drain_seconds` to end. A second signal skips the
    delay, a second SIGINT also the requests. A step that hangs is given up also while requests
    drain, and after them at last.
    """

    def __init__(
        self, uvicorn_config: uvicorn.Config, engine: ServedEngine, config: ServerConfig
    ) -> None:
        """Take the settings of uvicorn, around whose app it is, and ours."""
        super().__init__(uvicorn_config)
        self._engine = engine
        self._settings = config
        self._leave_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, from a signal handler."""
        super().handle_exit(sig, frame)
        logger.info("draining signal=%d", sig)
        delay = self._settings.drain_delay_seconds
        if self._leave_at is None:
            self._leave_at = time.monotonic() + delay
            self.should_exit = delay == 0
        self.config.app.state.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Look after the engine and the time; true ends the server."""
        if self._leave_at is not None and time.monotonic() >= self._leave_at:
            self.should_exit = True
        self._look_at_step()
        if not self._engine.healthy and not self.should_exit:
            cause = self._engine.failure
            logger.critical("server ends cause=%s", described(cause) if cause else "engine closed")
            self.should_exit = True
        return bool(await super().on_tick(counter))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the requests end, then the step in progress."""
        watching = asyncio.create_task(self._watch_steps())
        await super().shutdown(sockets)
        watching.cancel()
        end = time.monotonic() + LAST_STEP_SECONDS
        while self._engine.healthy and self._engine.turn_seconds:
            if time.monotonic() > end:
                self._give_up(f"its last step takes more than {LAST_STEP_SECONDS:g} s")
            await asyncio.sleep(_TICK_SECONDS)

    async def _watch_steps(self) -> None:
        while True:
            self._look_at_step()
            await asyncio.sleep(_TICK_SECONDS)

    def _look_at_step(self) -> None:
        """Give the engine up when its step takes too long."""
        limit = self._settings.step_timeout_seconds
        if self._engine.healthy and 0 < limit < self._engine.turn_seconds:
            self._give_up(f"a step takes more than {limit:g} s (step_timeout_seconds)")

    def _give_up(self, reason: str) -> None:
        logger.critical("engine given up cause=%s", reason)
        self._engine.give_up(reason)


def described(error: BaseException) -> str:
    """Name an error and say its text."""
    return f"{type(error).__name__}: {error}"
