"""The fields that every request for an answer has, and what they mean to the engine. Host only."""

import re
from typing import Any, Literal

from pydantic import Field

from jaxmm.request import SamplingParams
from serving.body import Strict
from serving.errors import BadBody

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024


class StreamOptions(Strict):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(Strict):
    """How the answer is chosen, when it ends, and how it is sent."""

    model: str | None = None
    """Name from GET /v1/models; may be left out."""
    max_tokens: int | None = None
    temperature: float | None = None
    """Default 1, as everywhere in this API; 0 is greedy."""
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    """Caches are shared only between requests of equal salt; without one, with all others."""
    return_token_ids: bool | None = None
    """Adds `token_ids` to each choice."""


_SAME_NAME = (
    "n", "seed", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos",
)  # fmt: skip


def to_sampling(
    fields: SamplingFields,
    *,
    vocab_size: int,
    max_tokens: int,
    temperature: float = 1.0,
    logprobs: int | None = None,
    grammar: str | None = None,
) -> SamplingParams:
    """The engine's parameters.

    Args:
        fields: Of a body.
        vocab_size: Bound of token ids that a client may name.
        max_tokens: Length of the answer.
        temperature: Where the body gives none.
        logprobs: Most likely tokens to tell of; None for no logprobs.
        grammar: What the answer must match.

    Raises:
        BadBody: Fields that contradict each other or name no token.
        SamplingError: A parameter outside its range.
    """
    if fields.stream_options is not None and not fields.stream:
        raise BadBody("stream_options needs stream: true", "stream_options")
    given: dict[str, Any] = {name: getattr(fields, name) for name in _SAME_NAME}
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=max_tokens,
        temperature=temperature if fields.temperature is None else fields.temperature,
        logprobs=logprobs,
        grammar=grammar,
        stop=_stop(fields.stop),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, vocab_size),
        logit_bias=_logit_bias(fields.logit_bias, vocab_size),
    )


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in (given or {}).items():
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= vocab_size:
            raise BadBody(f"logit_bias names no token id below {vocab_size}", "logit_bias")
        biases[int(key)] = bias
    return biases


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise BadBody(f"stop has {len(stop)} strings; the limit is {MAX_STOP_STRINGS}", "stop")
    if any(len(s) > MAX_STOP_CHARACTERS for s in stop):
        raise BadBody(f"stop has a string over {MAX_STOP_CHARACTERS} characters", "stop")
    return stop


def _stop_token_ids(given: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(given or ())
    if not all(0 <= i < vocab_size for i in ids):
        raise BadBody(f"stop_token_ids names no token id below {vocab_size}", "stop_token_ids")
    return ids
