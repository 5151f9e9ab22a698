"""`generate` in its forms: one prompt or many, whole or streamed, blocking or async. Host only."""

import atexit
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from tqdm.auto import tqdm

from jaxmm.config import EngineConfig, load_config
from jaxmm.engine import Engine, new_request_id
from jaxmm.errors import JaxmmError, RequestError
from jaxmm.request import (
    Completion,
    Delta,
    ImageSource,
    Request,
    Result,
    SamplingParams,
    TokenLogprob,
    Usage,
)

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]
"""A question, or chat turns `{"role": …, "content": …}`."""
Images = ImageSource | Sequence[ImageSource] | None


@overload
def generate(
    prompt: Prompt,
    images: Images = ...,
    *,
    engine: Engine | None = ...,
    model: str | None = ...,
    stream: Literal[False] = ...,
    **sampling: Any,
) -> Result: ...
@overload
def generate(
    prompt: list[str] | list[list[Message]],
    images: Sequence[Images] | None = ...,
    *,
    engine: Engine | None = ...,
    model: str | None = ...,
    stream: Literal[False] = ...,
    **sampling: Any,
) -> list[Result]: ...
@overload
def generate(
    prompt: Prompt,
    images: Images = ...,
    *,
    engine: Engine | None = ...,
    model: str | None = ...,
    stream: Literal[True],
    **sampling: Any,
) -> Iterator[Delta]: ...
def generate(
    prompt: Any,
    images: Any = None,
    *,
    engine: Engine | None = None,
    model: str | None = None,
    stream: bool = False,
    **sampling: Any,
) -> Result | list[Result] | Iterator[Delta]:
    """Answer a prompt, or a list of prompts, about pictures.

    Args:
        prompt: A question; chat turns (a list of `{"role", "content"}`); or a list of either.
        images: What the prompt is about: paths, encoded bytes, PIL images, uint8[H, W, 3] arrays
            or `Embeddings`, one or a list. For a list of prompts: one entry for each. In chat turns
            the k-th `{"type": "image"}` part is the k-th image.
        engine: The engine to use; None: one that this process keeps for `model`.
        model: Checkpoint directory; None: the small model that jaxmm ships.
        stream: Give a `Delta` for each step instead of a result. Single prompts only.
        **sampling: Fields of `SamplingParams`: `max_tokens`, `temperature`, `seed`, …

    Returns:
        A `Result`; a list of them for a list of prompts; an iterator of `Delta` with `stream`.

    Raises:
        RequestError: The prompt, a picture or a parameter cannot be used.
    """
    engine = engine or _shared_engine(model)
    params = sampling_params(sampling)
    if not _is_batch(prompt):
        request = make_request(prompt, images, params)
        return _stream(engine, request) if stream else _gather(engine, [request])[0]
    if stream:
        raise RequestError("stream=True takes one prompt; for several use agenerate, or no stream")
    given = [None] * len(prompt) if images is None else list(images)
    if len(given) != len(prompt):
        raise RequestError(
            f"{len(prompt)} prompts came with {len(given)} entries of images; give one for each"
        )
    return _gather(engine, [make_request(p, i, params) for p, i in zip(prompt, given, strict=True)])


async def agenerate(
    prompt: Prompt,
    images: Images = None,
    *,
    engine: Engine | None = None,
    model: str | None = None,
    **sampling: Any,
) -> AsyncIterator[Delta]:
    """Answer one prompt, giving a `Delta` for each step; see `generate`."""
    engine = engine or _shared_engine(model)
    async for delta in engine.astream(make_request(prompt, images, sampling_params(sampling))):
        yield delta


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Check keyword arguments against the fields of `SamplingParams`."""
    known = SamplingParams.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown argument {name!r}; known are {', '.join(sorted(known))}")
    return SamplingParams(**fields)


def make_request(prompt: Prompt, images: Images, params: SamplingParams) -> Request:
    """Wrap a prompt; a plain question becomes one user turn, pictures first."""
    sources = _as_tuple(images)
    if isinstance(prompt, str):
        parts: list[dict[str, str]] = [{"type": "image"} for _ in sources]
        messages: Sequence[Message] = [
            {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
        ]
    else:
        messages = prompt
    return Request(id=new_request_id(), messages=messages, images=sources, sampling=params)


def _as_tuple(images: Images) -> tuple[ImageSource, ...]:
    if images is None:
        return ()
    several = images if isinstance(images, (list, tuple)) else (images,)
    return tuple(Path(image) if isinstance(image, str) else image for image in several)


def _is_batch(prompt: Any) -> bool:
    """A list of questions or of conversations, rather than one conversation; it may be empty."""
    if not isinstance(prompt, (list, tuple)):
        return False
    return not prompt or not all(isinstance(turn, Mapping) for turn in prompt)


# Gathering


@dataclass(slots=True)
class _Gathered:
    """The completions of one request, as their deltas arrive."""

    request: Request
    texts: list[list[str]] = field(init=False)
    token_ids: list[list[int]] = field(init=False)
    logprobs: list[list[TokenLogprob]] = field(init=False)
    reasons: dict[int, Any] = field(default_factory=dict)
    usage: Usage | None = None

    def __post_init__(self) -> None:
        n = self.request.sampling.n
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
        return len(self.reasons) == self.request.sampling.n

    def result(self) -> Result:
        assert self.usage is not None, "a finished request has its usage"
        wants_logprobs = self.request.sampling.logprobs is not None
        return Result(
            id=self.request.id,
            usage=self.usage,
            completions=tuple(
                Completion(
                    index=i,
                    text="".join(self.texts[i]),
                    token_ids=tuple(self.token_ids[i]),
                    finish_reason=self.reasons[i],
                    logprobs=tuple(self.logprobs[i]) if wants_logprobs else None,
                )
                for i in range(self.request.sampling.n)
            ),
        )


_Event = tuple[int, Delta | JaxmmError]


def _gather(engine: Engine, requests: list[Request]) -> list[Result]:
    """Run requests together, no more at a time than may wait; the first error aborts the others."""
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    gathered = [_Gathered(request) for request in requests]
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


def _stream(engine: Engine, request: Request) -> Iterator[Delta]:
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


# The engines that `generate` keeps

_engines: dict[str, Engine] = {}
_engines_lock = threading.Lock()


def _shared_engine(model: str | Path | None) -> Engine:
    """The engine of a model, started on first use and kept until the process ends."""
    config = load_config(EngineConfig, None, {} if model is None else {"model": str(model)})
    with _engines_lock:
        engine = _engines.get(config.model)
        if engine is None or not engine.healthy:
            engine = _engines[config.model] = Engine(config)
        return engine


@atexit.register
def _close_engines() -> None:
    for engine in _engines.values():
        engine.close()
