"""From an API request to the engine's. Host only."""

import re
from collections.abc import Mapping
from typing import Any

from jaxmm.request import Request, SamplingParams
from serving.errors import BadBody
from serving.protocol import ChatRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024


def image_urls(chat: ChatRequest) -> dict[str, str]:
    """Place of each picture in the body, to its URL, in the order of the prompt."""
    return {
        f"messages[{i}].content[{j}].image_url": part.image_url.url
        for i, message in enumerate(chat.messages)
        if not isinstance(message.content, str)
        for j, part in enumerate(message.content)
        if part.image_url is not None
    }


def to_request(
    chat: ChatRequest,
    pictures: Mapping[str, bytes],
    *,
    request_id: str,
    vocab_size: int,
    default_max_tokens: int,
) -> Request:
    """Build the engine's request.

    Args:
        chat: A parsed body.
        pictures: Encoded bytes by place, of every place in `image_urls(chat)`.
        request_id: Name in logs and answers.
        vocab_size: Bound of token ids that a client may name.
        default_max_tokens: Length of the answer if the body gives none.

    Raises:
        BadBody: Fields that contradict each other or name no token.
        SamplingError: A sampling parameter outside its range.
    """
    if chat.stream_options is not None and not chat.stream:
        raise BadBody("stream_options needs stream: true", "stream_options")
    return Request(
        id=request_id,
        messages=[_message(message.role, message.content) for message in chat.messages],
        images=tuple(pictures[where] for where in image_urls(chat)),
        sampling=_sampling(chat, vocab_size, default_max_tokens),
        salt=chat.cache_salt or "",
        mm_hashes=None if chat.mm_hashes is None else tuple(chat.mm_hashes),
        min_pixels=chat.min_pixels,
        max_pixels=chat.max_pixels,
    )


def _message(role: str, content: Any) -> dict[str, Any]:
    role = "system" if role == "developer" else role
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts = [
        {"type": "text", "text": part.text} if part.image_url is None else {"type": "image"}
        for part in content
    ]
    return {"role": role, "content": parts}


def _sampling(chat: ChatRequest, vocab_size: int, default_max_tokens: int) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": 1.0 if chat.temperature is None else chat.temperature,
        "max_tokens": _max_tokens(chat, default_max_tokens),
        "logprobs": _logprobs(chat),
        "logit_bias": _logit_bias(chat, vocab_size),
        "stop": _stop(chat),
        "stop_token_ids": _stop_token_ids(chat, vocab_size),
        "n": chat.n,
        "seed": chat.seed,
        "top_p": chat.top_p,
        "top_k": chat.top_k,
        "min_p": chat.min_p,
        "presence_penalty": chat.presence_penalty,
        "frequency_penalty": chat.frequency_penalty,
        "repetition_penalty": chat.repetition_penalty,
        "min_tokens": chat.min_tokens,
        "ignore_eos": chat.ignore_eos,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _max_tokens(chat: ChatRequest, default: int) -> int:
    given = {chat.max_tokens, chat.max_completion_tokens} - {None}
    if len(given) > 1:
        raise BadBody("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    if given:
        return next(n for n in given if n is not None)
    return max(default, chat.min_tokens or 0)


def _logprobs(chat: ChatRequest) -> int | None:
    if chat.top_logprobs is not None and not chat.logprobs:
        raise BadBody("top_logprobs needs logprobs: true", "top_logprobs")
    return (chat.top_logprobs or 0) if chat.logprobs else None


def _logit_bias(chat: ChatRequest, vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in (chat.logit_bias or {}).items():
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= vocab_size:
            raise BadBody(f"logit_bias names no token id below {vocab_size}", "logit_bias")
        biases[int(key)] = bias
    return biases


def _stop(chat: ChatRequest) -> tuple[str, ...]:
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise BadBody(f"stop has {len(stop)} strings; the limit is {MAX_STOP_STRINGS}", "stop")
    if any(len(s) > MAX_STOP_CHARACTERS for s in stop):
        raise BadBody(f"stop has a string over {MAX_STOP_CHARACTERS} characters", "stop")
    return stop


def _stop_token_ids(chat: ChatRequest, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(chat.stop_token_ids or ())
    if not all(0 <= i < vocab_size for i in ids):
        raise BadBody(f"stop_token_ids names no token id below {vocab_size}", "stop_token_ids")
    return ids
