"""A name for each HTTP request, in its answer's header and in the log. Host only."""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
_ACCEPTED = re.compile(r"[!-~]{1,128}")


class RequestIds:
    """ASGI middleware: keeps a client's `x-request-id` or makes one, and logs each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        start, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["method"] == "GET" else logging.INFO
            seconds = time.perf_counter() - start
            tenant = getattr(scope["state"].get("tenant"), "name", "")
            line = "answer method=%s path=%s status=%d seconds=%.3f tenant=%s request=%s"
            logger.log(
                level, line, scope["method"], scope["path"], status, seconds, tenant, request_id
            )
