"""Chat messages as callers write them, checked and in one form. Host only."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmm.errors import RequestError
from jaxmm.host.item import Modality
from jaxmm.host.tools import ToolCall, read_name

_ITEMS = {m.value: m for m in (Modality.IMAGE, Modality.VIDEO)}
ROLES = ("system", "user", "assistant", "tool")


class Turn(NamedTuple):
    """One message."""

    role: str
    parts: tuple[str | None, ...]
    """A text, or None where an image or a video stands."""
    is_string: bool
    """The caller gave a plain string; `parts` holds just that."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools that an assistant's turn made."""
    modalities: tuple[Modality, ...] = ()
    """Of each None among the parts, in their order."""

    @property
    def texts(self) -> list[str]:
        """Every text in it, those of its calls too."""
        own = [part for part in self.parts if part is not None]
        return own + [str(call) for call in self.calls]


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Check messages as `jaxmm.request.Request.messages` describes them.

    Raises:
        RequestError: Something else was given; names the place.
    """
    if isinstance(messages, str | bytes | Mapping) or not messages:
        raise RequestError("messages must be a list with at least one turn")
    return tuple(_read_turn(f"messages[{i}]", message) for i, message in enumerate(messages))


def _read_turn(where: str, message: object) -> Turn:
    if not isinstance(message, Mapping) or set(message) - {"tool_calls"} != {"role", "content"}:
        raise RequestError(f"{where} must have role and content and nothing else")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RequestError(f"{where}.role is not one of {', '.join(ROLES)}")
    calls = _read_calls(f"{where}.tool_calls", message.get("tool_calls") or ())
    if calls and role != "assistant":
        raise RequestError(f"{where}.tool_calls stands in a turn that is not the assistant's")
    if content is None and calls:
        return Turn(role, ("",), True, calls)
    if isinstance(content, str):
        return Turn(role, (read_text(f"{where}.content", content),), True, calls)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where}.content is neither a string nor a list of parts")
    read = [_read_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
    return Turn(
        role,
        tuple(None if isinstance(part, Modality) else part for part in read),
        False,
        calls,
        tuple(part for part in read if isinstance(part, Modality)),
    )


def _read_calls(where: str, calls: object) -> tuple[ToolCall, ...]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(f"{where} is not a list")
    return tuple(_read_call(f"{where}[{i}].function", call) for i, call in enumerate(calls))


def _read_call(where: str, call: object) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} is missing")
    name, arguments = read_name(f"{where}.name", function.get("name")), function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(read_text(f"{where}.arguments", arguments) or "{}")
        except ValueError:
            raise RequestError(f"{where}.arguments is not valid JSON") from None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.arguments is not a JSON object")
    return ToolCall(name, arguments)


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
