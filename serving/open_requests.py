"""Requests that are being answered, for an end that waits until each has been told. Host only."""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class OpenRequests:
    """ASGI middleware that knows when nothing is being answered."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap the application. Its lifespan ends when its last request has, within a second.

        The server cancels what outlasts the drain, ends the lifespan, and then cancels again
        whatever is left; a cancelled request needs the time between to tell its client.
        """
        self._app = app
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, self._delayed(receive), send)
            return
        self._count += 1
        self._none.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()

    def _delayed(self, receive: Receive) -> Receive:
        async def receive_when_done() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                with contextlib.suppress(TimeoutError):  # a client that reads nothing
                    await asyncio.wait_for(self._none.wait(), 1.0)
            return message

        return receive_when_done
