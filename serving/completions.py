"""POST /v1/chat/completions: the road of one request through the server. Host only."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxmm.errors import JaxmmError
from jaxmm.request import Delta
from serving.answers import AnswerWriter, event
from serving.config import ServerConfig
from serving.engine import ServedEngine
from serving.errors import BodyTooLarge, ClientGone, ServerClosing, UnknownModel, error_body
from serving.fetch import Fetcher
from serving.protocol import parse_chat_request
from serving.translate import image_urls, to_request
from serving.worker import CLOSING, Pump, while_connected

logger = logging.getLogger(__name__)


class Completions:
    """Answers chat requests with one engine."""

    def __init__(
        self, engine: ServedEngine, fetcher: Fetcher, config: ServerConfig, model: str
    ) -> None:
        """Take the parts that it needs; `model` is the name that requests use."""
        self._engine = engine
        self._fetcher = fetcher
        self._config = config
        self._model = model
        self._vocab_size = engine.tokenizer.vocab_size
        self._token_bytes = engine.tokenizer.token_bytes

    async def answer(self, http: Request) -> Response:
        """Answer one HTTP request.

        Raises:
            JaxmmError: Nothing has been sent yet; the error is the answer.
        """
        chat = parse_chat_request(await read_body(http, self._config.max_request_bytes))
        if chat.model not in (None, self._model):
            raise UnknownModel(f"the model served here is {self._model!r}; see GET /v1/models")
        pictures = await while_connected(http.receive, self._fetcher.fetch_all(image_urls(chat)))
        request = to_request(
            chat,
            pictures,
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            vocab_size=self._vocab_size,
            default_max_tokens=self._config.default_max_tokens,
        )
        writer = AnswerWriter(
            chat, answer_id=request.id, model=self._model, token_bytes=self._token_bytes
        )
        logger.info("begin answer=%s request=%s", request.id, http.state.request_id)
        pump = Pump(self._engine, request, self._config.deadline_seconds)
        try:
            if chat.stream:
                first = await while_connected(http.receive, _next(pump))
                return EventStream(pump, first, writer)
            deltas = await while_connected(http.receive, _all(pump))
        except BaseException:
            await pump.aclose()
            raise
        return Response(writer.whole(deltas), media_type="application/json")


class EventStream(Response):
    """Sends an answer as server-sent events; the request is aborted if the client goes away."""

    def __init__(self, pump: Pump, first: Delta, writer: AnswerWriter) -> None:
        """Take over the pump, of which `first` has been read already."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._pump, self._first, self._writer = pump, first, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            logger.info("client gone request=%s", scope["state"]["request_id"])
        except ServerClosing:
            logger.warning("answer cut at shutdown request=%s", scope["state"]["request_id"])
        finally:
            await self._pump.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for body in self._events():
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """The status is sent: an error from now on is an event, and nothing follows it."""
        yield self._writer.chunk(self._first)
        try:
            async for delta in self._pump:
                if body := self._writer.chunk(delta):
                    yield body
        except JaxmmError as e:
            logger.warning("answer broken off error=%s", type(e).__name__)
            yield event(error_body(e))
        except asyncio.CancelledError:  # by `while_connected`; a client that is gone hears nothing
            yield event(error_body(ServerClosing(CLOSING)))
        else:
            yield self._writer.last_chunks()


async def read_body(http: Request, max_bytes: int) -> bytes:
    """Read a request's body, no more than the limit.

    Raises:
        BodyTooLarge: It is longer, or says so.
        ClientGone: The client closed the connection before its end.
    """
    declared = http.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() else 0
    body = bytearray()
    try:
        async for chunk in http.stream():
            size = max(size, len(body) + len(chunk))
            if size > max_bytes:
                break
            body += chunk
    except ClientDisconnect:
        raise ClientGone("the client closed the connection") from None
    if size > max_bytes:
        raise BodyTooLarge(f"the body is larger than the limit of {max_bytes} bytes")
    return bytes(body)


async def _next(pump: Pump) -> Delta:
    return await anext(pump)


async def _all(pump: Pump) -> list[Delta]:
    return [delta async for delta in pump]
