"""The shapes of answers, for the OpenAPI page alone: they are written by hand. Host only."""

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    cached_tokens: int
    image_tokens: int
    video_tokens: int


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCallBody(BaseModel):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCallBody] = []


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None
    token_ids: list[int] = []


class ChatAnswer(BaseModel):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None
    token_ids: list[int] = []


class TextAnswer(BaseModel):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class GeneratedText(BaseModel):
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None
    finish_reason: Literal["stop", "length"]


class GenerateAnswer(BaseModel):
    """Answer of POST /generate."""

    id: str
    model: str
    completions: list[GeneratedText]
    usage: dict[str, int]


class TokensAnswer(BaseModel):
    """Answer of POST /tokenize."""

    token_ids: list[int]
    count: int


class TextOfTokens(BaseModel):
    """Answer of POST /detokenize."""

    text: str


class ImagePlan(BaseModel):
    """One image of a plan."""

    tokens: int
    grid_thw: list[int]
    lane_patches: int
    padding: float
    cached: Literal["prefix", "rows", "no"]


class PlanAnswer(BaseModel):
    """Answer of POST /v1/plan: what a request would cost if it ran now and alone."""

    prompt_tokens: int
    images: list[ImagePlan]
    cached_tokens: int
    step_tokens: list[int]
    step_padding: float
    max_output_tokens: int
    completions: int
    prompt_pages: int
    total_pages: int
    free_pages: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Status(BaseModel):
    """A word on how it is."""

    status: str
