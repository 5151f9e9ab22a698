"""Routes of jaxmm's own API beside /generate: tokens, plans, caches, aborts. Host only."""

import asyncio
import dataclasses
from typing import Any

from starlette.requests import Request

from jaxmm.host.detokenize import Detokenizer
from serving.ask import Served
from serving.body import parse, read_object
from serving.chat import ChatEndpoint
from serving.completions import Completions, read_body
from serving.engine import ServedEngine
from serving.errors import Forbidden, UnknownAnswer
from serving.generate import GenerateEndpoint
from serving.lifting import lift
from serving.native_protocol import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from serving.offload import Offload
from serving.protocol import ChatRequest
from serving.structured import tool_dicts
from serving.translate import message_of, urls_in
from serving.worker import while_connected, within


class Native:
    """Answers what is no answer of the model."""

    def __init__(
        self,
        engine: ServedEngine,
        completions: Completions,
        served: Served,
        offload: Offload,
        deadline_seconds: float,
    ) -> None:
        """Take the parts that it needs, and the time that a plan may take."""
        self._deadline_seconds = deadline_seconds
        self._engine = engine
        self._completions = completions
        self._offload = offload
        self._tokenizer = served.tokenizer
        self._plans = _PlanEndpoint(served)

    async def tokenize(self, http: Request) -> dict[str, Any]:
        """Ids of a text or a conversation; an image is one placeholder id, however large."""
        body = await read_body(http, self._offload)
        return await self._offload.run(len(body), self._tokenize, body)

    async def detokenize(self, http: Request) -> dict[str, Any]:
        """Text of ids; what is no UTF-8 becomes U+FFFD, ids beyond the vocabulary nothing."""
        body = await read_body(http, self._offload)
        return await self._offload.run(len(body), self._detokenize, body)

    async def plan(self, http: Request) -> dict[str, Any]:
        """What a request would cost now: tokens, buckets, padding, hits and pages."""
        _, [request] = await self._completions.prepare(http, self._plans)
        work = within(self._deadline_seconds, self._engine.cost(request))
        return dataclasses.asdict(await while_connected(http.receive, work))

    async def flush_cache(self, http: Request) -> dict[str, Any]:
        """Forget all prefixes, encoded items and known files that no running request uses.

        Raises:
            Forbidden: It would cost other tenants their cache entries.
        """
        if not http.state.is_admin:
            raise Forbidden(
                "this empties the caches of all tenants; it needs a key of admin_keys, which the "
                "operator of the server sets"
            )
        await asyncio.to_thread(self._engine.flush_caches)
        return {"status": "ok"}

    async def abort(self, http: Request) -> dict[str, Any]:
        """End an answer that is being made; its own client gets an error that says so."""
        body = await read_body(http, self._offload)
        asked = await self._offload.run(len(body), parse, AbortRequest, body)
        if not self._completions.abort(http.state.tenant, asked.id):
            raise UnknownAnswer("no answer of this id is being made")
        return {"status": "ok"}

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        ids = self._encode(_read_tokenize(body))
        return {"token_ids": ids, "count": len(ids)}

    def _detokenize(self, body: bytes) -> dict[str, Any]:
        asked = parse(DetokenizeRequest, body)
        hidden = self._tokenizer.special_ids if asked.skip_special_tokens else frozenset[int]()
        detokenizer = Detokenizer(self._tokenizer.token_bytes, hidden)
        return {"text": detokenizer.push(asked.token_ids)[0] + detokenizer.finish()}

    def _encode(self, asked: TokenizeRequest) -> list[int]:
        if asked.text is not None:
            return [int(i) for i in self._tokenizer.encode_text(asked.text)]
        messages = [message_of(message) for message in asked.messages or ()]
        ids = self._tokenizer.encode_chat(messages, tool_dicts(asked.tools or ())).ids
        return [int(i) for i in ids]


def _read_tokenize(body: bytes) -> TokenizeRequest:
    """Read a body without the pictures in it, which nobody looks at; see `lifting`."""
    lifted = lift(body)
    asked = parse(TokenizeRequest, lifted.rest)
    if lifted.put_back(urls_in(asked.messages or ())) is None:  # one of them is text
        return parse(TokenizeRequest, body)
    return asked


class _PlanEndpoint:
    """A body of chat completions, or of /generate: one with a field that only that has."""

    _GENERATE = GenerateRequest.model_fields.keys() - ChatRequest.model_fields.keys()

    def __init__(self, served: Served) -> None:
        self._chat, self._generate = ChatEndpoint(served), GenerateEndpoint(served)

    def read(self, body: bytes) -> Any:
        given = read_object(body).keys()
        is_chat = "messages" in given and not given & self._GENERATE
        return (self._chat if is_chat else self._generate).read(body)
