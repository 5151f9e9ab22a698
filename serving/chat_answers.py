"""The engine's deltas in the shapes of chat completions, streamed and whole. Host only."""

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from jaxmm.host.tool_calls import CallPiece, ToolCallReader
from jaxmm.request import Delta, Usage
from serving.answers import DONE, TokenNames, by_completion, event, head, usage_body, wants_usage
from serving.protocol import ChatRequest
from serving.structured import offered_tools


class ChatWriter:
    """Shapes the answer to one chat request."""

    def __init__(
        self, chat: ChatRequest, *, answer_id: str, model: str, token_bytes: Sequence[bytes]
    ) -> None:
        """Take what the request wants to see, and the bytes of every token id for logprobs."""
        self._names = TokenNames(token_bytes)
        self._wants_ids = bool(chat.return_token_ids)
        self._wants_logprobs = bool(chat.logprobs)
        self._wants_usage = wants_usage(chat)
        self._has_tools = bool(offered_tools(chat))
        self._head = head(answer_id, model)
        self._readers: dict[int, ToolCallReader] = {}
        self._usage: Usage | None = None

    def chunk(self, delta: Delta) -> bytes:
        """Write one server-sent event; empty if the delta shows nothing yet."""
        self._usage = delta.usage or self._usage
        is_first = delta.index not in self._readers
        content, pieces = self._read(delta)
        shows = content or pieces or delta.finish_reason or delta.logprobs
        if not shows and not (self._wants_ids and delta.token_ids):
            return b""
        message: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if content or not pieces:
            message["content"] = content
        if pieces:
            message["tool_calls"] = [_piece_body(piece) for piece in pieces]
        return self._event([{**self._choice(delta), "delta": message}], None)

    def last_chunks(self) -> bytes:
        """Write what follows the last delta: the usage, if asked for, and the end mark."""
        usage = self._event([], self._usage) if self._wants_usage and self._usage else b""
        return usage + DONE

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Write the body of an answer that is not streamed, from all its deltas."""
        completions = by_completion(deltas).values()
        choices = [self._message(delta) for delta in sorted(completions, key=lambda d: d.index)]
        self._usage = next(d.usage for d in reversed(deltas) if d.usage)
        body = {**self._head, "object": "chat.completion", "choices": choices}
        return to_json(body | {"usage": usage_body([self._usage])})

    def _read(self, delta: Delta) -> tuple[str, list[CallPiece]]:
        """Content and calls in what a delta adds."""
        reader = self._readers.setdefault(delta.index, ToolCallReader())
        if not self._has_tools:
            return delta.text, []
        content, pieces = reader.push(delta.text)
        if delta.finish_reason is not None:
            rest, more = reader.finish()
            content, pieces = content + rest, pieces + more
        return content, pieces

    def _message(self, delta: Delta) -> dict[str, Any]:
        content, pieces = self._read(delta)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if pieces:
            message["content"] = content or None
            message["tool_calls"] = _calls(pieces)
        return {**self._choice(delta), "message": message}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """What a choice has beside its message; `delta` has been read."""
        reason: str | None = delta.finish_reason
        if reason == "stop" and self._readers[delta.index].num_calls:
            reason = "tool_calls"
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": reason, "logprobs": None}
        if self._wants_logprobs:
            content = [self._names.entry(p) for p in delta.logprobs or ()]
            choice["logprobs"] = {"content": content, "refusal": None}
        if self._wants_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._wants_usage:
            chunk["usage"] = usage and usage_body([usage])
        return event(chunk)


def _piece_body(piece: CallPiece) -> dict[str, Any]:
    function = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.call_index, "function": function}
    named = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
    return {"index": piece.call_index, **named, "function": {"name": piece.name, **function}}


def _calls(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append(_piece_body(piece))
            del calls[-1]["index"]
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    return calls
