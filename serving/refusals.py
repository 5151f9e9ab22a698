"""An error as a response. Host only."""

from pydantic_core import to_json
from starlette.responses import Response

from serving.errors import answer_for, error_body

_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
}
"""`admission` knows better when a 429 should come again; a 503 goes to another server, or to this
one when it is back."""


def refusal(error: Exception) -> Response:
    """Answer with an error, in the shape that OpenAI's clients expect."""
    status = answer_for(error).status
    body = to_json(error_body(error))
    return Response(body, status, _HEADERS.get(status), "application/json")
