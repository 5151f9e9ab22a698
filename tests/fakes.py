"""Stand-ins with the surface of the real parts. Fakes, not mocks: they do a small true job."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

from jaxmm.config import EngineConfig
from jaxmm.cost import Cost
from jaxmm.errors import EngineStopped, JaxmmError, PlaceholderError
from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.detokenize import Detokenizer
from jaxmm.request import Delta, Request, TokenLogprob, Usage
from jaxmm.stats import CacheStats, EngineStats, ReplicaStats


class FakeEngine:
    """Answers every request with one fixed text, token by token; records what it was asked.

    The answer ends at `max_tokens`, at a stop string, or with the text; with `ignore_eos` the
    text begins anew. Logprobs are -1 for the token itself, and count down for its neighbours.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        answer: str = "A red square. 図 😀",
        *,
        seconds_before_answer: float = 0.0,
        seconds_per_token: float = 0.0,
        error: JaxmmError | None = None,
        error_after: int = 0,
    ) -> None:
        """Take the answer, its pace, and an error to raise before the token `error_after`."""
        self.config = EngineConfig()
        self.model_name = "fake"
        self.pictures_are_alike = False
        self.tokenizer = tokenizer
        self.healthy = True
        self.failure: BaseException | None = None
        self.turn_seconds = 0.0
        self.closed = False
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.num_tokens = 0
        self.flushes = 0
        self._answer = [int(i) for i in tokenizer.encode_text(answer)]
        self._seconds_before, self._seconds = seconds_before_answer, seconds_per_token
        self._error, self._error_after = error, error_after

    async def astream(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request)
        prompt_tokens = self._prompt_tokens(request)
        self.running.add(request.id)
        try:
            await asyncio.sleep(self._seconds_before)
            async for delta in self._deltas(request, prompt_tokens):
                yield delta
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.id)
            raise
        finally:
            self.running.discard(request.id)

    async def cost(self, request: Request) -> Cost:
        self.requests.append(request)
        tokens = self._prompt_tokens(request)
        return Cost(
            prompt_tokens=tokens,
            images=(),
            cached_tokens=0,
            step_tokens=(tokens,),
            step_padding=0.0,
            max_output_tokens=request.sampling.max_tokens,
            completions=request.sampling.n,
            prompt_pages=1,
            total_pages=1,
            free_pages=1,
        )

    def stats(self) -> EngineStats:
        cache = CacheStats(hits=2, misses=1)
        counts = dict.fromkeys(
            (f.name for f in dataclasses.fields(EngineStats) if f.type is int), self.num_tokens
        )
        rows = CacheStats(hits=60, misses=30)
        caches = {"prefix_cache": cache, "arena": cache, "arena_rows": rows, "media_map": cache}
        replica = dict.fromkeys(
            (f.name for f in dataclasses.fields(ReplicaStats) if f.type is int), self.num_tokens
        )
        replicas = (ReplicaStats(**replica, prefix_cache=cache, arena=cache, arena_rows=rows),)
        return EngineStats(**counts, **caches, padding_share=0.25, replicas=replicas)

    def flush_caches(self) -> None:
        self.flushes += 1

    def give_up(self, reason: str) -> None:
        self.failure = EngineStopped(reason)
        self.healthy = False

    def close(self) -> None:
        self.closed = True
        self.healthy = False

    def _prompt_tokens(self, request: Request) -> int:
        if request.messages is None:
            ids = request.token_ids or self.tokenizer.encode_text(request.text or "")
            return len(ids)
        ids, slots = self.tokenizer.encode_chat(request.messages, request.tools)
        if len(slots) != len(request.images):
            raise PlaceholderError(f"{len(slots)} places and {len(request.images)} images")
        return len(ids)

    async def _deltas(self, request: Request, prompt_tokens: int) -> AsyncIterator[Delta]:
        sampling = request.sampling
        answers = [self._fresh_text(sampling.stop) for _ in range(sampling.n)]
        open_answers = set(range(sampling.n))
        for step in range(sampling.max_tokens):
            if self._error is not None and step == self._error_after:
                raise self._error
            if self.failure is not None:
                raise EngineStopped(str(self.failure))
            token = self._answer[step % len(self._answer)]
            last = step + 1 == sampling.max_tokens
            ends = not sampling.ignore_eos and step + 1 == len(self._answer)
            for index in sorted(open_answers):
                self.num_tokens += 1
                text, stopped = answers[index].push([token])
                reason = "stop" if stopped or ends else "length" if last else None
                if reason:
                    text += answers[index].finish()
                    open_answers.discard(index)
                yield Delta(
                    id=request.id,
                    index=index,
                    text=text,
                    token_ids=(token,),
                    logprobs=_logprobs(token, sampling.logprobs),
                    finish_reason=reason,
                    usage=Usage(
                        prompt_tokens=prompt_tokens,
                        image_tokens=len(request.images),
                        cached_tokens=prompt_tokens - 1 if len(self.requests) > 1 else 0,
                        completion_tokens=(step + 1) * sampling.n,
                    ),
                )
            if not open_answers:
                return
            await asyncio.sleep(self._seconds)

    def _fresh_text(self, stop: Sequence[str]) -> Detokenizer:
        return Detokenizer(self.tokenizer.token_bytes, self.tokenizer.special_ids, stop)


def _logprobs(token: int, num_top: int | None) -> tuple[TokenLogprob, ...] | None:
    if num_top is None:
        return None
    top = tuple((token + k, -1.0 - k) for k in range(num_top))
    return (TokenLogprob(token_id=token, logprob=-1.0, top=top),)
