"""Requests of the OpenAI completions API: a raw prompt goes on, no chat template. Host only."""

from typing import Annotated, Any

import pydantic
from pydantic import Field

from serving.body import drop_neutral, read_object, validated
from serving.errors import BadBody
from serving.sampling_fields import SamplingFields

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1)]

NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",)}
"""Not supported: the model reads from left to right."""


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    """A text, its token ids, or several of either."""
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    """The prompt stands before each answer; not with `logprobs`."""
    best_of: int | None = None
    """`n` or left out: as many answers are made as are given."""

    @pydantic.model_validator(mode="after")
    def _check_echo(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported; leave one out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n; more answers than are given are not made")
        return self

    @property
    def prompts(self) -> tuple[str | list[int], ...]:
        """All prompts, one or several."""
        one: list[int] = [i for i in self.prompt if isinstance(i, int)]
        if isinstance(self.prompt, str) or one:
            return (one or str(self.prompt),)
        return tuple(p for p in self.prompt if not isinstance(p, int))


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Read and check a request body.

    Raises:
        BadBody: Names the field at fault; repeats nothing of its content.
    """
    data = read_object(body)
    if data.get("suffix"):
        raise BadBody("suffix is not supported: models read from left to right", "suffix")
    drop_neutral(data, NEUTRAL, "")
    return validated(CompletionRequest, data)
