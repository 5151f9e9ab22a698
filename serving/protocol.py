"""Requests of the OpenAI chat completions API, and what jaxmm adds to it. Host only.

A field that is not known here, or that asks for something jaxmm does not do, is refused by name;
null always means the default. Accepted without effect, because they change nothing in the answer:
`user`, `store`, `metadata`, `safety_identifier`, `prompt_cache_key`.
"""

from typing import Any, Literal

import pydantic
from pydantic import Field

from jaxmm.host.tools import MAX_TOOLS
from jaxmm.request import MAX_LOGPROBS
from serving.body import Strict, drop_neutral, read_object, validated
from serving.sampling_fields import SamplingFields
from serving.structured import CalledTool, NamedTool, ResponseFormat, ToolDefinition

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
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
}
"""The same for messages; clients send an answer back with these."""


MAX_FRAMES = 768
"""Frames of a video that is sent as frames."""


class ImageUrl(Strict):
    """Where a picture is: a data URI, or an http(s) URL."""

    url: str
    detail: Literal["auto", "high", "low"] | None = None
    """`auto` or `high`: as large as the server allows; `low`: at most 512 x 512 pixels, and then
    for all pictures of the request."""


class VideoUrl(Strict):
    """Where a video is: a data URI, or an http(s) URL of an MP4, WebM or GIF file."""

    url: str


_NOT_TAKEN = {"input_audio": "sound", "audio_url": "sound", "file": "files", "refusal": "refusals"}
"""Parts of this API, and of others, that no model here can use."""


class Part(Strict):
    """One part of a message: a text, a picture, or a video as a file or as its frames."""

    type: Literal["text", "image_url", "video_url", "video"]
    text: str | None = None
    image_url: ImageUrl | None = None
    video_url: VideoUrl | None = None
    video: list[str] | None = Field(None, min_length=1, max_length=MAX_FRAMES)
    """URLs of pictures, the video's frames."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_taken(cls, part: object, info: pydantic.ValidationInfo) -> object:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _NOT_TAKEN:
            served = (info.context or {}).get("served", "this server")
            raise ValueError(
                f"{served} takes no {_NOT_TAKEN[kind]} ({kind}); send text, "
                "image_url, video_url or video"
            )
        return part

    @pydantic.model_validator(mode="after")
    def _check_kind(self) -> "Part":
        names = ("text", "image_url", "video_url", "video")
        given = {name for name in names if getattr(self, name) is not None}
        if given != {self.type}:
            raise ValueError(f"a part of type {self.type} must have {self.type} and nothing else")
        return self


class Message(Strict):
    """One turn. `developer` is another name for `system`. Any turn may have pictures and videos."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    """Null for an assistant's turn that is nothing but calls."""
    tool_calls: list[CalledTool] | None = None
    """In an assistant's turn: the calls that it made."""
    tool_call_id: str | None = None
    """In a tool's turn: which call this answers; results are read in the order of the calls."""

    @pydantic.model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls stands in a turn that is not the assistant's")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id stands in a turn that is not a tool's")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Default: `auto` where there are tools."""
    parallel_tool_calls: bool | None = None
    """Default true: several calls may follow each other."""

    store: bool | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    """Size of this request's pictures, within the server's limits; of a frame of its videos the
    upper one."""
    fps: float | None = Field(None, gt=0)
    """Frames of a second of video that are looked at; of frames sent as such, how many a second
    they are. Default: the server's `media.video_fps`."""
    num_frames: int | None = Field(None, ge=1)
    """Frames of each video that are looked at, instead of `fps`."""
    video_pruning_rate: float | None = Field(None, ge=0, lt=1)
    """Share of each video's tokens that is dropped. Default: the server's
    `media.video_pruning_rate`."""
    mm_hashes: list[str] | None = None
    """Hex hash of each picture and video, a hint for routers and caches."""


def parse_chat_request(body: bytes, served: str) -> ChatRequest:
    """Read and check a request body; refusals of what no model takes name the one served.

    Raises:
        BadBody: Names the field at fault; repeats nothing of its content.
    """
    data = read_object(body)
    drop_neutral(data, NEUTRAL, "")
    messages = data.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            drop_neutral(message, NEUTRAL_IN_MESSAGE, f"messages[{i}].")
    return validated(ChatRequest, data, served=served)
