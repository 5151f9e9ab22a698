"""How much the server takes on: requests, bytes of bodies, time for a body. Host only.

The engine's queue refuses what has been read, decoded and parsed; this refuses before that, so
that a flood costs neither memory nor time.
"""

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxmm.errors import JaxmmError, Overloaded
from serving.config import ServerConfig
from serving.errors import BodyTooLarge, BodyTooSlow, ServerClosing
from serving.pace import ANSWER_PATHS, Pace
from serving.refusals import refusal
from serving.worker import CLOSING


class Held:
    """Bytes that requests in progress keep in memory: bodies, and pictures that were fetched."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes in.

        Raises:
            Overloaded: All requests together would hold more than the limit.
        """
        if self.num_bytes + num_bytes > self._limit:
            raise Overloaded(
                f"the requests in progress hold {self._limit} bytes, which is the limit "
                "(max_held_bytes). Send the request again later."
            )
        self.num_bytes += num_bytes


class Share:
    """What one request holds."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes in; see `Held.take`."""
        self._held.take(num_bytes)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Count all out."""
        self._held.num_bytes -= self._num_bytes
        self._num_bytes = 0


class Admission:
    """ASGI middleware: admits a request or answers 413 or 429; `state.share` counts its bytes.

    Requests without a body pass: health and metrics are asked for when the server is full. A 429,
    also of the engine, says when to come again.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._held = Held(config.max_held_bytes)
        self._num_requests = 0
        self._pace = Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        share = Share(self._held)
        scope.setdefault("state", {})["share"] = share
        self._num_requests += 1
        is_counted = scope["path"] in ANSWER_PATHS
        if is_counted:
            self._pace.begin()
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 429:
                    MutableHeaders(scope=message)["retry-after"] = str(self._pace.retry_seconds)
            await send(message)

        try:
            self._admit(scope)
            body = _Body(receive, share, self._config)
            await self._app(scope, body.receive, send_noting)
        except _Refused as refused:
            await refusal(refused.error)(scope, receive, send_noting)
        except asyncio.CancelledError:  # the server ends and the time to drain is over
            if status:
                raise
            await refusal(ServerClosing(CLOSING))(scope, receive, send)
        finally:
            share.give_back()
            self._num_requests -= 1
            if is_counted:
                self._pace.end(answered=status == 200)

    def _admit(self, scope: Scope) -> None:
        limit = self._config.max_requests
        if self._num_requests > limit:
            message = f"{limit} requests are in progress, which is the limit (max_requests)."
            raise _Refused(Overloaded(f"{message} Send the request again later."))
        declared = Headers(scope=scope).get("content-length", "0")
        size = int(declared) if declared.isdecimal() else 0
        if size > self._config.max_request_bytes:
            raise _Refused(_too_large(self._config))


class _Refused(Exception):
    """Carries the error of a request that never reached the application."""

    def __init__(self, error: JaxmmError) -> None:
        super().__init__(str(error))
        self.error = error


class _Body:
    """The receiving end of one request, held to the limits until its body is complete."""

    def __init__(self, receive: Receive, share: Share, config: ServerConfig) -> None:
        self._receive = receive
        self._share = share
        self._config = config
        self._num_bytes = 0
        self._complete = False
        self._deadline = asyncio.get_running_loop().time() + config.receive_seconds

    async def receive(self) -> Message:
        """Give the next message.

        Raises:
            BodyTooLarge: The body is longer than `max_request_bytes`.
            BodyTooSlow: It has not come within `receive_seconds`.
            Overloaded: There is no room for it.
        """
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            seconds = self._config.receive_seconds
            raise BodyTooSlow(f"the body did not come within {seconds:g} s") from None
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        size = len(message.get("body", b""))
        self._num_bytes += size
        if self._num_bytes > self._config.max_request_bytes:
            raise _too_large(self._config)
        self._share.take(size)
        return message


def _too_large(config: ServerConfig) -> BodyTooLarge:
    limit = config.max_request_bytes
    return BodyTooLarge(f"the body is larger than the limit of {limit} bytes")
