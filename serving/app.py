"""The HTTP server's routes: OpenAI chat completions, models, health. Host only."""

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

from jaxmm.errors import JaxmmError
from serving.completions import Completions
from serving.config import ServerConfig
from serving.engine import ServedEngine
from serving.errors import UnknownModel, answer_for, error_body
from serving.fetch import Fetcher
from serving.open_requests import OpenRequests
from serving.protocol import ChatRequest
from serving.request_id import RequestIds

logger = logging.getLogger(__name__)


def create_app(engine: ServedEngine, config: ServerConfig) -> FastAPI:
    """Make the ASGI application around a running engine; the caller closes the engine."""
    fetcher = Fetcher(
        config.fetch,
        max_bytes=config.engine.media.max_bytes,
        max_total_bytes=config.max_request_bytes,
    )
    name = config.model_name or engine.model_name
    completions = Completions(engine, fetcher, config, name)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "jaxmm"}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await fetcher.aclose()

    app = FastAPI(title="jaxmm", lifespan=lifespan)
    app.add_middleware(RequestIds)
    app.add_middleware(OpenRequests)
    app.add_exception_handler(JaxmmError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_error)

    @app.post("/v1/chat/completions", response_model=None, openapi_extra=_body_of(ChatRequest))
    async def chat_completions(http: Request) -> Response:
        """Answer a conversation with text and pictures."""
        return await completions.answer(http)

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """List the one model."""
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str) -> Response:
        """Describe a model."""
        if model != name:
            raise UnknownModel(f"the model served here is {name!r}")
        return _json(card)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Say whether requests are answered: 200 or 503."""
        healthy = engine.healthy
        return _json({"status": "ok" if healthy else "stopped"}, 200 if healthy else 503)

    return app


async def _answer_error(http: Request, error: Exception) -> Response:
    answer = answer_for(error)
    headers = {"retry-after": "1"} if answer.status == 503 else None
    if answer.status == 500:
        logger.error("internal error request=%s", http.state.request_id, exc_info=error)
    return _json(error_body(error), answer.status, headers)


async def _answer_http_error(http: Request, error: Exception) -> Response:
    """Shape the router's own refusals (no such path, no such method) like all others."""
    assert isinstance(error, HTTPException), f"handler registered for {type(error)}"
    message = f"{http.method} {http.url.path}: {error.detail}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return _json({"error": body}, error.status_code, error.headers)


def _json(body: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")


def _body_of(model: type[ChatRequest]) -> dict[str, Any]:
    """Describe the body in the OpenAPI page; it is parsed by hand, within its size limit."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
