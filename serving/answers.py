"""What all answers are made of: events, usage, log-probabilities. Host only."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pydantic_core import to_json

from jaxmm.request import Delta, TokenLogprob, Usage
from serving.sampling_fields import SamplingFields

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""What the API writes for a token that cannot be sampled; JSON has no infinity."""


class Writer(Protocol):
    """Shapes the answer to one body, from the deltas of all its requests."""

    def chunk(self, delta: Delta) -> bytes:
        """Write one server-sent event; empty if the delta shows nothing yet."""
        ...

    def last_chunks(self) -> bytes:
        """Write what follows the last delta."""
        ...

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Write the body of an answer that is not streamed, from all its deltas."""
        ...


def event(body: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + to_json(body) + b"\n\n"


def written_bytes(delta: Delta) -> int:
    """About how many bytes of JSON a delta becomes; by far the most are log-probabilities."""
    entries = len(delta.token_ids) + sum(1 + len(p.top) for p in delta.logprobs or ())
    return 96 * entries


def head(answer_id: str, model: str) -> dict[str, Any]:
    """What every answer and every chunk begins with."""
    return {"id": answer_id, "created": int(time.time()), "model": model}


def wants_usage(fields: SamplingFields) -> bool:
    """Whether a stream ends with the usage."""
    options = fields.stream_options
    return bool(options and options.include_usage)


def usage_body(usages: Iterable[Usage]) -> dict[str, Any]:
    """Shape the token counts of all requests together; those of images and videos are additions."""
    several = tuple(usages)
    details = ("cached_tokens", "image_tokens", "video_tokens")
    prompt, completion, *counts = (
        sum(getattr(usage, name) for usage in several)
        for name in ("prompt_tokens", "completion_tokens", *details)
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": dict(zip(details, counts, strict=True)),
    }


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one completion as one."""
    last = deltas[-1]
    return Delta(
        id=last.id,
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        logprobs=tuple(p for delta in deltas for p in delta.logprobs or ()),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )


def by_completion(deltas: Sequence[Delta]) -> dict[tuple[str, int], Delta]:
    """Each completion as one delta, by request and index, in the order in which they began."""
    grouped: dict[tuple[str, int], list[Delta]] = {}
    for delta in deltas:
        grouped.setdefault((delta.id, delta.index), []).append(delta)
    return {key: joined(several) for key, several in grouped.items()}


class TokenNames:
    """How tokens are written in log-probabilities."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """Take the bytes of every token id."""
        self._token_bytes = token_bytes

    def raw(self, token_id: int) -> bytes:
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def text(self, token_id: int) -> str:
        return self.raw(token_id).decode(errors="replace")

    def named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self.raw(token_id)),
        }

    def entry(self, token: TokenLogprob) -> dict[str, Any]:
        """A token with the most likely ones in its place."""
        top = [self.named(i, logprob) for i, logprob in token.top]
        return {**self.named(token.token_id, token.logprob), "top_logprobs": top}
