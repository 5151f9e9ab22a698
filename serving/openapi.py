"""What GET /openapi.json says: bodies, answers and errors as they are. Host only."""

from collections.abc import Callable
from typing import Any

import pydantic
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"

_ERRORS = {
    400: "What was sent cannot be served; the message says why.",
    401: "No API key that is known here.",
    403: "This API key may not do that.",
    404: "Another model is served here, or there is nothing of that name.",
    408: "The body did not come in time.",
    409: "The answer was aborted.",
    413: "The body is larger than the limit.",
    429: "Too much is waiting; Retry-After says when to come again.",
    499: "The client closed the connection.",
    500: "A fault of the server.",
    503: "The engine has stopped.",
    504: "No complete answer within the deadline.",
}


class ErrorDetail(pydantic.BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(pydantic.BaseModel):
    """Body of every answer that is an error."""

    error: ErrorDetail


def responses(answer: type[pydantic.BaseModel], *, streams: bool = False) -> dict[int | str, Any]:
    """What a route may answer.

    Args:
        answer: Body of the good one.
        streams: It may come as server-sent events.
    """
    good: dict[str, Any] = {"model": answer}
    if streams:
        events = "Chunks as `data: {…}` events, at the end `data: [DONE]`."
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
        good["description"] = f"The answer. With `stream`: {events}"
    errors: dict[int | str, Any] = {
        status: {"model": ErrorBody, "description": text} for status, text in _ERRORS.items()
    }
    return {200: good, **errors}


def body(*models: type[pydantic.BaseModel]) -> dict[str, Any]:
    """A route's body, which is parsed by hand, within its size limit."""
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *bodies: type[pydantic.BaseModel]) -> None:
    """Have the page of an application include the bodies that its routes parse by hand."""
    make: Callable[[], dict[str, Any]] = app.openapi
    _, definitions = models_json_schema([(m, "validation") for m in bodies], ref_template=_REF)

    def with_bodies() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = make()
            page["components"]["schemas"].update(definitions.get("$defs", {}))
            _without_fastapis_own(page)
            app.openapi_schema = page
        return app.openapi_schema

    app.openapi = with_bodies  # type: ignore[method-assign]  # as FastAPI's own documentation does


def _without_fastapis_own(page: dict[str, Any]) -> None:
    """Take out the errors of FastAPI's own parsing, which nothing here is left to."""
    for operations in page["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        page["components"]["schemas"].pop(name, None)
