"""The HTTP server's routes: OpenAI's, jaxmm's own, and its state. Host only."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxmm import __version__
from jaxmm.errors import JaxmmError
from serving.admission import Admission
from serving.answer_models import (
    ChatAnswer,
    GenerateAnswer,
    ModelCard,
    ModelList,
    PlanAnswer,
    Status,
    TextAnswer,
    TextOfTokens,
    TokensAnswer,
)
from serving.ask import Served
from serving.chat import ChatEndpoint
from serving.completions import Completions
from serving.config import ServerConfig
from serving.engine import ServedEngine
from serving.errors import UnknownModel, answer_for
from serving.fetch import Fetcher
from serving.generate import GenerateEndpoint
from serving.lag import LagProbe
from serving.metrics import CONTENT_TYPE, Metrics, TimedStreams
from serving.native import Native
from serving.native_protocol import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from serving.offload import Offload
from serving.open_requests import OpenRequests
from serving.openapi import body, describe, responses
from serving.protocol import ChatRequest
from serving.refusals import refusal
from serving.request_id import RequestIds
from serving.tenants import Keys, Tenants, read_keys
from serving.text_completions import TextEndpoint
from serving.text_protocol import CompletionRequest
from serving.tracing import Traced, Traces

logger = logging.getLogger(__name__)

LOW_DETAIL_PIXELS = 512 * 512
"""Pixels of a picture at `detail: low`, as in the API that it comes from."""

BODIES = (
    ChatRequest, CompletionRequest, GenerateRequest,
    TokenizeRequest, DetokenizeRequest, AbortRequest,
)  # fmt: skip

_HEALTH: dict[int | str, Any] = {200: {"model": Status}, 503: {"model": Status}}
_METRICS: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def create_app(
    engine: ServedEngine, config: ServerConfig, tenants: Tenants | None = None
) -> FastAPI:
    """Make the ASGI application around a running engine; the caller closes the engine.

    Args:
        engine: It runs.
        config: Settings.
        tenants: Those of the settings, if they have been read already: a pipe gives keys once.
    """
    traces = Traces(config.trace_endpoint) if config.trace_endpoint else None
    tenants = tenants or read_keys(config.api_keys, config.api_key_file, config.admin_keys)
    offload = Offload()
    fetcher = Fetcher(
        config.fetch,
        offload,
        max_bytes=config.engine.media.max_bytes,
        max_total_bytes=config.max_request_bytes,
    )
    name = config.model_name or engine.model_name
    metrics = Metrics(engine)
    streams = TimedStreams(engine, metrics)
    completions = Completions(streams, fetcher, offload, config, name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        probing = asyncio.create_task(app.state.lag.run())
        yield
        probing.cancel()
        await fetcher.aclose()
        offload.close()
        if traces is not None:
            await traces.aclose()

    # FastAPI's pages for people load their scripts from a public host
    app = FastAPI(
        title="jaxmm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.draining = False
    app.state.lag = LagProbe(metrics.observe_lag)
    # the last is the outermost: named, then let in by its key, then admitted
    app.add_middleware(Admission, config=config)
    app.add_middleware(Keys, tenants=tenants)
    app.add_middleware(RequestIds)
    if traces is not None:
        app.add_middleware(Traced, traces=traces)
    app.add_middleware(OpenRequests)
    app.add_exception_handler(JaxmmError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_error)
    served = Served(
        model=name,
        tokenizer=engine.tokenizer,
        default_max_tokens=config.default_max_tokens,
        low_detail_pixels=None
        if engine.pictures_are_alike
        else min(LOW_DETAIL_PIXELS, config.engine.media.max_pixels or LOW_DETAIL_PIXELS),
    )
    _add_answers(app, completions, served)
    _add_native(app, Native(engine, completions, served, offload, config.deadline_seconds))
    _add_state(app, engine, metrics, name)
    describe(app, *BODIES)
    return app


def _add_answers(app: FastAPI, completions: Completions, served: Served) -> None:
    """Routes that answer with what the model says."""
    chat, text, generate = ChatEndpoint(served), TextEndpoint(served), GenerateEndpoint(served)

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        openapi_extra=body(ChatRequest),
        responses=responses(ChatAnswer, streams=True),
    )
    async def chat_completions(http: Request) -> Response:
        """Answer a conversation with text and pictures."""
        return await completions.answer(http, chat)

    @app.post(
        "/v1/completions",
        response_model=None,
        openapi_extra=body(CompletionRequest),
        responses=responses(TextAnswer, streams=True),
    )
    async def text_completions(http: Request) -> Response:
        """Go on from raw prompts."""
        return await completions.answer(http, text)

    @app.post(
        "/generate",
        response_model=None,
        openapi_extra=body(GenerateRequest),
        responses=responses(GenerateAnswer, streams=True),
    )
    async def native_generate(http: Request) -> Response:
        """Answer a request as the engine takes it."""
        return await completions.answer(http, generate)


def _add_native(app: FastAPI, native: Native) -> None:
    """Routes about tokens, costs, caches and answers in the making."""

    @app.post(
        "/tokenize",
        response_model=None,
        openapi_extra=body(TokenizeRequest),
        responses=responses(TokensAnswer),
    )
    async def tokenize(http: Request) -> Response:
        """Give the token ids of a text or a conversation."""
        return _json(await native.tokenize(http))

    @app.post(
        "/detokenize",
        response_model=None,
        openapi_extra=body(DetokenizeRequest),
        responses=responses(TextOfTokens),
    )
    async def detokenize(http: Request) -> Response:
        """Give the text of token ids."""
        return _json(await native.detokenize(http))

    @app.post(
        "/v1/plan",
        response_model=None,
        openapi_extra=body(ChatRequest, GenerateRequest),
        responses=responses(PlanAnswer),
    )
    async def plan(http: Request) -> Response:
        """Tell what a request would cost, without running it."""
        return _json(await native.plan(http))

    @app.post("/flush_cache", response_model=None, responses=responses(Status))
    async def flush_cache(http: Request) -> Response:
        """Empty the caches; with API keys, this takes one of an administrator."""
        return _json(await native.flush_cache(http))

    @app.post(
        "/abort",
        response_model=None,
        openapi_extra=body(AbortRequest),
        responses=responses(Status),
    )
    async def abort(http: Request) -> Response:
        """End an answer that is being made."""
        return _json(await native.abort(http))


def _add_state(app: FastAPI, engine: ServedEngine, metrics: Metrics, name: str) -> None:
    """Routes that tell what is served, and how it is."""
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "jaxmm"}

    @app.get("/v1/models", response_model=None, responses=responses(ModelList))
    async def models() -> Response:
        """List the one model."""
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", response_model=None, responses=responses(ModelCard))
    async def model(model: str) -> Response:
        """Describe a model."""
        if model != name:
            raise UnknownModel(f"the model served here is {name!r}", "model")
        return _json(card)

    @app.get("/health", response_model=None, responses=_HEALTH)
    async def health() -> Response:
        """Say whether requests are answered: 200 or 503."""
        healthy = engine.healthy
        return _json({"status": "ok" if healthy else "stopped"}, 200 if healthy else 503)

    @app.get("/ready", response_model=None, responses=_HEALTH)
    async def ready() -> Response:
        """Say whether new requests should be sent here: 200 or 503."""
        state = "stopped" if not engine.healthy else "draining" if app.state.draining else "ready"
        return _json({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", response_model=None, responses=_METRICS)
    async def prometheus() -> Response:
        """Give the counters in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)


async def _answer_error(http: Request, error: Exception) -> Response:
    if answer_for(error).status == 500:
        logger.error("internal error request=%s", http.state.request_id, exc_info=error)
    return refusal(error)


async def _answer_http_error(http: Request, error: Exception) -> Response:
    """Shape the router's own refusals (no such path, no such method) like all others."""
    assert isinstance(error, HTTPException), f"handler registered for {type(error)}"
    message = f"{http.method} {http.url.path}: {error.detail}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return _json({"error": body}, error.status_code, error.headers)


def _json(body: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")
