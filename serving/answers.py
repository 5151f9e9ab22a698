"""The engine's deltas in the shapes of the OpenAI API, streamed and whole. Host only."""

import time
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from jaxmm.request import Delta, TokenLogprob, Usage
from serving.protocol import ChatRequest

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""What the API writes for a token that cannot be sampled; JSON has no infinity."""


class AnswerWriter:
    """Shapes the answer to one request."""

    def __init__(
        self, chat: ChatRequest, *, answer_id: str, model: str, token_bytes: Sequence[bytes]
    ) -> None:
        """Take what the request wants to see, and the bytes of every token id for logprobs."""
        self._token_bytes = token_bytes
        self._wants_ids = bool(chat.return_token_ids)
        self._wants_logprobs = bool(chat.logprobs)
        options = chat.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._begun: set[int] = set()
        self._usage: Usage | None = None

    def chunk(self, delta: Delta) -> bytes:
        """Write one server-sent event; empty if the delta shows nothing yet."""
        self._usage = delta.usage or self._usage
        shows = delta.text or delta.finish_reason or delta.logprobs
        if not shows and not (self._wants_ids and delta.token_ids):
            return b""
        message = {"content": delta.text}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            message = {"role": "assistant", **message}
        choice = self._choice(delta.index, delta.token_ids, delta.logprobs, delta.finish_reason)
        return self._event([{**choice, "delta": message}], None)

    def last_chunks(self) -> bytes:
        """Write what follows the last delta: the usage, if asked for, and the end mark."""
        usage = self._event([], self._usage) if self._wants_usage and self._usage else b""
        return usage + DONE

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Write the body of an answer that is not streamed, from all its deltas."""
        by_index: dict[int, list[Delta]] = {}
        for delta in deltas:
            self._usage = delta.usage or self._usage
            by_index.setdefault(delta.index, []).append(delta)
        choices = [self._message(index, by_index[index]) for index in sorted(by_index)]
        body = {**self._head, "object": "chat.completion", "choices": choices}
        return to_json(body | {"usage": self._usage and usage_body(self._usage)})

    def _message(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        token_ids = tuple(i for delta in deltas for i in delta.token_ids)
        logprobs = tuple(p for delta in deltas for p in delta.logprobs or ())
        choice = self._choice(index, token_ids, logprobs, deltas[-1].finish_reason)
        content = "".join(delta.text for delta in deltas)
        return {**choice, "message": {"role": "assistant", "content": content, "refusal": None}}

    def _choice(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        if self._wants_logprobs:
            content = [self._logprob(p) for p in logprobs or ()]
            choice["logprobs"] = {"content": content, "refusal": None}
        if self._wants_ids:
            choice["token_ids"] = token_ids
        return choice

    def _logprob(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._named(i, logprob) for i, logprob in token.top]
        return {**self._named(token.token_id, token.logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        return {
            "token": raw.decode(errors="replace"),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
        }

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._wants_usage:
            chunk["usage"] = usage and usage_body(usage)
        return event(chunk)


def event(body: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + to_json(body) + b"\n\n"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Shape token counts; `image_tokens` is an addition to the API."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "image_tokens": usage.image_tokens,
        },
    }
