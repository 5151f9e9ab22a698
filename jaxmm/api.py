"""`generate` in its forms: one prompt or many, whole or streamed, blocking or async. Host only."""

import atexit
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from jaxmm.asking import Images, Message, Prompt, Videos, make_request, sampling_params
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
    videos: Videos = ...,
    fps: float | None = ...,
    num_frames: int | None = ...,
    video_pruning_rate: float | None = ...,
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
    videos: Sequence[Videos] | None = ...,
    fps: float | None = ...,
    num_frames: int | None = ...,
    video_pruning_rate: float | None = ...,
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
    videos: Videos = ...,
    fps: float | None = ...,
    num_frames: int | None = ...,
    video_pruning_rate: float | None = ...,
    engine: Engine | None = ...,
    model: str | None = ...,
    stream: Literal[True],
    **sampling: Any,
) -> Iterator[Delta]: ...
def generate(
    prompt: Any,
    images: Any = None,
    *,
    videos: Any = None,
    fps: float | None = None,
    num_frames: int | None = None,
    video_pruning_rate: float | None = None,
    engine: Engine | None = None,
    model: str | None = None,
    stream: bool = False,
    **sampling: Any,
) -> Result | list[Result] | Iterator[Delta]:
    """Answer a prompt, or a list of prompts, about pictures and videos.

    Args:
        prompt: A question; chat turns (a list of `{"role", "content"}`); or a list of either.
        images: What the prompt is about: paths, encoded bytes, PIL images, uint8[H, W, 3] arrays
            or `Embeddings`, one or a list. For a list of prompts: one entry for each. In chat turns
            the k-th `{"type": "image"}` part is the k-th image.
        videos: The same for videos: paths, encoded bytes (MP4, WebM, GIF), uint8[T, H, W, 3]
            arrays, or lists of frames, one or a list; a list of frames stands in a list of videos.
        fps: Frames of each second of video to look at; of a list of frames, how many a second
            they are. None: the engine's `media.video_fps`.
        num_frames: Frames of each video to look at, evenly spread, instead of `fps`.
        video_pruning_rate: Share of each video's tokens to drop, those that change least from one
            time step to the next. None: the engine's `media.video_pruning_rate`.
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
    build = functools.partial(
        make_request,
        params=params,
        fps=fps,
        num_frames=num_frames,
        video_pruning_rate=video_pruning_rate,
    )
    if not _is_batch(prompt):
        request = build(prompt, images, videos=videos)
        return stream_deltas(engine, request) if stream else gather(engine, [request])[0]
    if stream:
        raise RequestError("stream=True takes one prompt; for several use agenerate, or no stream")
    pictures = _one_for_each(images, len(prompt), "images")
    clips = _one_for_each(videos, len(prompt), "videos")
    return gather(
        engine,
        [build(p, i, videos=v) for p, i, v in zip(prompt, pictures, clips, strict=True)],
    )


async def agenerate(
    prompt: Prompt,
    images: Images = None,
    *,
    videos: Videos = None,
    fps: float | None = None,
    num_frames: int | None = None,
    video_pruning_rate: float | None = None,
    engine: Engine | None = None,
    model: str | None = None,
    **sampling: Any,
) -> AsyncIterator[Delta]:
    """Answer one prompt, giving a `Delta` for each step; see `generate`."""
    engine = engine or _shared_engine(model)
    request = make_request(
        prompt,
        images,
        sampling_params(sampling),
        videos=videos,
        fps=fps,
        num_frames=num_frames,
        video_pruning_rate=video_pruning_rate,
    )
    async for delta in engine.astream(request):
        yield delta


def _one_for_each(given: Sequence[Any] | None, num_prompts: int, noun: str) -> list[Any]:
    """What belongs to each prompt of a list."""
    entries = [None] * num_prompts if given is None else list(given)
    if len(entries) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts came with {len(entries)} entries of {noun}; give one for each"
        )
    return entries


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
