"""One picture or video from source to patches and identity, in the caller's thread. Host only."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import RequestError
from jaxmm.host.clip import Timeline, check_frame_count, open_clip
from jaxmm.host.identity import item_identity
from jaxmm.host.item import Allocate, Grid, Item, Modality
from jaxmm.host.media import Limits, decode_image, too_much_memory
from jaxmm.host.video import Sampling, Steps, Timing, VideoProcessor


class Processor(Protocol):
    """What the host needs of a model family's image processor; picklable, of numpy and Pillow."""

    @property
    def fingerprint(self) -> bytes:
        """Settings and code that turn pixels into features."""

    @property
    def num_values(self) -> int:
        """U: values of one patch."""

    @property
    def max_patches(self) -> int:
        """Patches that no picture exceeds."""

    def limits(
        self,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        num_images: int = 1,
    ) -> tuple[int, int]:
        """Pixel limits of one request of so many pictures, those of earlier turns included; raises
        RequestError outside the server's."""

    def num_rows(self, grid: Grid) -> int:
        """Rows of an item."""

    def patches(
        self,
        image: Image.Image | npt.NDArray[np.uint8],
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        allocate: Allocate = ...,
    ) -> tuple[npt.NDArray[np.uint8], Grid]:
        """uint8[N, U] in encoder order, and the grid."""

    def positions(
        self, num_tokens: int, items: Sequence[Item]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Positions int32[3, T] of an expanded prompt, and the delta after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Processed:
    """What a picture became."""

    features: npt.NDArray[np.uint8]
    """uint8[N, U], read-only."""
    grid_thw: Grid
    num_rows: int
    identity: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessedClip:
    """What a video became: time steps, each of them an item."""

    features: npt.NDArray[np.uint8]
    """uint8[T * N, 2 * U], read-only: one step after the other."""
    grid_thw: Grid
    num_rows: int
    """Of one step."""
    identities: tuple[bytes, ...]
    """Of each step."""
    timing: Timing


class ClipTask(NamedTuple):
    """How a request wants its videos processed; all of it decides what they become."""

    sampling: Sampling
    max_pixels: int
    """Of one frame."""


Frames = tuple[bytes | npt.NDArray[np.uint8], ...]
"""A video given as its frames: encoded files, or uint8[H, W, 3] pixels."""


class Decoder(Protocol):
    """Something that processes pictures and videos: `InlineDecoder` or `DecodePool`."""

    def submit(
        self, source: Any, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Future[Processed]:
        """Process a picture; the future raises RequestError for a picture that cannot be used."""

    def submit_clip(self, source: bytes | Frames, task: ClipTask) -> Future[ProcessedClip]:
        """Process a video; the future raises RequestError for one that cannot be used."""

    def abandon(self, future: Future[Any]) -> None:
        """Stop what computes a future that nobody waits for any more, where that saves work."""

    def close(self) -> None:
        """Give everything back."""


def process_image(
    source: Any,
    processor: Processor,
    limits: Limits,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    *,
    allocate: Allocate | None = None,
) -> Processed:
    """Decode, resize, cut and name one picture.

    Args:
        source: Encoded bytes, a path, a PIL image, or a uint8[H, W, 3] array.
        processor: The model family's.
        limits: Of bytes and pixels before resizing.
        min_pixels: Lower pixel limit of the request.
        max_pixels: Upper pixel limit of the request.
        allocate: Gives the array for the patches; a new one by default.

    Raises:
        RequestError: A picture or limits that cannot be used.
    """
    image = decode_image(source, limits)
    kwargs = {} if allocate is None else {"allocate": allocate}
    try:
        features, grid = processor.patches(image, min_pixels, max_pixels, **kwargs)
    except MemoryError:
        raise too_much_memory() from None
    features.flags.writeable = False
    return Processed(
        features=features,
        grid_thw=grid,
        num_rows=processor.num_rows(grid),
        identity=item_identity(Modality.IMAGE, processor.fingerprint, grid, features=features),
    )


def process_clip(
    source: bytes | Frames,
    video: VideoProcessor | None,
    limits: Limits,
    task: ClipTask,
    *,
    allocate: Allocate | None = None,
) -> ProcessedClip:
    """Decode the frames of a video that are looked at, resize and cut them, and name the steps.

    Args:
        source: An encoded video, or its frames.
        video: The model family's; None: it takes no videos.
        limits: Of bytes and pixels of a frame before resizing.
        task: What the request wants.
        allocate: Gives the array for the patches; a new one by default.

    Raises:
        RequestError: A video or a wish that cannot be met.
    """
    if video is None:
        raise RequestError("this model takes no videos; send pictures")

    def choose(timeline: Timeline) -> list[int]:
        if isinstance(source, bytes):
            return video.choose(timeline, task.sampling)
        check_frame_count(timeline.num_frames, video.max_frames)
        return list(range(timeline.num_frames))  # sampled by whoever sent them

    try:
        with open_clip(source, choose, limits, fps=task.sampling.fps) as clip:
            kwargs = {} if allocate is None else {"allocate": allocate}
            steps = video.steps(clip, task.max_pixels, **kwargs)
    except MemoryError:
        raise too_much_memory() from None
    return _named(steps, video.fingerprint)


def _named(steps: Steps, fingerprint: bytes) -> ProcessedClip:
    count, height, width = steps.grid_thw
    steps.features.flags.writeable = False
    grid = (1, height, width)
    return ProcessedClip(
        features=steps.features,
        grid_thw=steps.grid_thw,
        num_rows=steps.rows_per_step,
        identities=tuple(
            item_identity(Modality.VIDEO, fingerprint, grid, features=step)
            for step in steps.features.reshape(count, height * width, -1)
        ),
        timing=steps.timing,
    )


class InlineDecoder:
    """Processes each picture in the thread that submits it: notebooks, tests, single users."""

    def __init__(
        self, processor: Processor, limits: Limits, video: VideoProcessor | None = None
    ) -> None:
        self._processor = processor
        self._limits = limits
        self._video = video

    def submit(
        self, source: Any, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Future[Processed]:
        """Process a picture now; the future is done when it is returned."""
        future: Future[Processed] = Future()
        try:
            future.set_result(
                process_image(source, self._processor, self._limits, min_pixels, max_pixels)
            )
        except RequestError as error:
            future.set_exception(error)
        return future

    def submit_clip(self, source: bytes | Frames, task: ClipTask) -> Future[ProcessedClip]:
        """Process a video now; the future is done when it is returned."""
        future: Future[ProcessedClip] = Future()
        try:
            future.set_result(process_clip(source, self._video, self._limits, task))
        except RequestError as error:
            future.set_exception(error)
        return future

    def abandon(self, future: Future[Any]) -> None:
        """It is done already."""

    def close(self) -> None:
        """Nothing is held."""
