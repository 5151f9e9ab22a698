"""Pictures of Gemma 3: one size for all, patches in encoder order. Host only.

A picture is resized to a square, whatever its shape. Pan and scan, which adds enlarged crops of
long pictures, is an option of transformers' processor that is off by default; here it is not
offered.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import ConfigError, ModelError, RequestError
from jaxmm.host.item import Allocate, Grid, Item, new_array
from jaxmm.models.json_files import read_json, read_processor_table
from jaxmm.models.qwen2_vl import processor as qwen2_vl

_REVISION = 1
"""Part of every identity; raise it whenever the same picture gives other patches."""


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """From an RGB picture to uint8 patches in encoder order."""

    patch_size: int
    merge_size: int
    picture_pixels: int
    """Side of every picture after resizing."""
    resample: int = Image.Resampling.BILINEAR
    min_pixels: int = 0
    max_pixels: int = 0
    """0 and 0: every picture becomes the same size."""

    @classmethod
    def from_checkpoint(
        cls, directory: str | Path, *, min_pixels: int = 0, max_pixels: int = 0
    ) -> "ImageProcessor":
        """Read config.json and preprocessor_config.json.

        Args:
            directory: A Hugging Face checkpoint.
            min_pixels: The server's lower limit, at most what every picture has; 0: none.
            max_pixels: The server's upper limit, at least what every picture has; 0: none.

        Raises:
            ModelError: No config.json, or settings that this class does not follow.
            ConfigError: Pixel limits that no picture keeps.
        """
        raw = read_json(Path(directory) / "config.json")
        vision = raw.get("vision_config") or {}
        side, patch_size = int(vision.get("image_size", 224)), int(vision.get("patch_size", 16))
        if min_pixels > side**2 or 0 < max_pixels < side**2:
            raise ConfigError(
                f"media.min_pixels={min_pixels} and media.max_pixels={max_pixels}: every picture "
                f"of this model has {side**2} pixels; leave both at 0"
            )
        rows = math.isqrt(int(raw.get("mm_tokens_per_image", 256)))
        return cls(
            patch_size=patch_size,
            merge_size=side // patch_size // rows,
            picture_pixels=side,
            resample=_read_resample(Path(directory), side),
        )

    @property
    def num_values(self) -> int:
        """U: values of one patch."""
        return 3 * self.patch_size**2

    @property
    def max_patches(self) -> int:
        """Patches of every picture."""
        return (self.picture_pixels // self.patch_size) ** 2

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Settings and code that turn pixels into features."""
        settings = ("gemma3", _REVISION, self.patch_size, self.merge_size, self.picture_pixels)
        return hashlib.sha256(repr((*settings, int(self.resample))).encode()).digest()

    def limits(
        self,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        num_images: int = 1,
    ) -> tuple[int, int]:
        """Pixel limits of one request: none, or what leaves every picture its size.

        Raises:
            RequestError: Limits that would change it.
        """
        pixels = self.picture_pixels**2
        if (min_pixels or 0) > pixels or (max_pixels is not None and max_pixels < pixels):
            raise RequestError(
                f"min_pixels={min_pixels} and max_pixels={max_pixels}: every picture of this "
                f"model has {pixels} pixels; leave both out",
                "max_pixels" if min_pixels is None else "min_pixels",
            )
        return 0, 0

    def grid(
        self, height: int, width: int, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Grid:
        """Patches by (time, height, width), the same for every picture."""
        side = self.picture_pixels // self.patch_size
        return 1, side, side

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
        """Resize an RGB picture and cut it into patches; see `qwen2_vl`'s."""
        if isinstance(image, np.ndarray):
            image = Image.fromarray(np.ascontiguousarray(image))
        size = (self.picture_pixels, self.picture_pixels)
        if image.size != size:
            image = image.resize(size, Image.Resampling(self.resample))
        grid = self.grid(image.height, image.width)
        patches_NU = allocate(math.prod(grid), self.num_values)
        self._cutter.cut_frame(image, patches_NU)
        return patches_NU, grid

    def positions(
        self, num_tokens: int, items: Sequence[Item]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Tokens are numbered one after the other, those of pictures like words."""
        del items
        index = np.arange(num_tokens, dtype=np.int32)
        return np.broadcast_to(index, (3, num_tokens)), 0

    @functools.cached_property
    def _cutter(self) -> qwen2_vl.ImageProcessor:
        return qwen2_vl.ImageProcessor(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            min_pixels=1,
            max_pixels=self.picture_pixels**2,
        )


def _read_resample(directory: Path, side: int) -> int:
    """Pillow's filter, as preprocessor_config.json names it."""
    table = read_processor_table(directory) or {}
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if table.get(key) is False:
            raise ModelError(f"preprocessor_config.json sets {key}=false; only true is supported")
    if table.get("do_pan_and_scan"):
        raise ModelError(
            "preprocessor_config.json sets do_pan_and_scan: crops beside the picture, not "
            "supported. Set it to false: pictures are seen whole, the default of transformers"
        )
    size = table.get("size") or {"height": side, "width": side}
    if (size.get("height"), size.get("width")) != (side, side):
        raise ModelError(
            f"preprocessor_config.json resizes pictures to {size}; config.json says {side}"
        )
    return int(table.get("resample", Image.Resampling.BILINEAR))
