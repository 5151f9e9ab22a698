"""POST /generate: what its bodies ask, and how answers are written. Host only."""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from jaxmm.host.grammar import json_grammar
from jaxmm.request import Delta, ImageSource, Request, TokenLogprob, Usage
from serving.answers import DONE, LOWEST_LOGPROB, by_completion, event
from serving.ask import Ask, Pictures, Served
from serving.body import parse
from serving.encoded_images import read_encoded
from serving.native_protocol import EncodedImage, GenerateRequest
from serving.sampling_fields import to_sampling
from serving.translate import images_in, message_of, num_items, urls_in, videos_in


class GenerateEndpoint:
    """The engine's own request, as JSON."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def read(self, body: bytes) -> Ask:
        """See `serving.ask.Endpoint`."""
        asked = parse(GenerateRequest, body)
        answer_id = f"gen-{uuid.uuid4().hex}"

        def requests(pictures: Pictures) -> tuple[Request, ...]:
            return (self._request(asked, answer_id, pictures),)

        return Ask(
            id=answer_id,
            model=asked.model,
            stream=bool(asked.stream),
            urls=_urls(asked),
            num_items=num_items(asked.messages or ()) + len(asked.images or ()),
            requests=requests,
            writer=NativeWriter(asked, answer_id=answer_id, model=self._served.model),
        )

    def _request(self, asked: GenerateRequest, answer_id: str, pictures: Pictures) -> Request:
        grammar = asked.grammar
        if asked.json_schema is not None:
            grammar = json_grammar(asked.json_schema)
        max_tokens = asked.max_tokens
        if max_tokens is None:
            max_tokens = max(self._served.default_max_tokens, asked.min_tokens or 0)
        messages = asked.messages
        return Request(
            id=answer_id,
            messages=None if messages is None else [message_of(m) for m in messages],
            text=asked.text,
            token_ids=asked.token_ids,
            images=_images(asked, pictures),
            videos=videos_in(asked.messages or (), pictures),
            fps=asked.fps,
            num_frames=asked.num_frames,
            video_pruning_rate=asked.video_pruning_rate,
            sampling=to_sampling(
                asked,
                vocab_size=self._served.tokenizer.vocab_size,
                max_tokens=max_tokens,
                temperature=0.0,
                logprobs=asked.logprobs,
                grammar=grammar,
            ),
            salt=asked.cache_salt or "",
            mm_hashes=None if asked.mm_hashes is None else tuple(asked.mm_hashes),
            min_pixels=asked.min_pixels,
            max_pixels=asked.max_pixels,
        )


def _urls(asked: GenerateRequest) -> dict[str, str]:
    urls = urls_in(asked.messages or ())
    for i, image in enumerate(asked.images or ()):
        urls[f"images[{i}]"] = image.safetensors if isinstance(image, EncodedImage) else image
    return urls


def _images(asked: GenerateRequest, pictures: Pictures) -> tuple[ImageSource, ...]:
    in_messages = images_in(asked.messages or (), pictures)
    beside = [
        read_encoded(pictures[f"images[{i}]"])
        if isinstance(image, EncodedImage)
        else pictures[f"images[{i}]"]
        for i, image in enumerate(asked.images or ())
    ]
    return (*in_messages, *beside)


class NativeWriter:
    """Shapes the answer to one body as the engine tells it."""

    def __init__(self, asked: GenerateRequest, *, answer_id: str, model: str) -> None:
        self._head = {"id": answer_id, "model": model}
        self._wants_logprobs = asked.logprobs is not None

    def chunk(self, delta: Delta) -> bytes:
        """Write one server-sent event; empty if the delta shows nothing yet."""
        return event({**self._head, **self._completion(delta), "usage": _usage(delta.usage)})

    def last_chunks(self) -> bytes:
        """Write the end mark."""
        return DONE

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Write the body of an answer that is not streamed, from all its deltas."""
        completions = sorted(by_completion(deltas).values(), key=lambda delta: delta.index)
        usage = next(delta.usage for delta in reversed(deltas) if delta.usage)
        body = {"completions": [self._completion(d) for d in completions], "usage": _usage(usage)}
        return to_json({**self._head, **body})

    def _completion(self, delta: Delta) -> dict[str, Any]:
        logprobs = [_logprob(p) for p in delta.logprobs or ()] if self._wants_logprobs else None
        return {
            "index": delta.index,
            "text": delta.text,
            "token_ids": delta.token_ids,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }


def _usage(usage: Usage | None) -> dict[str, int] | None:
    return None if usage is None else dataclasses.asdict(usage)


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "logprob": max(token.logprob, LOWEST_LOGPROB),
        "top": [[i, max(value, LOWEST_LOGPROB)] for i, value in token.top],
    }
