"""The road of one request for an answer through the server. Host only."""

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxmm.errors import JaxmmError
from jaxmm.request import Delta
from jaxmm.request import Request as EngineRequest
from serving.answers import Writer, event, written_bytes
from serving.ask import Ask, Endpoint
from serving.config import ServerConfig
from serving.errors import ClientGone, ServerClosing, UnknownModel, error_body
from serving.fetch import Fetcher
from serving.lifting import Url, lift
from serving.offload import Offload
from serving.tenants import Tenant
from serving.tracing import stage
from serving.translate import check_num_pictures
from serving.worker import CLOSING, Pump, Streams, while_connected

logger = logging.getLogger(__name__)


class Completions:
    """Answers requests with one engine."""

    def __init__(
        self,
        streams: Streams,
        fetcher: Fetcher,
        offload: Offload,
        config: ServerConfig,
        model: str,
    ) -> None:
        """Take the parts that it needs; `model` is the name that requests use."""
        self._streams = streams
        self._fetcher = fetcher
        self._offload = offload
        self._config = config
        self._model = model
        self._running = weakref.WeakValueDictionary[tuple[Tenant, str], Pump]()

    async def answer(self, http: Request, endpoint: Endpoint) -> Response:
        """Answer one HTTP request.

        Raises:
            JaxmmError: Nothing has been sent yet; the error is the answer.
        """
        ask, requests = await self.prepare(http, endpoint)
        logger.info("begin answer=%s request=%s", ask.id, http.state.request_id)
        pump = Pump(self._streams, requests, self._config.deadline_seconds)
        self._running[http.state.tenant, ask.id] = pump
        try:
            with stage("first token"):
                first = await while_connected(http.receive, _next(pump))
            if ask.stream:
                return EventStream(pump, first, ask.writer, self._offload)
            deltas = [first, *await while_connected(http.receive, _all(pump))]
        except BaseException:
            await pump.aclose()
            raise
        size = sum(map(written_bytes, deltas))
        body = await self._offload.run(size, ask.writer.whole, deltas)
        return Response(body, media_type="application/json")

    async def prepare(
        self, http: Request, endpoint: Endpoint
    ) -> tuple[Ask, tuple[EngineRequest, ...]]:
        """Read a body and get its pictures.

        Raises:
            JaxmmError: It cannot be served.
        """
        with stage("receive"):
            body = await read_body(http, self._offload)
            ask, urls = await self._offload.run(len(body), read_ask, endpoint, body)
        if ask.model not in (None, self._model):
            known = f"the model served here is {self._model!r}; see GET /v1/models"
            raise UnknownModel(known, "model")
        check_num_pictures(ask.num_items, self._config.engine.media.max_items)
        with stage("fetch", images=len(urls)):
            fetching = self._fetcher.fetch_all(urls, http.state.share.take)
            pictures = await while_connected(http.receive, fetching)
        tenant: Tenant = http.state.tenant
        size = len(body) + sum(map(len, pictures.values()))
        requests = await self._offload.run(size, ask.requests, pictures)
        return ask, tuple(replace(r, salt=tenant.salt(r.salt)) for r in requests)

    def abort(self, tenant: Tenant, answer_id: str) -> bool:
        """End a tenant's answer that is being made; False if there is none of that id."""
        pump = self._running.get((tenant, answer_id))
        return pump is not None and pump.abort()


class EventStream(Response):
    """Sends an answer as server-sent events; the request is aborted if the client goes away."""

    def __init__(self, pump: Pump, first: Delta, writer: Writer, offload: Offload) -> None:
        """Take over the pump, of which `first` has been read already."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._pump, self._first = pump, first
        self._writer, self._offload = writer, offload

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
                if body := await self._offload.run(written_bytes(delta), self._writer.chunk, delta):
                    yield body
        except JaxmmError as e:
            logger.warning("answer broken off error=%s", type(e).__name__)
            yield event(error_body(e))
        except asyncio.CancelledError:  # by `while_connected`; a client that is gone hears nothing
            yield event(error_body(ServerClosing(CLOSING)))
        else:
            yield self._writer.last_chunks()


def read_ask(endpoint: Endpoint, body: bytes) -> tuple[Ask, Mapping[str, Url]]:
    """Read a body, and the URLs of its pictures by place.

    Raises:
        RequestError: It cannot be served as it stands; names the field at fault.
    """
    lifted = lift(body)
    ask = endpoint.read(lifted.rest)
    urls = lifted.put_back(ask.urls)
    if urls is None:  # what looked like a picture stands elsewhere
        ask = endpoint.read(body)
        urls = {**ask.urls}
    return ask, urls


async def read_body(http: Request, offload: Offload) -> bytes:
    """Read a request's body; `admission` holds it to its limits.

    Raises:
        ClientGone: The client closed the connection before its end.
    """
    try:
        pieces = [piece async for piece in http.stream()]
    except ClientDisconnect:
        raise ClientGone("the client closed the connection") from None
    return await offload.join(pieces)


async def _next(pump: Pump) -> Delta:
    return await anext(pump)


async def _all(pump: Pump) -> list[Delta]:
    return [delta async for delta in pump]
