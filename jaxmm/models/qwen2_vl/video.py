"""Videos of Qwen2-VL and Qwen2.5-VL: frames, size, patches, times. Host only.

Two frames make one time step, and each step is an item of its own: the encoder never looks from
one to another, so that steps which two videos share are encoded once, and a longer video is only
more of them. Frames are chosen by qwen-vl-utils' rule and sized as pictures, within what a video
may have in all; the patches are those of the Hugging Face processor, resized by Pillow.
"""

import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from jaxmm.host.clip import Clip, Timeline, sample_frames
from jaxmm.host.item import Allocate, new_array
from jaxmm.host.video import (
    Sampling,
    Steps,
    Surroundings,
    Timing,
    cut_steps,
)
from jaxmm.models.json_files import read_json
from jaxmm.models.qwen2_vl.processor import ImageProcessor, largest_area

MIN_FRAMES = 4
MAX_PIXELS = 25165824
"""Of all frames together where the checkpoint does not say: Qwen3-VL's published figure."""
_REVISION = 1
"""Part of every identity; raise it whenever the same video gives other patches."""


@dataclass(frozen=True, kw_only=True)
class VideoProcessor:
    """From the frames of a video to uint8 patches in encoder order."""

    image: ImageProcessor
    """Patch size and pixel limits, here of one frame."""
    max_frames: int
    max_pixels: int = MAX_PIXELS
    """Of all frames together, after resizing; no frame becomes smaller than one row."""
    tokens_per_second: float = 0.0
    """M-RoPE time of one second (arXiv:2502.13923, §2.1.3); 0: time counts steps."""

    @classmethod
    def from_checkpoint(
        cls, directory: str | Path, image: ImageProcessor, *, max_frames: int, max_pixels: int = 0
    ) -> "VideoProcessor":
        """Read what config.json says of time.

        Args:
            directory: A Hugging Face checkpoint.
            image: The same checkpoint's, with the server's limits.
            max_frames: Frames of one video.
            max_pixels: Of all frames together; 0: 25165824.

        Raises:
            ModelError: No such file.
        """
        raw = read_json(Path(directory) / "config.json")
        vision = raw.get("vision_config") or {}
        absolute = raw["model_type"] == "qwen2_5_vl"
        return cls(
            image=image,
            max_frames=max_frames,
            max_pixels=max_pixels or MAX_PIXELS,
            tokens_per_second=float(vision.get("tokens_per_second", 4)) if absolute else 0.0,
        )

    @property
    def num_values(self) -> int:
        """Values of one patch of two frames."""
        return 2 * self.image.num_values

    @functools.cached_property
    def max_bytes(self) -> int:
        """Bytes of the patches of any video."""
        return largest_video_bytes(self.image, self.max_frames, self.max_pixels)

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Settings and code that turn frames into features; limits show in grid and frames."""
        return video_fingerprint(self.image, _REVISION)

    def choose(self, timeline: Timeline, sampling: Sampling) -> list[int]:
        """Indices of the frames to look at: an even number, but for a video of one frame."""
        return choose_frames(timeline, sampling, self.max_frames, even=True)

    def size(self, num_frames: int, height: int, width: int, max_pixels: int) -> tuple[int, int]:
        """Height and width of the resized frames.

        Args:
            num_frames: Frames that were chosen.
            height: Of the video.
            width: Of the video.
            max_pixels: Of one frame, the request's.
        """
        upper = max(min(max_pixels, self.max_pixels // num_frames), self.image.unit**2)
        return self.image.resized(height, width, min(self.image.min_pixels, upper), upper)

    def steps(self, clip: Clip, max_pixels: int, *, allocate: Allocate = new_array) -> Steps:
        """Decode, resize and cut the chosen frames; see `cut_steps`."""
        height, width = clip.timeline.height, clip.timeline.width
        size = self.size(len(clip.indices), height, width, max_pixels)
        return cut_clip(clip, self.image, size, allocate)

    def times(self, timing: Timing) -> tuple[int, ...]:
        """M-RoPE time of each step, counted from the first."""
        steps = range(len(timing.seconds))
        if not self.tokens_per_second:
            return tuple(steps)
        return tuple(int(i * (self.tokens_per_second * timing.step_seconds)) for i in steps)

    def surroundings(self, timing: Timing) -> list[Surroundings]:
        """Nothing stands around the tokens of a step: all steps are one run."""
        return [Surroundings()] * len(timing.seconds)


def choose_frames(
    timeline: Timeline, sampling: Sampling, max_frames: int, *, even: bool
) -> list[int]:
    """`sample_frames` by a request's wishes, with the models' least number."""
    return sample_frames(
        timeline,
        fps=sampling.fps,
        num_frames=sampling.num_frames,
        min_frames=MIN_FRAMES,
        max_frames=max_frames,
        even=even,
    )


def cut_clip(clip: Clip, image: ImageProcessor, size: tuple[int, int], allocate: Allocate) -> Steps:
    """`cut_steps` into the patches of pictures."""
    return cut_steps(
        clip,
        size,
        patch_size=image.patch_size,
        merge_size=image.merge_size,
        cut=image.cut_frame,
        allocate=allocate,
    )


def video_fingerprint(image: ImageProcessor, revision: int) -> bytes:
    """32 bytes: the code that makes steps of frames, and what it takes from pictures."""
    return hashlib.sha256(b"video" + bytes([revision]) + image.fingerprint).digest()


def largest_video_bytes(
    image: ImageProcessor, max_frames: int, max_pixels: int, min_pixels: int | None = None
) -> int:
    """Bytes of the patches of any video, whatever its length and shape.

    Args:
        image: Pixel limits of one frame.
        max_frames: Frames of a video.
        max_pixels: Of all frames together.
        min_pixels: The same; None: the lower limit is one of each frame.
    """

    def largest(count: int) -> int:
        upper = max(min(image.max_pixels, max_pixels // count), image.unit**2)
        lower = image.min_pixels if min_pixels is None else max(min_pixels // count, 1)
        return math.ceil(count / 2) * 2 * largest_area(image.unit, min(lower, upper), upper)

    return 3 * max(map(largest, range(1, max_frames + 1)))
