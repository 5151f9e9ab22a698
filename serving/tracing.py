"""OpenTelemetry traces of requests, for those who name an endpoint. Host only.

One span for each request, and below it one for each stage: `receive` (the body), `fetch` (the
pictures), `first token`. A trace that the client began goes on (W3C `traceparent`). No span has
anything of what was asked or answered in it.
"""

import asyncio
import contextlib
import importlib
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxmm.errors import ConfigError

_FLUSH_SECONDS = 5.0
_tracer: ContextVar[Any] = ContextVar("tracer", default=None)
"""The tracer of the request that a task works on."""


def check_installed() -> None:
    """Refuse to trace without the packages.

    Raises:
        ConfigError: They are not installed.
    """
    try:
        importlib.import_module("opentelemetry.sdk.trace")
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as e:
        raise ConfigError(f"trace_endpoint needs jaxmm's extra `trace`: {e.name}") from e


class Traces:
    """The provider of tracers, and what of OpenTelemetry is needed; made once for a server."""

    def __init__(self, endpoint: str) -> None:
        """Send spans by OTLP over HTTP, in batches, from a thread of its own.

        Args:
            endpoint: `http://collector:4318/v1/traces`.

        Raises:
            ConfigError: The packages are not installed.
        """
        check_installed()
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxmm"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._context_of = TraceContextTextMapPropagator().extract
        self._server_kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)
        self.tracer = self._provider.get_tracer("jaxmm")

    def request_span(self, scope: Scope) -> Any:
        """A context in which the span of a request is open."""
        headers = Headers(scope=scope)
        return self.tracer.start_as_current_span(
            scope["method"],
            context=self._context_of({"traceparent": headers.get("traceparent", "")}),
            kind=self._server_kind,
            attributes={"http.request.method": scope["method"]},
            record_exception=False,  # their texts may quote the request
            set_status_on_exception=False,
        )

    def end(self, span: Any, scope: Scope, status: int) -> None:
        """Note how a request was answered."""
        route = getattr(scope.get("route"), "path", "")  # of few values, unlike the path
        span.update_name(f"{scope['method']} {route}".strip())
        state = scope.get("state", {})
        tenant = getattr(state.get("tenant"), "name", "")
        span.set_attributes(
            {
                "http.route": route,
                "http.response.status_code": status,
                "jaxmm.request_id": state.get("request_id", ""),
                "jaxmm.tenant": tenant,
            }
        )
        if status >= 500:
            span.set_status(self._error)

    async def aclose(self) -> None:
        """Send what is left, for a few seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await asyncio.to_thread(self._provider.shutdown)


class Traced:
    """ASGI middleware: a span for every request."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        _tracer.set(self._traces.tracer)
        with self._traces.request_span(scope) as span:
            try:
                await self._app(scope, receive, send_noting)
            finally:
                self._traces.end(span, scope, status)


def stage(name: str, **attributes: int | str) -> contextlib.AbstractContextManager[Any]:
    """A context in which a stage of the current request is open; nothing without traces."""
    tracer = _tracer.get()
    if tracer is None:
        return contextlib.nullcontext()
    span: contextlib.AbstractContextManager[Any] = tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    )
    return span
