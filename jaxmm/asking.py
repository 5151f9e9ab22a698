"""What a person writes, as a request: questions, pictures and sampling by keyword. Host only."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmm.errors import RequestError
from jaxmm.request import ImageSource, Request, SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]
"""A question, or chat turns `{"role": …, "content": …}`."""
Images = ImageSource | Sequence[ImageSource] | None

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


def make_request(prompt: Prompt, images: Images, params: SamplingParams) -> Request:
    """Wrap a prompt; a plain question becomes one user turn, pictures first."""
    sources = picture_sources(images)
    messages = [user_turn(prompt, len(sources))] if isinstance(prompt, str) else prompt
    return Request(id=new_request_id(), messages=messages, images=sources, sampling=params)


def user_turn(text: str, num_images: int) -> Message:
    """A user's turn: its pictures, then its text."""
    pictures: list[dict[str, str]] = [{"type": "image"}] * num_images
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}]}


def picture_sources(images: Images) -> tuple[ImageSource, ...]:
    """One picture or several, as a tuple; a `str` is a path."""
    if images is None:
        return ()
    several = images if isinstance(images, (list, tuple)) else (images,)
    return tuple(Path(image) if isinstance(image, str) else image for image in several)
