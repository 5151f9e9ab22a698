"""Requests of the OpenAI chat completions API, and what jaxmm adds to it. Host only.

A field that is not known here, or that asks for something jaxmm does not do, is refused by name;
null always means the default. Accepted without effect, because they change nothing in the answer:
`user`, `store`, `metadata`, `safety_identifier`, `prompt_cache_key`.
"""

import difflib
from typing import Any, Literal

import pydantic
import pydantic_core
from pydantic import ConfigDict, Field, field_validator

from serving.errors import BadBody

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of the API that are not supported, and the values at which they ask for nothing."""

NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""The same for messages; clients send an answer back with these."""


class _Model(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ImageUrl(_Model):
    """Where a picture is: a data URI, or an http(s) URL."""

    url: str
    detail: str | None = None
    """`auto` or `high`: as large as the server allows. For less, set `max_pixels`."""

    @field_validator("detail")
    @classmethod
    def _check_detail(cls, detail: str | None) -> str | None:
        if detail not in (None, "auto", "high"):
            raise ValueError("only auto and high are supported; for smaller images set max_pixels")
        return detail


class Part(_Model):
    """One part of a message: a text or a picture."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @pydantic.model_validator(mode="after")
    def _check_kind(self) -> "Part":
        given = {name for name in ("text", "image_url") if getattr(self, name) is not None}
        if given != {self.type}:
            raise ValueError(f"a part of type {self.type} must have {self.type} and nothing else")
        return self


class Message(_Model):
    """One turn. `developer` is another name for `system`. Pictures may stand in any turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class StreamOptions(_Model):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ChatRequest(_Model):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    """Name from GET /v1/models; may be left out."""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    """Default 1, as everywhere in this API; 0 is greedy."""
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    """Size of this request's pictures, within the server's limits."""
    cache_salt: str | None = None
    """Caches are shared only between requests of equal salt; without one, with all others."""
    mm_hashes: list[str] | None = None
    """Hex hash of each picture, a hint for routers and caches."""
    return_token_ids: bool | None = None
    """Adds `token_ids` to each choice."""


_MAX_COMMAS = 1_000_000
"""In a body. Each value of JSON becomes an object of 30 bytes and more: a body of nothing but
commas would take gigabytes and many seconds; pictures in base64 have none."""


def parse_chat_request(body: bytes | bytearray) -> ChatRequest:
    """Read and check a request body.

    Raises:
        BadBody: Names the field at fault; repeats nothing of its content.
    """
    if body.count(b",") > _MAX_COMMAS:
        raise BadBody(f"the body has more than {_MAX_COMMAS} values")
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as e:
        raise BadBody(f"the body is not valid JSON: {e}") from None
    if not isinstance(data, dict):
        raise BadBody("the body is not a JSON object")
    _drop_neutral(data, NEUTRAL, "")
    messages = data.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _drop_neutral(message, NEUTRAL_IN_MESSAGE, f"messages[{i}].")
    try:
        return ChatRequest.model_validate(data)
    except pydantic.ValidationError as e:
        raise _bad_body(e) from None


def _drop_neutral(data: dict[str, Any], neutral: dict[str, tuple[Any, ...]], where: str) -> None:
    for name in neutral.keys() & data.keys():
        value = data.pop(name)
        if value is not None and value not in neutral[name]:
            raise BadBody(f"{where}{name} is not supported", f"{where}{name}")


def _bad_body(error: pydantic.ValidationError) -> BadBody:
    """Tell the first fault, of several readings of one value the one that went furthest."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = faults[0]["loc"][:1]
    fault = max((f for f in faults if f["loc"][:1] == first), key=lambda f: len(f["loc"]))
    # pydantic names the branch of a union in the path: str, list[Part]
    steps = [s for s in fault["loc"] if not (isinstance(s, str) and (s == "str" or "[" in s))]
    place = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps).lstrip(".")
    if fault["type"] == "extra_forbidden":
        return BadBody(f"unknown field {place}{_suggestion(place)}", place)
    return BadBody(f"{place}: {fault['msg'].removeprefix('Value error, ')}", place)


def _suggestion(place: str) -> str:
    near = difflib.get_close_matches(place, ChatRequest.model_fields, n=1)
    return f"; did you mean {near[0]}?" if near else ""
