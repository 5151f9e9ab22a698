"""Videos made for tests: each frame is one shade of grey, so that it tells its own index."""

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

STEP = 8
"""Difference of grey from one frame to the next; coding changes less than half of that."""

_NO_SCENE_CUTS = {"mpeg4": {"sc_threshold": "1000000000"}, "libx264": {"sc_threshold": "0"}}
"""Else every frame here would become a key frame."""


def shade(index: int) -> int:
    """Grey of a frame; two frames less than 24 apart differ."""
    return 30 + STEP * (index % 24)


def index_of(image: Image.Image) -> int:
    """Which of the first 24 frames it is."""
    return round((float(np.asarray(image).mean()) - 30) / STEP)


def grey_frame(index: int, width: int = 64, height: int = 48) -> np.ndarray:
    """uint8[H, W, 3]"""
    return np.full((height, width, 3), shade(index), np.uint8)


def make_clip(
    num_frames: int,
    *,
    form: str = "mp4",
    codec: str = "libx264",
    fps: Fraction = Fraction(10),
    key_every: int = 6,
    options: dict[str, str] | None = None,
    frame: Callable[[int], np.ndarray] = grey_frame,
) -> bytes:
    """Encode frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        first = frame(0)
        options = {**_NO_SCENE_CUTS.get(codec, {}), **(options or {})}
        stream: Any = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = first.shape[1], first.shape[0]
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.codec_context.gop_size = key_every
        for index in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame(index), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
