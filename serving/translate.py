"""From a chat request to the engine's. Host only."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmm.request import Request
from serving.ask import Served
from serving.errors import BadBody
from serving.protocol import ChatRequest, Message, Part
from serving.sampling_fields import to_sampling
from serving.structured import grammar_of, offered_tools


def media_urls(chat: ChatRequest) -> dict[str, str]:
    """Place of each picture, video and frame in the body, to its URL, in the prompt's order."""
    return urls_in(chat.messages)


def urls_in(messages: Sequence[Message]) -> dict[str, str]:
    """The same, of messages."""
    return {
        where: url for place, part in _parts(messages) for where, url in _part_urls(place, part)
    }


def num_items(messages: Sequence[Message]) -> int:
    """Pictures and videos of a conversation; the frames of one video are one."""
    return sum(part.text is None for _, part in _parts(messages))


def images_in(messages: Sequence[Message], media: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """Each picture, in the order of the prompt, of the bytes by place."""
    parts = _parts(messages)
    return tuple(media[f"{place}.image_url"] for place, part in parts if part.image_url is not None)


def videos_in(
    messages: Sequence[Message], media: Mapping[str, bytes]
) -> tuple[bytes | list[bytes], ...]:
    """Each video, in the order of the prompt: a file, or its frames."""
    return tuple(
        media[f"{place}.video_url"]
        if part.video is None
        else [media[where] for where, _ in _part_urls(place, part)]
        for place, part in _parts(messages)
        if part.video is not None or part.video_url is not None
    )


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, Part]]:
    """Each part with its place."""
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                yield f"messages[{i}].content[{j}]", part


def _part_urls(place: str, part: Part) -> list[tuple[str, str]]:
    if part.image_url is not None:
        return [(f"{place}.image_url", part.image_url.url)]
    if part.video_url is not None:
        return [(f"{place}.video_url", part.video_url.url)]
    return [(f"{place}.video[{k}]", url) for k, url in enumerate(part.video or ())]


def check_num_pictures(count: int, limit: int) -> None:
    """Refuse too many pictures and videos before any is fetched.

    Raises:
        BadBody: More than `limit`.
    """
    if count > limit:
        message = (
            f"the request has {count} images and videos; the limit is {limit} (media.max_items)"
        )
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
        pictures: Encoded bytes by place, of every place in `media_urls(chat)`.
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
        images=images_in(chat.messages, pictures),
        videos=videos_in(chat.messages, pictures),
        fps=chat.fps,
        num_frames=chat.num_frames,
        video_pruning_rate=chat.video_pruning_rate,
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
            {"type": "text", "text": part.text}
            if part.text is not None
            else {"type": "video" if part.image_url is None else "image"}
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


def _max_pixels(chat: ChatRequest, low: int | None) -> int | None:
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
    if details != {True} or low is None:
        return chat.max_pixels
    return min(low, chat.max_pixels or low)
