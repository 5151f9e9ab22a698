"""Videos of Qwen3-VL: frames, size, patches, timestamps as text. Host only.

As Qwen2-VL's, two frames make one time step and each step is an item of its own. The limits count
the pixels of all frames together, and each step stands behind a text that says when it is shown.
The pair of special tokens that the chat template writes stays around the whole list, as with
transformers from 5.10 on; earlier ones dropped it.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from jaxmm.host.clip import Clip, Timeline
from jaxmm.host.item import Allocate, new_array
from jaxmm.host.video import (
    Sampling,
    Steps,
    Surroundings,
    Timing,
)
from jaxmm.models.json_files import read_json, read_processor_table
from jaxmm.models.qwen2_vl.processor import ImageProcessor, check_aspect
from jaxmm.models.qwen2_vl.video import (
    MAX_PIXELS,
    choose_frames,
    cut_clip,
    largest_video_bytes,
    video_fingerprint,
)

MIN_PIXELS = 4096
"""Of all frames together, as published."""
_REVISION = 1
"""Part of every identity; raise it whenever the same video gives other patches."""


@dataclass(frozen=True, kw_only=True)
class VideoProcessor:
    """From the frames of a video to uint8 patches in encoder order."""

    image: ImageProcessor
    """Patch size, and the upper pixel limit of one frame."""
    max_frames: int
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    """Of all frames together, after resizing."""
    start_id: int
    end_id: int
    """Special tokens around the tokens of each step."""

    @classmethod
    def from_checkpoint(
        cls, directory: str | Path, image: ImageProcessor, *, max_frames: int, max_pixels: int = 0
    ) -> "VideoProcessor":
        """Read the video processor's settings if there are any, and ids from config.json.

        Args:
            directory: A Hugging Face checkpoint.
            image: The same checkpoint's, with the server's limits.
            max_frames: Frames of one video.
            max_pixels: Of all frames together; 0: the checkpoint's.

        Raises:
            ModelError: A file that cannot be read.
        """
        directory = Path(directory)
        raw = read_json(directory / "config.json")
        size = (read_processor_table(directory, "video") or {}).get("size") or {}
        upper = max_pixels or int(size.get("longest_edge") or MAX_PIXELS)
        return cls(
            image=image,
            max_frames=max_frames,
            min_pixels=min(int(size.get("shortest_edge") or MIN_PIXELS), upper),
            max_pixels=upper,
            start_id=int(raw.get("vision_start_token_id", 151652)),
            end_id=int(raw.get("vision_end_token_id", 151653)),
        )

    @property
    def num_values(self) -> int:
        """Values of one patch of two frames."""
        return 2 * self.image.num_values

    @functools.cached_property
    def max_bytes(self) -> int:
        """Bytes of the patches of any video."""
        return largest_video_bytes(self.image, self.max_frames, self.max_pixels, self.min_pixels)

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Settings and code that turn frames into features; limits show in grid and frames."""
        return video_fingerprint(self.image, _REVISION)

    def choose(self, timeline: Timeline, sampling: Sampling) -> list[int]:
        """Indices of the frames to look at."""
        return choose_frames(timeline, sampling, self.max_frames, even=False)

    def size(self, num_frames: int, height: int, width: int, max_pixels: int) -> tuple[int, int]:
        """Height and width of the resized frames; the model's smart_resize for videos.

        Every operation and its order are the reference's, which refuses a single frame; here it
        counts as the two that it becomes.

        Args:
            num_frames: Frames that were chosen.
            height: Of the video.
            width: Of the video.
            max_pixels: Of one frame, the request's.

        Raises:
            MediaTooLarge: Too thin, or more patches than the server takes.
        """
        unit, count = self.image.unit, max(num_frames, 2)
        if height < unit or width < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        check_aspect(height, width)
        new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
        area = round(count / 2) * 2 * new_height * new_width
        if area > self.max_pixels:
            shrink = math.sqrt((count * height * width) / self.max_pixels)
            new_height = max(unit, math.floor(height / shrink / unit) * unit)
            new_width = max(unit, math.floor(width / shrink / unit) * unit)
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (count * height * width))
            new_height = math.ceil(height * grow / unit) * unit
            new_width = math.ceil(width * grow / unit) * unit
        if new_height * new_width > max_pixels:
            return self.image.resized(height, width, 1, max_pixels)
        self.image.check_patches(new_height * new_width // self.image.patch_size**2)
        return new_height, new_width

    def steps(self, clip: Clip, max_pixels: int, *, allocate: Allocate = new_array) -> Steps:
        """Decode, resize and cut the chosen frames; see `cut_steps`."""
        height, width = clip.timeline.height, clip.timeline.width
        size = self.size(len(clip.indices), height, width, max_pixels)
        return cut_clip(clip, self.image, size, allocate)

    def times(self, timing: Timing) -> None:
        """Each step stands for itself, as a picture does: its time is in the text before it."""

    def surroundings(self, timing: Timing) -> list[Surroundings]:
        """When the step is shown, in tenths of a second, and a pair of special tokens."""
        return [
            Surroundings((f"<{seconds:.1f} seconds>", self.start_id), (self.end_id,))
            for seconds in timing.seconds
        ]
