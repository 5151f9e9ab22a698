"""POST /v1/completions: what its bodies ask, and how answers are written. Host only."""

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from jaxmm.host.detokenize import Detokenizer
from jaxmm.request import Delta, Request, SamplingParams, TokenLogprob, Usage
from serving.answers import (
    DONE,
    LOWEST_LOGPROB,
    TokenNames,
    by_completion,
    event,
    head,
    usage_body,
    wants_usage,
)
from serving.ask import Ask, Pictures, Served
from serving.sampling_fields import to_sampling
from serving.text_protocol import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    parse_completion_request,
)


class TextEndpoint:
    """Raw prompts, one or several in a body: each is a request of its own."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def read(self, body: bytes) -> Ask:
        """See `serving.ask.Endpoint`."""
        asked = parse_completion_request(body)
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        names = [f"{answer_id}-{k}" for k in range(len(asked.prompts))]
        sampling = self._sampling(asked)

        def requests(_: Pictures) -> tuple[Request, ...]:
            return tuple(
                Request(
                    id=name,
                    text=prompt if isinstance(prompt, str) else None,
                    token_ids=None if isinstance(prompt, str) else prompt,
                    sampling=sampling,
                    salt=asked.cache_salt or "",
                )
                for name, prompt in zip(names, asked.prompts, strict=True)
            )

        return Ask(
            id=answer_id,
            model=asked.model,
            stream=bool(asked.stream),
            urls={},
            num_items=0,
            requests=requests,
            writer=TextWriter(asked, answer_id=answer_id, request_ids=names, served=self._served),
        )

    def _sampling(self, asked: CompletionRequest) -> SamplingParams:
        return to_sampling(
            asked,
            vocab_size=self._served.tokenizer.vocab_size,
            max_tokens=max(DEFAULT_MAX_TOKENS, asked.min_tokens or 0)
            if asked.max_tokens is None
            else asked.max_tokens,
            logprobs=asked.logprobs,
        )


class TextWriter:
    """Shapes the answer to one body; choices count through all prompts, each with its `n`."""

    def __init__(
        self,
        asked: CompletionRequest,
        *,
        answer_id: str,
        request_ids: Sequence[str],
        served: Served,
    ) -> None:
        """Take what the request wants to see.

        Args:
            asked: The body.
            answer_id: Of the whole answer.
            request_ids: Of the engine's requests, one for each prompt.
            served: The model.
        """
        self._names = TokenNames(served.tokenizer.token_bytes)
        self._wants_ids = bool(asked.return_token_ids)
        self._wants_usage = wants_usage(asked)
        self._head = {**head(answer_id, served.model), "object": "text_completion"}
        n = asked.n or 1
        self._first_index = {name: k * n for k, name in enumerate(request_ids)}
        self._echoed: dict[str, str] = {}
        if asked.echo:
            texts = (_prompt_text(prompt, served) for prompt in asked.prompts)
            self._echoed = dict(zip(request_ids, texts, strict=True))
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._usages: dict[str, Usage] = {}

    def chunk(self, delta: Delta) -> bytes:
        """Write one server-sent event; empty if the delta shows nothing yet."""
        choice = self._choice(delta)
        shows = choice["text"] or delta.finish_reason or delta.logprobs
        if not shows and not (self._wants_ids and delta.token_ids):
            return b""
        return self._event([choice])

    def last_chunks(self) -> bytes:
        """Write what follows the last delta: the usage, if asked for, and the end mark."""
        return (self._event([], with_usage=True) if self._wants_usage else b"") + DONE

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Write the body of an answer that is not streamed, from all its deltas."""
        for delta in deltas:
            self._note_usage(delta)
        choices = [self._choice(delta) for delta in by_completion(deltas).values()]
        choices.sort(key=lambda choice: choice["index"])
        usage = usage_body(self._usages.values())
        return to_json({**self._head, "choices": choices, "usage": usage})

    def _choice(self, delta: Delta) -> dict[str, Any]:
        self._note_usage(delta)
        index = self._first_index[delta.id] + delta.index
        text = delta.text
        if index not in self._begun:
            self._begun.add(index)
            text = self._echoed.get(delta.id, "") + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": delta.finish_reason,
            "logprobs": self._logprobs(index, delta.logprobs) if delta.logprobs else None,
        }
        if self._wants_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Lists in step with the tokens; offsets count characters of the tokens' own texts."""
        tokens = [self._names.text(p.token_id) for p in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(p.logprob, LOWEST_LOGPROB) for p in logprobs],
            "top_logprobs": [
                {self._names.text(i): max(value, LOWEST_LOGPROB) for i, value in reversed(p.top)}
                for p in logprobs
            ],
            "text_offset": offsets,
        }

    def _note_usage(self, delta: Delta) -> None:
        if delta.usage is not None:
            self._usages[delta.id] = delta.usage

    def _event(self, choices: list[dict[str, Any]], *, with_usage: bool = False) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._wants_usage:
            chunk["usage"] = usage_body(self._usages.values()) if with_usage else None
        return event(chunk)


def _prompt_text(prompt: str | list[int], served: Served) -> str:
    if isinstance(prompt, str):
        return prompt
    detokenizer = Detokenizer(served.tokenizer.token_bytes)
    return detokenizer.push(prompt)[0] + detokenizer.finish()
