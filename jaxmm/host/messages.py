"""Chat messages as callers write them, checked and in one form. Host only."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmm.errors import RequestError
from jaxmm.host.item import Modality

_ITEMS = {m.value: m for m in (Modality.IMAGE, Modality.VIDEO)}
ROLES = ("system", "user", "assistant")


class Turn(NamedTuple):
    """One message."""

    role: str
    parts: tuple[str | None, ...]
    """A text, or None where an image or a video stands."""
    is_string: bool
    """The caller gave a plain string; `parts` holds just that."""
    modalities: tuple[Modality, ...] = ()
    """Of each None among the parts, in their order."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Check messages as `jaxmm.request.Request.messages` describes them.

    Raises:
        RequestError: Something else was given; names the place.
    """
    if isinstance(messages, str | bytes | Mapping) or not messages:
        raise RequestError("messages must be a list with at least one turn")
    return tuple(_read_turn(f"messages[{i}]", message) for i, message in enumerate(messages))


def _read_turn(where: str, message: object) -> Turn:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise RequestError(f"{where} must have role and content and nothing else")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RequestError(f"{where}.role is not one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return Turn(role, (read_text(f"{where}.content", content),), True)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where}.content is neither a string nor a list of parts")
    read = [_read_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
    return Turn(
        role,
        tuple(None if isinstance(part, Modality) else part for part in read),
        False,
        tuple(part for part in read if isinstance(part, Modality)),
    )


def _read_part(where: str, part: object) -> str | Modality:
    if isinstance(part, Mapping) and len(part) == 1 and part.get("type") in _ITEMS:
        return _ITEMS[str(part["type"])]
    if isinstance(part, Mapping) and part.get("type") == "text" and set(part) == {"type", "text"}:
        return read_text(f"{where}.text", part["text"])
    raise RequestError(
        f'{where} must be {{"type": "text", "text": "..."}}, {{"type": "image"}} or '
        '{"type": "video"}, and no more'
    )


def read_text(where: str, text: object) -> str:
    """Check that a text is a string that UTF-8 can carry.

    Raises:
        RequestError: It is not; names `where`.
    """
    if not isinstance(text, str):
        raise RequestError(f"{where} is not a string")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(f"{where} has half a surrogate pair at character {e.start}") from None
    return text
