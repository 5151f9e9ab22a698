"""The deltas of requests as their callers want them: gathered into results, or streamed.
Host only."""

import queue
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from jaxmm.errors import JaxmmError
from jaxmm.request import Completion, Delta, Request, Result, SamplingParams, TokenLogprob, Usage

if TYPE_CHECKING:
    from jaxmm.engine import Engine


@dataclass(slots=True)
class Gathered:
    """The completions of one request, as their deltas arrive."""

    request_id: str
    sampling: SamplingParams
    texts: list[list[str]] = field(init=False)
    token_ids: list[list[int]] = field(init=False)
    logprobs: list[list[TokenLogprob]] = field(init=False)
    reasons: dict[int, Any] = field(default_factory=dict)
    usage: Usage | None = None

    def __post_init__(self) -> None:
        n = self.sampling.n
        self.texts, self.token_ids = [[] for _ in range(n)], [[] for _ in range(n)]
        self.logprobs = [[] for _ in range(n)]

    def add(self, delta: Delta) -> bool:
        """Take a delta; True when all completions are finished."""
        self.texts[delta.index].append(delta.text)
        self.token_ids[delta.index].extend(delta.token_ids)
        self.logprobs[delta.index].extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.reasons[delta.index] = delta.finish_reason
            self.usage = delta.usage
        return len(self.reasons) == self.sampling.n

    def result(self) -> Result:
        assert self.usage is not None, "a finished request has its usage"
        wants_logprobs = self.sampling.logprobs is not None
        return Result(
            id=self.request_id,
            usage=self.usage,
            completions=tuple(
                Completion(
                    index=i,
                    text="".join(self.texts[i]),
                    token_ids=tuple(self.token_ids[i]),
                    finish_reason=self.reasons[i],
                    logprobs=tuple(self.logprobs[i]) if wants_logprobs else None,
                )
                for i in range(self.sampling.n)
            ),
        )


_Event = tuple[int, Delta | JaxmmError]


def gather(engine: "Engine", requests: list[Request]) -> list[Result]:
    """Run requests together, no more at a time than may wait; the first error aborts the others."""
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    gathered = [Gathered(request.id, request.sampling) for request in requests]
    unsent = deque(range(len(requests)))
    open_requests: set[int] = set()
    room = engine.config.max_waiting  # completions that may still be sent
    bar = tqdm(
        desc="generate",
        total=len(requests),
        unit="request",
        disable=not engine.config.progress or len(requests) == 1,
    )
    try:
        while unsent or open_requests:
            while unsent and (not open_requests or requests[unsent[0]].sampling.n <= room):
                i = unsent.popleft()
                open_requests.add(i)
                room -= requests[i].sampling.n
                engine.submit(requests[i], lambda event, i=i: events.put((i, event)))  # type: ignore[misc]
            i, event = events.get()
            if isinstance(event, JaxmmError):
                open_requests.discard(i)
                raise event
            if gathered[i].add(event):
                open_requests.discard(i)
                room += requests[i].sampling.n
                bar.update()
    finally:
        bar.close()
        for i in open_requests:
            engine.abort(requests[i].id)
    return [g.result() for g in gathered]


def stream_deltas(engine: "Engine", request: Request) -> Iterator[Delta]:
    """Yield deltas; leaving the loop early aborts the request."""
    events: queue.SimpleQueue[Delta | JaxmmError] = queue.SimpleQueue()
    engine.submit(request, events.put)
    num_open = request.sampling.n
    try:
        while num_open:
            event = events.get()
            if isinstance(event, JaxmmError):
                num_open = 0
                raise event
            num_open -= event.finish_reason is not None
            yield event
    finally:
        if num_open:
            engine.abort(request.id)
