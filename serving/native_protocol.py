"""Requests of jaxmm's own API: what the engine takes, as JSON. Host only."""

from typing import Annotated, Any

import pydantic
from pydantic import Field

from jaxmm.request import MAX_LOGPROBS
from serving.body import Strict
from serving.protocol import Message
from serving.sampling_fields import SamplingFields
from serving.structured import ToolDefinition

TokenIds = list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class EncodedImage(Strict):
    """An image that the same checkpoint's encoder has encoded already."""

    safetensors: str
    """URL or data URI of a safetensors file with `rows`, float[M, D], and `grid_thw`, int[3]."""


class GenerateRequest(SamplingFields):
    """Body of POST /generate; exactly one of `messages`, `text` and `token_ids` is given."""

    messages: list[Message] | None = Field(None, min_length=1)
    """Chat turns, through the chat template; images stand in them, as in chat completions."""
    text: str | None = None
    """Raw prompt, without images."""
    token_ids: TokenIds | None = None
    """Raw prompt, one placeholder id for each of `images`, or as many as it has tokens, as the Qwen
    models' own processors write them."""
    images: list[str | EncodedImage] | None = None
    """URLs, data URIs or encoded images, in the order of their placeholders; with `token_ids`."""
    temperature: float | None = None
    """Default 0: greedy."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Most likely tokens to tell of beside the one that was chosen."""
    grammar: str | None = None
    """What the output must match, in llguidance's Lark dialect."""
    json_schema: dict[str, Any] | None = None
    """The same, as a JSON schema."""
    min_pixels: int | None = Field(None, ge=1)
    max_pixels: int | None = Field(None, ge=1)
    fps: float | None = Field(None, gt=0)
    num_frames: int | None = Field(None, ge=1)
    video_pruning_rate: float | None = Field(None, ge=0, lt=1)
    """As in chat: how the videos of the messages are looked at."""
    mm_hashes: list[str] | None = None

    @pydantic.model_validator(mode="after")
    def _check_forms(self) -> "GenerateRequest":
        if sum(value is not None for value in (self.messages, self.text, self.token_ids)) != 1:
            raise ValueError("give exactly one of messages, text and token_ids")
        if self.images and self.token_ids is None:
            raise ValueError("images stands beside token_ids; messages have theirs in their parts")
        if self.grammar is not None and self.json_schema is not None:
            raise ValueError("give one of grammar and json_schema")
        return self


class TokenizeRequest(Strict):
    """Body of POST /tokenize; exactly one of `text` and `messages` is given."""

    text: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[ToolDefinition] | None = None

    @pydantic.model_validator(mode="after")
    def _check_forms(self) -> "TokenizeRequest":
        if (self.text is None) == (self.messages is None):
            raise ValueError("give exactly one of text and messages")
        if self.tools and self.messages is None:
            raise ValueError("tools stands beside messages")
        return self


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    token_ids: TokenIds
    skip_special_tokens: bool | None = None
    """Default false."""


class AbortRequest(Strict):
    """Body of POST /abort."""

    id: str
    """Of an answer, as its `id` says."""
