"""What a person writes, as a request: questions, pictures and sampling by keyword. Host only."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmm.errors import RequestError
from jaxmm.request import ImageSource, Request, SamplingParams, VideoSource

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]
"""A question, or chat turns `{"role": …, "content": …}`."""
Images = ImageSource | Sequence[ImageSource] | None
Videos = VideoSource | Sequence[VideoSource] | None
"""Files, paths or uint8[T, H, W, 3] arrays, one or a list; a list of frames only in a list."""

_counter = itertools.count()


def new_request_id(prefix: str = "req") -> str:
    """An id that this process has not used."""
    return f"{prefix}-{next(_counter)}"


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Check keyword arguments against the fields of `SamplingParams`."""
    known = SamplingParams.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown argument {name!r}; known are {', '.join(sorted(known))}")
    return SamplingParams(**fields)


def make_request(
    prompt: Prompt,
    images: Images,
    params: SamplingParams,
    *,
    videos: Videos = None,
    fps: float | None = None,
    num_frames: int | None = None,
    video_pruning_rate: float | None = None,
) -> Request:
    """Wrap a prompt; a plain question becomes one user turn, pictures first, then videos."""
    if not isinstance(prompt, str | list | tuple):
        raise RequestError(f"a prompt is a string or a list of turns, not {type(prompt).__name__}")
    sources, clips = picture_sources(images), video_sources(videos)
    return Request(
        id=new_request_id(),
        messages=[user_turn(prompt, len(sources), len(clips))]
        if isinstance(prompt, str)
        else prompt,
        images=sources,
        videos=clips,
        fps=fps,
        num_frames=num_frames,
        video_pruning_rate=video_pruning_rate,
        sampling=params,
    )


def user_turn(text: str, num_images: int, num_videos: int = 0) -> Message:
    """A user's turn: its pictures and videos, then its text."""
    parts: list[dict[str, str]] = [{"type": "image"}] * num_images
    parts += [{"type": "video"}] * num_videos
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def picture_sources(images: Images) -> tuple[ImageSource, ...]:
    """One picture or several, as a tuple; a `str` is a path."""
    if images is None:
        return ()
    several = images if isinstance(images, (list, tuple)) else (images,)
    return tuple(Path(image) if isinstance(image, str) else image for image in several)


def video_sources(videos: Videos) -> tuple[VideoSource, ...]:
    """One video or several, as a tuple; a `str` is a path, also of a frame."""
    if videos is None:
        return ()
    several = videos if isinstance(videos, (list, tuple)) else (videos,)
    return tuple(map(_video_source, several))


def _video_source(video: VideoSource) -> VideoSource:
    if isinstance(video, (list, tuple)):
        return list(picture_sources(video))
    return Path(video) if isinstance(video, str) else video
