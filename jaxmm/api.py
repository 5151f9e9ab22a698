"""`generate` in its forms: one prompt or many, whole or streamed, blocking or async. Host only."""

import atexit
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from jaxmm.asking import Images, Message, Prompt, make_request, sampling_params
from jaxmm.config import EngineConfig, load_config
from jaxmm.engine import Engine
from jaxmm.errors import RequestError
from jaxmm.gather import gather, stream_deltas
from jaxmm.request import Delta, Result


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
        return stream_deltas(engine, request) if stream else gather(engine, [request])[0]
    if stream:
        raise RequestError("stream=True takes one prompt; for several use agenerate, or no stream")
    given = [None] * len(prompt) if images is None else list(images)
    if len(given) != len(prompt):
        raise RequestError(
            f"{len(prompt)} prompts came with {len(given)} entries of images; give one for each"
        )
    return gather(engine, [make_request(p, i, params) for p, i in zip(prompt, given, strict=True)])


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


def _is_batch(prompt: Any) -> bool:
    """A list of questions or of conversations, rather than one conversation; it may be empty."""
    if not isinstance(prompt, (list, tuple)):
        return False
    return not prompt or not all(isinstance(turn, Mapping) for turn in prompt)


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
