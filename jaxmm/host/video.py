"""What the host knows of a video: how it was sampled, its time steps, what stands around them.
Host only."""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import RequestError
from jaxmm.host.clip import Clip, Timeline
from jaxmm.host.item import Allocate, Grid

MIN_FPS = 0.01
MAX_FPS = 60.0


class Sampling(NamedTuple):
    """Which frames of a video a request wants."""

    fps: float
    """Frames of each second; of a list of frames, how many a second they are."""
    num_frames: int | None = None
    """Frames in all, evenly spread, instead of `fps`."""


class Timing(NamedTuple):
    """When the steps of a video are shown."""

    seconds: tuple[float, ...]
    """Of each step, the middle of its frames."""
    step_seconds: float
    """From one step to the next."""


class Surroundings(NamedTuple):
    """Tokens that stand before and after those of one step; a text, or the id of a special one."""

    before: tuple[str | int, ...] = ()
    after: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """A video cut into time steps of two frames."""

    features: npt.NDArray[np.uint8]
    """uint8[T * N, 2 * U]: patches of one step after the other."""
    grid_thw: Grid
    """Patches by (time, height, width)."""
    rows_per_step: int
    timing: Timing


class VideoProcessor(Protocol):
    """What the host needs of a family that takes videos; picklable, of numpy and Pillow."""

    @property
    def fingerprint(self) -> bytes:
        """Settings and code that turn frames into features."""

    @property
    def num_values(self) -> int:
        """Values of one patch of two frames."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the patches of any video."""

    @property
    def max_frames(self) -> int:
        """Frames of one video."""

    def choose(self, timeline: Timeline, sampling: Sampling) -> list[int]:
        """Indices of the frames to look at, ascending."""

    def steps(self, clip: Clip, max_pixels: int, *, allocate: Allocate = ...) -> Steps:
        """Decode, resize and cut the chosen frames, each of at most `max_pixels`."""

    def times(self, timing: Timing) -> tuple[int, ...] | None:
        """M-RoPE time of each step from the first; None: each step stands for itself."""

    def surroundings(self, timing: Timing) -> list[Surroundings]:
        """What stands around the tokens of each step."""


def sampling_of(
    fps: float | None, num_frames: int | None, *, default_fps: float, max_frames: int
) -> Sampling:
    """Check what a request says of its videos.

    Raises:
        RequestError: Both are given, or one is outside its range.
    """
    if num_frames is not None:
        if fps is not None:
            raise RequestError("give fps or num_frames, not both", "fps")
        if not isinstance(num_frames, numbers.Integral) or isinstance(num_frames, bool):
            raise RequestError(f"num_frames={num_frames!r} is not a whole number", "num_frames")
        if not 1 <= num_frames <= max_frames:
            raise RequestError(
                f"num_frames={num_frames} is outside [1, {max_frames}]", "num_frames"
            )
        num_frames = int(num_frames)
    rate = default_fps if fps is None else fps
    if not isinstance(rate, numbers.Real) or isinstance(rate, bool):
        raise RequestError(f"fps={rate!r} is not a number", "fps")
    # of a list of frames, one near zero makes a video too long for floats and for positions
    if not MIN_FPS <= rate <= MAX_FPS:  # true for NaN
        raise RequestError(f"fps={rate!r} is outside [{MIN_FPS:g}, {MAX_FPS:g}]", "fps")
    return Sampling(float(rate), num_frames)


def timing_of(clip: Clip) -> Timing:
    """When steps of two frames are shown; an odd last frame is its own second."""
    fps, indices = clip.timeline.fps, clip.indices
    pairs = [(indices[i], indices[min(i + 1, len(indices) - 1)]) for i in range(0, len(indices), 2)]
    sampled_fps = len(indices) / clip.timeline.num_frames * fps
    return Timing(tuple((a / fps + b / fps) / 2 for a, b in pairs), 2 / sampled_fps)


Cut = Callable[[Image.Image, npt.NDArray[np.uint8], int], None]
"""(a resized frame, uint8[N, 2 * U] of its step, 0 or 1: which of its frames) -> fills half."""


def cut_steps(
    clip: Clip,
    size: tuple[int, int],
    *,
    patch_size: int,
    merge_size: int,
    cut: Cut,
    allocate: Allocate,
) -> Steps:
    """Resize frames as they are decoded and cut them into the patches of their steps.

    Args:
        clip: Opened; its frames are used up.
        size: Height and width after resizing, multiples of the patch size.
        patch_size: Pixels by side of a patch.
        merge_size: Patches by side of what becomes one row.
        cut: The family's order of patches.
        allocate: Gives the array that is filled and returned.
    """
    height, width = size
    count = len(clip.indices)
    grid = (-(-count // 2), height // patch_size, width // patch_size)
    features = allocate(math.prod(grid), 2 * 3 * patch_size**2)
    steps = features.reshape(grid[0], grid[1] * grid[2], -1)
    for index, frame in enumerate(clip.frames):
        if frame.size != (width, height):
            frame = frame.resize((width, height), Image.Resampling.BICUBIC)
        cut(frame, steps[index // 2], index % 2)
        if index == count - 1 and index % 2 == 0:
            cut(frame, steps[index // 2], 1)  # an odd last frame is repeated
    rows = grid[1] * grid[2] // merge_size**2
    return Steps(features=features, grid_thw=grid, rows_per_step=rows, timing=timing_of(clip))
