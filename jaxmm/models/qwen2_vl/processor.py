"""Pictures of Qwen2-VL and Qwen2.5-VL: size rule, resizing, patches. Host only.

Pixels equal those of the Hugging Face processor (Pillow backend) to the last bit. Patches stay
uint8 and are not repeated in time: normalising and repeating are device work.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import ConfigError, MediaTooLarge, ModelError, RequestError
from jaxmm.host import mrope
from jaxmm.host.item import Allocate, Grid, Item, new_array
from jaxmm.models.json_files import read_processor_table

MAX_ASPECT = 200
"""Longest side over shortest; the models' own rule refuses more."""
_REVISION = 1
"""Part of every identity; raise it whenever the same picture gives other patches."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """From an RGB picture to uint8 patches in encoder order."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = _CLIP_MEAN
    std: tuple[float, float, float] = _CLIP_STD

    def __post_init__(self) -> None:
        if not self.unit**2 <= self.max_pixels:
            raise ConfigError(
                f"max_pixels={self.max_pixels} is below one token's {self.unit} x {self.unit}"
            )
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"min_pixels={self.min_pixels} is outside [1, max_pixels={self.max_pixels}]"
            )

    @classmethod
    def from_checkpoint(
        cls, directory: str | Path, *, min_pixels: int = 0, max_pixels: int = 0
    ) -> "ImageProcessor":
        """Read preprocessor_config.json, or the same table in processor_config.json.

        Args:
            directory: A Hugging Face checkpoint.
            min_pixels: Replaces the checkpoint's lower limit; 0 keeps it.
            max_pixels: Replaces the checkpoint's upper limit; 0 keeps it.

        Raises:
            ModelError: No such file, or settings that this class does not follow.
            ConfigError: Pixel limits that contradict each other.
        """
        table = read_processor_table(Path(directory))
        if table is None:
            raise ModelError(
                "the checkpoint has no preprocessor_config.json, so its pixels are unknown"
            )
        _check_supported(table)
        lower, upper = _pixel_limits(table)
        return cls(
            patch_size=int(table.get("patch_size", cls.patch_size)),
            temporal_patch_size=int(table.get("temporal_patch_size", cls.temporal_patch_size)),
            merge_size=int(table.get("merge_size", cls.merge_size)),
            min_pixels=min_pixels or lower,
            max_pixels=max_pixels or upper,
            mean=_channels(table, "image_mean", cls.mean),
            std=_channels(table, "image_std", cls.std),
        )

    @property
    def unit(self) -> int:
        """Side in pixels of what becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def num_values(self) -> int:
        """U: values of one patch."""
        return 3 * self.patch_size**2

    @functools.cached_property
    def max_patches(self) -> int:
        """Patches that no picture exceeds, whatever its shape."""
        area = largest_area(self.unit, self.min_pixels, self.max_pixels)
        return area // self.unit**2 * self.merge_size**2

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Settings and code that turn pixels into features; pixel limits show in the grid."""
        settings = (
            *("qwen2_vl", _REVISION, self.patch_size, self.temporal_patch_size, self.merge_size),
            *(self.mean, self.std, "bicubic"),
        )
        return hashlib.sha256(repr(settings).encode()).digest()

    def limits(
        self,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        num_images: int = 1,
    ) -> tuple[int, int]:
        """Pixel limits of one request, within the server's, however many pictures it has.

        A lower `max_pixels` takes the server's `min_pixels` down with it.

        Raises:
            RequestError: Limits outside the server's, or contradicting each other.
        """
        del num_images
        upper = self.max_pixels if max_pixels is None else max_pixels
        if not self.unit**2 <= upper <= self.max_pixels:
            raise RequestError(
                f"max_pixels={upper} is outside [{self.unit**2}, {self.max_pixels}], "
                "from one token's pixels to the server's limit",
                "max_pixels",
            )
        lower = min(self.min_pixels, upper) if min_pixels is None else min_pixels
        if not 1 <= lower <= upper:
            message = f"min_pixels={lower} is outside [1, max_pixels={upper}]"
            raise RequestError(message, "min_pixels")
        return lower, upper

    def resized(
        self, height: int, width: int, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> tuple[int, int]:
        """Height and width after resizing, multiples of `unit`; the model's smart_resize.

        Every operation and its order are the reference's: halves round to even, and 19 x 19 grows
        to 84 x 84 because a ceiling meets double-precision noise.

        Raises:
            MediaTooLarge: Too thin, or more patches than the server takes.
            RequestError: As `limits`.
        """
        lower, upper = self.limits(min_pixels, max_pixels)
        check_aspect(height, width)
        u = self.unit
        new_height, new_width = round(height / u) * u, round(width / u) * u
        if new_height * new_width > upper:
            shrink = math.sqrt((height * width) / upper)
            new_height = max(u, math.floor(height / shrink / u) * u)
            new_width = max(u, math.floor(width / shrink / u) * u)
        elif new_height * new_width < lower:
            grow = math.sqrt(lower / (height * width))
            new_height = math.ceil(height * grow / u) * u
            new_width = math.ceil(width * grow / u) * u
        self.check_patches(new_height * new_width // self.patch_size**2)
        return new_height, new_width

    def grid(
        self, height: int, width: int, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Grid:
        """Patches by (time, height, width) of a picture of that size, before merging."""
        new_height, new_width = self.resized(height, width, min_pixels, max_pixels)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def num_rows(self, grid: Grid) -> int:
        """Rows, and so tokens, of an item."""
        return math.prod(grid) // self.merge_size**2

    def patches(
        self,
        image: Image.Image | npt.NDArray[np.uint8],
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        allocate: Allocate = new_array,
    ) -> tuple[npt.NDArray[np.uint8], Grid]:
        """Resize an RGB picture and cut it into patches.

        Args:
            image: PIL image of mode RGB, or uint8[H, W, 3].
            min_pixels: Lower pixel limit of the request.
            max_pixels: Upper pixel limit of the request.
            allocate: Gives the array that is filled and returned, uint8[N, U].

        Returns:
            uint8[N, U] and the grid. Rows in encoder order (block row, block column, then the
            patches of a merge block row by row); columns channel, y, x.
        """
        if isinstance(image, np.ndarray):
            image = Image.fromarray(np.ascontiguousarray(image))
        height, width = self.resized(image.height, image.width, min_pixels, max_pixels)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        grid = (1, height // self.patch_size, width // self.patch_size)
        patches_NU = allocate(math.prod(grid), self.num_values)
        self.cut_frame(image, patches_NU)
        return patches_NU, grid

    def positions(
        self, num_tokens: int, items: Sequence[Item]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """M-RoPE positions int32[3, T] of a prompt with its items, and the delta after it."""
        return mrope.item_positions(num_tokens, items, self.merge_size)

    def cut_frame(
        self, image: Image.Image, patches_NU: npt.NDArray[np.uint8], frame: int = 0
    ) -> None:
        """Write the patches of a resized picture, or of one of a step's frames, into an array.

        Args:
            image: Of mode RGB, both sides multiples of `unit`.
            patches_NU: uint8[N, F * U] for F frames, filled where this frame's values are.
            frame: Which of them.
        """
        p, m = self.patch_size, self.merge_size
        rows, columns = image.height // self.unit, image.width // self.unit
        line = np.dtype((np.void, p))  # one line of a patch moves whole, as an opaque element
        lines = patches_NU.reshape(-1).view(line).reshape(rows, columns, m, m, -1, 3, p)
        for channel, plane in enumerate(image.split()):
            source = np.asarray(plane).view(line).reshape(rows, m, p, columns, m)
            lines[..., frame, channel, :] = source.transpose(0, 3, 1, 4, 2)

    def check_patches(self, num_patches: int) -> None:
        """Refuse more patches than the largest picture has.

        Raises:
            MediaTooLarge: There are more.
        """
        if num_patches > self.max_patches:
            raise MediaTooLarge(
                f"the picture becomes {num_patches} patches; the limit is {self.max_patches}. "
                "Ask for fewer with a lower min_pixels."
            )


def check_aspect(height: int, width: int) -> None:
    """Refuse a picture that is too thin for the models' own rule.

    Raises:
        MediaTooLarge: One side is over 200 times the other.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise MediaTooLarge(
            f"the picture is {width} x {height}: one side is "
            f"{max(height, width) / min(height, width):g} times the other; "
            f"the limit is {MAX_ASPECT}. Crop it."
        )


def largest_area(unit: int, min_pixels: int, max_pixels: int) -> int:
    """Pixels that no picture exceeds after resizing, whatever its shape.

    Rounding up, and sides that cannot shrink below one unit, may pass `max_pixels`. With
    r = MAX_ASPECT and u = unit: a side held at u leaves the other at most sqrt(r * max);
    enlarging to m = min adds less than u to each side, and the sides sum to at most
    sqrt(m) * (sqrt(r) + 1 / sqrt(r)).
    """
    root = math.sqrt(MAX_ASPECT)
    held = unit * math.sqrt(max_pixels) * root
    enlarged = min_pixels + unit * math.sqrt(min_pixels) * (root + 1 / root) + unit * unit
    return max(max_pixels, math.ceil(held), math.ceil(enlarged))


def _check_supported(table: dict[str, Any]) -> None:
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if table.get(key) is False:
            raise ModelError(f"preprocessor_config.json sets {key}=false; only true is supported")
    if table.get("resample", Image.Resampling.BICUBIC) != Image.Resampling.BICUBIC:
        raise ModelError(
            f"preprocessor_config.json sets resample={table['resample']}; only 3 (bicubic) is "
            "supported"
        )
    if not math.isclose(table.get("rescale_factor", 1 / 255), 1 / 255):
        raise ModelError(
            f"preprocessor_config.json sets rescale_factor={table['rescale_factor']}; "
            "only 1/255 is supported"
        )


def _pixel_limits(table: dict[str, Any]) -> tuple[int, int]:
    """Limits under any of their three spellings; "edges" are areas in spite of their name."""
    size = table.get("size") or {}

    def limit(name: str, edge: str, default: int) -> int:
        return int(table.get(name) or size.get(name) or size.get(edge) or default)

    return (
        limit("min_pixels", "shortest_edge", ImageProcessor.min_pixels),
        limit("max_pixels", "longest_edge", ImageProcessor.max_pixels),
    )


def _channels(
    table: dict[str, Any], key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    values = table.get(key, default)
    if len(values) != 3:
        raise ModelError(f"preprocessor_config.json: {key} has {len(values)} values, not 3")
    return float(values[0]), float(values[1]), float(values[2])
