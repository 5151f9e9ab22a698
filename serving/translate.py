"""From a chat request to the engine's. Host only."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmm.request import Request
from serving.ask import Served
from serving.errors import BadBody
from serving.protocol import ChatRequest, Message
from serving.sampling_fields import to_sampling
from serving.structured import grammar_of, offered_tools


def image_urls(chat: ChatRequest) -> dict[str, str]:
    """Place of each picture in the body, to its URL, in the order of the prompt."""
    return urls_in(chat.messages)


def urls_in(messages: Sequence[Message]) -> dict[str, str]:
    """The same, of messages."""
    return {
        f"messages[{i}].content[{j}].image_url": part.image_url.url
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if part.image_url is not None
    }


def check_num_pictures(count: int, limit: int) -> None:
    """Refuse too many pictures before any is fetched.

    Raises:
        BadBody: More than `limit`.
    """
    if count > limit:
        message = f"the request has {count} images; the limit is {limit} (media.max_items)"
        raise BadBody(message, "messages")


def to_request(
    chat: ChatRequest,
    pictures: Mapping[str, bytes],
    *,
    request_id: str,
    served: Served,
) -> Request:
    """Build the engine's request.

    Args:
        chat: A parsed body.
        pictures: Encoded bytes by place, of every place in `image_urls(chat)`.
        request_id: Name in logs and answers.
        served: The model, and the defaults of requests.

    Raises:
        BadBody: Fields that contradict each other or name no token.
        SamplingError: A sampling parameter outside its range.
    """
    return Request(
        id=request_id,
        messages=[message_of(message) for message in chat.messages],
        tools=offered_tools(chat),
        images=tuple(pictures[where] for where in image_urls(chat)),
        sampling=to_sampling(
            chat,
            vocab_size=served.tokenizer.vocab_size,
            max_tokens=_max_tokens(chat, served.default_max_tokens),
            logprobs=_logprobs(chat),
            grammar=grammar_of(chat),
        ),
        salt=chat.cache_salt or "",
        mm_hashes=None if chat.mm_hashes is None else tuple(chat.mm_hashes),
        min_pixels=chat.min_pixels,
        max_pixels=_max_pixels(chat, served.low_detail_pixels),
    )


def message_of(message: Message) -> dict[str, Any]:
    """A message as the engine takes it."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.content}
    if isinstance(message.content, list):
        turn["content"] = [
            {"type": "text", "text": part.text} if part.image_url is None else {"type": "image"}
            for part in message.content
        ]
    if message.tool_calls:
        turn["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return turn


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


def _max_pixels(chat: ChatRequest, low: int) -> int | None:
    """The request's upper limit, which `detail: low` lowers for all its pictures."""
    details = {
        part.image_url.detail == "low"
        for message in chat.messages
        if isinstance(message.content, list)
        for part in message.content
        if part.image_url is not None
    }
    if details == {True, False}:
        raise BadBody("detail is low for some images and not for others; make them one", "messages")
    if details != {True}:
        return chat.max_pixels
    return min(low, chat.max_pixels or low)
