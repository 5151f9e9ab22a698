"""Pictures of a family without a processor of its own, by transformers' image processor. Host only.

What AutoProcessor would do to a picture, on Pillow: resizing and cropping are transformers', while
rescaling and normalising are switched off, because the device does them. Two forms of its result
are known: patches with `image_grid_thw`, as the Qwen families' are, and a whole picture
[1, 3, H, W], which is cut here.
"""

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import MediaTooLarge, ModelError, RequestError
from jaxmm.host import mrope
from jaxmm.host.item import Allocate, Grid, Item, new_array
from jaxmm.models.qwen2_vl.processor import largest_area

_REVISION = 1
"""Part of every identity; raise it whenever the same picture gives other patches."""
_PROBE_SIDE = 96


@dataclass(frozen=True, kw_only=True)
class AutoImageProcessor:
    """From an RGB picture to uint8 patches in encoder order."""

    directory: str
    """Checkpoint; read again by each process that works with this."""
    patch_size: int
    merge_size: int
    min_pixels: int = 0
    max_pixels: int = 0
    """0 and 0 where every picture becomes the same size."""

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | Path,
        *,
        patch_size: int,
        merge_size: int,
        min_pixels: int = 0,
        max_pixels: int = 0,
    ) -> "AutoImageProcessor":
        """Load transformers' processor and try it on a picture.

        Args:
            directory: A Hugging Face checkpoint.
            patch_size: Pixels by side of a patch.
            merge_size: Patches by side of what becomes one row.
            min_pixels: Replaces the checkpoint's lower limit; 0 keeps it.
            max_pixels: Replaces the checkpoint's upper limit; 0 keeps it.

        Raises:
            ModelError: It cannot be loaded, or gives something else than one of the two forms.
        """
        size = _size(_load(str(directory)))
        lower, upper = size.get("shortest_edge", 0), size.get("longest_edge", 0)
        processor = cls(
            directory=str(directory),
            patch_size=patch_size,
            merge_size=merge_size,
            min_pixels=min_pixels or lower if upper else 0,
            max_pixels=max_pixels or upper if upper else 0,
        )
        processor.patches(Image.new("RGB", (_PROBE_SIDE, _PROBE_SIDE)))
        return processor

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
        """Patches that no picture exceeds."""
        if self.max_pixels:
            area = largest_area(self.unit, self.min_pixels, self.max_pixels)
        else:
            _, height, width = self.grid(_PROBE_SIDE, _PROBE_SIDE)
            return height * width
        return area // self.unit**2 * self.merge_size**2

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Everything that turns pixels into features; pixel limits show in the grid."""
        loaded = _load(self.directory)
        settings = json.dumps(loaded.to_dict(), sort_keys=True, default=str)
        text = f"auto|{_REVISION}|{type(loaded).__name__}|{settings}"
        return hashlib.sha256(text.encode()).digest()

    def limits(
        self,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        num_images: int = 1,
    ) -> tuple[int, int]:
        """Pixel limits of one request, within the server's, however many pictures it has.

        Raises:
            RequestError: Limits outside the server's, or any where every picture has one size.
        """
        del num_images
        upper = self.max_pixels if max_pixels is None else max_pixels
        lower = min(self.min_pixels, upper) if min_pixels is None else min_pixels
        if (lower, upper) == (self.min_pixels, self.max_pixels):
            return lower, upper
        if not (1 <= lower <= upper <= self.max_pixels and self.unit**2 <= upper):
            raise RequestError(
                f"min_pixels={lower} and max_pixels={upper} are not within the server's limits, "
                f"{self.unit**2} to {self.max_pixels}",
                "max_pixels" if min_pixels is None else "min_pixels",
            )
        return lower, upper

    def grid(self, height: int, width: int) -> Grid:
        """Patches by (time, height, width) of a picture of that size, before merging."""
        return self.patches(Image.new("RGB", (width, height)))[1]

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
        """Process an RGB picture; arguments and result as `qwen2_vl`'s.

        Raises:
            MediaTooLarge: transformers refuses the picture's shape.
            ModelError: The result has a form that jaxmm does not know.
        """
        lower, upper = self.limits(min_pixels, max_pixels)
        values, grid = self._process(image, lower, upper)
        if self.max_pixels and len(values) > self.max_patches:
            raise MediaTooLarge(
                f"the picture becomes {len(values)} patches; the limit is {self.max_patches}"
            )
        patches_NU = allocate(*values.shape)
        np.copyto(patches_NU, values, casting="unsafe")  # whole numbers, checked by the probe
        return patches_NU, grid

    def positions(
        self, num_tokens: int, items: Sequence[Item]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """M-RoPE positions int32[3, T] of a prompt with its items, and the delta after it."""
        return mrope.item_positions(num_tokens, items, self.merge_size)

    def _process(self, image: Any, lower: int, upper: int) -> tuple[npt.NDArray[Any], Grid]:
        """Values [N, U] and the grid."""
        size = {"size": {"shortest_edge": lower, "longest_edge": upper}} if upper else {}
        try:
            out = _load(self.directory)(
                images=[image], return_tensors="np", do_rescale=False, do_normalize=False, **size
            )
        except ValueError as error:
            raise MediaTooLarge(f"the picture cannot be processed: {error}") from None
        pixels = np.asarray(out["pixel_values"])
        if "image_grid_thw" in out and pixels.ndim == 2:
            t, h, w = (int(n) for n in out["image_grid_thw"][0])
            frames = pixels.reshape(t * h * w, 3, -1, self.patch_size**2)
            return frames[:, :, 0].reshape(t * h * w, -1), (t, h, w)
        if pixels.shape[:2] == (1, 3):
            return self._cut(pixels[0])
        raise ModelError(
            f"{type(_load(self.directory)).__name__} gives {', '.join(out)} with pixel_values "
            f"{list(pixels.shape)}; only patches with image_grid_thw and pictures [1, 3, H, W] "
            "are known. Write a processor for the family: docs/adding_a_family.md."
        )

    def _cut(self, picture: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Grid]:
        """Cut [3, H, W] into patches; what is left over at the right and bottom is dropped."""
        p, m = self.patch_size, self.merge_size
        down, across = (n // self.unit for n in picture.shape[1:])
        whole = picture[:, : down * self.unit, : across * self.unit]
        blocks = whole.reshape(3, down, m, p, across, m, p).transpose(1, 4, 2, 5, 0, 3, 6)
        return blocks.reshape(-1, self.num_values), (1, down * m, across * m)


@functools.cache
def _load(directory: str) -> Any:
    """transformers' processor, its Pillow form: the same pixels with and without torchvision."""
    from transformers import AutoImageProcessor as Loader

    try:
        return Loader.from_pretrained(directory, backend="pil", local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"no image processor can be loaded from {directory!r}: {error}") from error


def _size(processor: Any) -> dict[str, int]:
    """Its `size`, as a dict of what is set; pixel areas only where it gives patches."""
    size = getattr(processor, "size", None) or {}
    areas = hasattr(processor, "merge_size")
    return {k: int(v) for k, v in dict(size).items() if v is not None and areas}
