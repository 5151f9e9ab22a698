"""The one table from error to HTTP answer, and the errors that only a server has. Host only."""

from typing import Any, NamedTuple

from jaxmm.errors import (
    EngineStopped,
    GrammarError,
    JaxmmError,
    MediaError,
    MediaTooLarge,
    NotFinite,
    Overloaded,
    PlaceholderError,
    PromptTooLong,
    RequestError,
    SamplingError,
)


class BadBody(RequestError):
    """A request body that is not what the protocol asks for."""


class BodyTooLarge(RequestError):
    """A request body beyond `max_request_bytes`."""


class BodyTooSlow(RequestError):
    """A request body that does not come within `receive_seconds`."""


class Unauthorized(RequestError):
    """A request without an API key that is known here."""


class Forbidden(RequestError):
    """A request that this API key may not make."""


class UnknownModel(RequestError):
    """A model name that is not served here."""


class UnknownAnswer(RequestError):
    """An answer's id that is not in use."""


class FetchError(MediaError):
    """A picture or video that could not be had from its URL."""


class DeadlineExceeded(JaxmmError, TimeoutError):
    """The engine did not finish within `deadline_seconds`."""


class ClientGone(JaxmmError, ConnectionError):
    """The client closed the connection; nobody will read the answer."""


class Aborted(JaxmmError, RuntimeError):
    """The request was ended by POST /abort."""


class ServerClosing(EngineStopped):
    """The server ends, and the time that it gives to running requests is over."""


class Answer(NamedTuple):
    """How one kind of error is told to the client."""

    status: int
    type: str
    code: str | None = None


ANSWERS: dict[type[JaxmmError], Answer] = {
    RequestError: Answer(400, "invalid_request_error"),
    BadBody: Answer(400, "invalid_request_error", "invalid_body"),
    BodyTooLarge: Answer(413, "invalid_request_error", "body_too_large"),
    BodyTooSlow: Answer(408, "invalid_request_error", "body_too_slow"),
    Unauthorized: Answer(401, "authentication_error", "invalid_api_key"),
    Forbidden: Answer(403, "permission_error", "admin_key_needed"),
    UnknownModel: Answer(404, "invalid_request_error", "model_not_found"),
    UnknownAnswer: Answer(404, "invalid_request_error", "answer_not_found"),
    MediaError: Answer(400, "invalid_request_error", "invalid_media"),
    MediaTooLarge: Answer(400, "invalid_request_error", "media_too_large"),
    FetchError: Answer(400, "invalid_request_error", "media_fetch_failed"),
    PlaceholderError: Answer(400, "invalid_request_error", "media_count_mismatch"),
    PromptTooLong: Answer(400, "invalid_request_error", "context_length_exceeded"),
    SamplingError: Answer(400, "invalid_request_error", "invalid_sampling"),
    GrammarError: Answer(400, "invalid_request_error", "invalid_grammar"),
    Aborted: Answer(409, "client_error", "aborted"),
    ClientGone: Answer(499, "client_error", "client_gone"),
    Overloaded: Answer(429, "overloaded_error", "overloaded"),
    EngineStopped: Answer(503, "overloaded_error", "engine_stopped"),
    DeadlineExceeded: Answer(504, "timeout_error", "deadline_exceeded"),
    NotFinite: Answer(500, "server_error", "not_finite"),
    JaxmmError: Answer(500, "server_error", "internal_error"),
}
"""The nearest class of an error's own line of descent answers for it."""

INTERNAL = "internal error; the server's log has it under this request's x-request-id"


def answer_for(error: Exception) -> Answer:
    """Find how an error is told; what no class covers is an internal error."""
    kinds = (ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)
    return next(kinds, ANSWERS[JaxmmError])


def error_body(error: Exception) -> dict[str, Any]:
    """Shape an error as OpenAI clients expect it; internal ones tell nothing of themselves."""
    answer = answer_for(error)
    message = INTERNAL if answer.status == 500 else str(error)
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": message, "type": answer.type, "param": param, "code": answer.code}}
