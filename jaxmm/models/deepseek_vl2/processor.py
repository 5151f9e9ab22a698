"""Pictures of DeepSeek-VL2: which tiles, padding, patches. Host only.

A picture is seen twice: whole, in one square tile, and enlarged, cut into as many tiles as suit
its shape (arXiv:2412.10302, section 3.1). In a conversation with more than two pictures each is
one tile beside its overview, which is the same picture once more: the models were trained so.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import ConfigError, ModelError, RequestError
from jaxmm.host.item import Allocate, Grid, Item, new_array
from jaxmm.host.tiles import TileForm
from jaxmm.models.json_files import read_json

MAX_TILED_PICTURES = 2
"""Pictures of a conversation up to which they are cut into tiles."""
_REVISION = 1
"""Part of every identity; raise it whenever the same picture gives other patches."""


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """From an RGB picture to uint8 patches in encoder order."""

    patch_size: int
    tile_pixels: int
    """Pixels by side of a tile; what is no whole patch at its right and bottom is not seen."""
    candidates: tuple[tuple[int, int], ...]
    """Width and height of the tiles together, in the checkpoint's order: of equals the first."""
    min_pixels: int
    max_pixels: int
    """Limits of the tiles together; the overview is always one more."""
    fill: tuple[int, int, int]
    """Colour beside a picture of another shape than its tiles."""

    def __post_init__(self) -> None:
        if self.max_pixels < self.tile_pixels**2:
            raise ConfigError(
                f"max_pixels={self.max_pixels} is below one tile's {self.tile_pixels} x "
                f"{self.tile_pixels}"
            )
        if not self._within(self.min_pixels, self.max_pixels):
            raise ConfigError(f"min_pixels={self.min_pixels}: {self._no_tiling(self.max_pixels)}")

    @classmethod
    def from_checkpoint(
        cls, directory: str | Path, *, min_pixels: int = 0, max_pixels: int = 0
    ) -> "ImageProcessor":
        """Read config.json and, where there is one, processor_config.json.

        Args:
            directory: A checkpoint.
            min_pixels: Lower limit of the tiles together; 0: one tile.
            max_pixels: Upper limit of the tiles together; 0: the checkpoint's largest.

        Raises:
            ModelError: No config.json, or candidates that are no whole tiles.
            ConfigError: Pixel limits that contradict each other.
        """
        raw = read_json(Path(directory) / "config.json")
        path = Path(directory) / "processor_config.json"
        table = read_json(path) if path.exists() else {}
        side = int((raw.get("vision_config") or {}).get("image_size", 384))
        listed = table.get("candidate_resolutions") or raw.get("candidate_resolutions") or ()
        candidates = tuple((int(width), int(height)) for width, height in listed)
        if (side, side) not in candidates or any(n % side for pair in candidates for n in pair):
            raise ModelError(
                f"processor_config.json: candidate_resolutions are not multiples of {side}, from "
                "one tile up"
            )
        red, green, blue = (int(255 * float(value)) for value in _mean(table))
        return cls(
            patch_size=int(table.get("patch_size", 14)),
            tile_pixels=side,
            candidates=candidates,
            min_pixels=min_pixels or side**2,
            max_pixels=max_pixels or max(width * height for width, height in candidates),
            fill=(red, green, blue),
        )

    @functools.cached_property
    def form(self) -> TileForm:
        """How many patches and rows pictures have."""
        return TileForm(self.tile_pixels // self.patch_size)

    @property
    def num_values(self) -> int:
        """U: values of one patch."""
        return 3 * self.patch_size**2

    @functools.cached_property
    def max_patches(self) -> int:
        """Patches that no picture exceeds, its overview included."""
        allowed = self._within(self.min_pixels, self.max_pixels)
        return max(self.form.num_patches(self._grid(pair)) for pair in allowed)

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """Settings and code that turn pixels into features; the choice of tiles shows in the
        grid."""
        settings = ("deepseek_vl2", _REVISION, self.patch_size, self.tile_pixels, self.fill)
        return hashlib.sha256(repr(settings).encode()).digest()

    def limits(
        self,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        num_images: int = 1,
    ) -> tuple[int, int]:
        """Pixel limits of a request's tiles, within the server's.

        An upper limit above the largest tiling that there is asks for nothing more than that one.

        Args:
            min_pixels: The request's.
            max_pixels: The request's.
            num_images: Pictures of the whole conversation; more than two are not cut.

        Raises:
            RequestError: Limits outside the server's, or that no tiling keeps.
        """
        upper = self.max_pixels if max_pixels is None else max_pixels
        largest = max(width * height for width, height in self.candidates)
        if self.max_pixels >= largest:
            upper = min(upper, self.max_pixels)
        if not self.tile_pixels**2 <= upper <= self.max_pixels:
            raise RequestError(
                f"max_pixels={upper} is outside [{self.tile_pixels**2}, {self.max_pixels}], "
                "from one tile's pixels to the server's limit",
                "max_pixels",
            )
        if num_images > MAX_TILED_PICTURES:
            upper = self.tile_pixels**2
        lower = min(self.min_pixels, upper) if min_pixels is None else min_pixels
        if lower < 1 or not self._within(lower, upper):
            raise RequestError(
                f"min_pixels={lower}: {self._no_tiling(upper)}"
                + (
                    f"; with more than {MAX_TILED_PICTURES} images each is one tile"
                    if num_images > MAX_TILED_PICTURES
                    else ""
                ),
                "min_pixels",
            )
        return lower, upper

    def grid(
        self, height: int, width: int, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Grid:
        """Patches by (time, height, width) of the tiles of a picture of that size, together."""
        return self._grid(self.tiling(width, height, *self.limits(min_pixels, max_pixels)))

    def num_rows(self, grid: Grid) -> int:
        """Rows, and so tokens, of an item."""
        return self.form.num_rows(grid)

    def tiling(self, width: int, height: int, lower: int, upper: int) -> tuple[int, int]:
        """Width and height of the tiles together for a picture.

        The one that shows most of the picture's pixels, of those the one that wastes least, of
        those the first: the models' own `select_best_resolution`, every operation and its order.
        It leaves no choice among tilings of one size that all show a small picture whole; where a
        request asks for no fewer tiles than those, the one that shows it largest is taken.
        """
        asked = lower > self.tile_pixels**2

        def rank(pair: tuple[int, int]) -> tuple[int, int, float]:
            scale = min(pair[0] / width, pair[1] / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return shown, shown - pair[0] * pair[1], scale if asked else 0.0

        return max(self._within(lower, upper), key=rank)

    def patches(
        self,
        image: Image.Image | npt.NDArray[np.uint8],
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        allocate: Allocate = new_array,
    ) -> tuple[npt.NDArray[np.uint8], Grid]:
        """Fit an RGB picture into its tiles and cut those into patches.

        Args:
            image: PIL image of mode RGB, or uint8[H, W, 3].
            min_pixels: Lower limit, as `limits` gives it.
            max_pixels: Upper limit, as `limits` gives it.
            allocate: Gives the array that is filled and returned, uint8[N, U].

        Returns:
            uint8[N, U]: the overview, then the tiles line by line, each tile's patches in raster
            order; columns channel, y, x. And the grid of the tiles.
        """
        if isinstance(image, np.ndarray):
            image = Image.fromarray(np.ascontiguousarray(image))
        lower = self.min_pixels if min_pixels is None else min_pixels
        upper = self.max_pixels if max_pixels is None else max_pixels
        pair = self.tiling(*image.size, lower, upper)
        grid = self._grid(pair)
        patches_NU = allocate(self.form.num_patches(grid), self.num_values)
        first = self.form.patches
        self._cut(self._padded(image, (self.tile_pixels,) * 2), patches_NU[:first])
        self._cut(self._padded(image, pair), patches_NU[first:])
        return patches_NU, grid

    def positions(
        self, num_tokens: int, items: Sequence[Item]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Tokens are numbered one after the other, pictures too: int32[3, T], and no delta."""
        del items
        return np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1)), 0

    def _grid(self, pair: tuple[int, int]) -> Grid:
        across, down = (n // self.tile_pixels for n in pair)
        return 1, down * self.form.side, across * self.form.side

    def _within(self, lower: int, upper: int) -> list[tuple[int, int]]:
        return [pair for pair in self.candidates if lower <= pair[0] * pair[1] <= upper]

    def _no_tiling(self, upper: int) -> str:
        tiles = sorted({w * h // self.tile_pixels**2 for w, h in self._within(1, upper)})
        return (
            f"no tiling has between that and max_pixels={upper}; those there are have "
            f"{', '.join(map(str, tiles))} tiles of {self.tile_pixels} x {self.tile_pixels} pixels"
        )

    def _padded(self, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        """Fit a picture into a size, centred; Pillow's `ImageOps.pad` to the last bit.

        A picture so thin that nothing of a side would be left keeps one pixel of it.
        """
        width, height = image.size
        fitted = size
        if width / height > size[0] / size[1]:
            fitted = (size[0], max(1, round(height / width * size[0])))
        elif width / height < size[0] / size[1]:
            fitted = (max(1, round(width / height * size[1])), size[1])
        resized = image.resize(fitted, Image.Resampling.BICUBIC)
        if fitted == size:
            return resized
        padded = Image.new("RGB", size, self.fill)
        x, y = (round((n - m) * 0.5) for n, m in zip(size, fitted, strict=True))
        padded.paste(resized, (x, y))
        return padded

    def _cut(self, image: Image.Image, patches_NU: npt.NDArray[np.uint8]) -> None:
        """Write the patches of the tiles that a picture consists of."""
        tile, p, side = self.tile_pixels, self.patch_size, self.form.side
        down, across, seen = image.height // tile, image.width // tile, side * p
        pixels = np.asarray(image).reshape(down, tile, across, tile, 3)[:, :seen, :, :seen]
        lines = pixels.reshape(down, side, p, across, side, p, 3)
        target = patches_NU.reshape(down, across, side, side, 3, p, p)
        target[...] = lines.transpose(0, 3, 1, 4, 6, 2, 5)


def _mean(table: dict[str, Any]) -> Sequence[float]:
    mean: Sequence[float] = table.get("image_mean") or (0.5, 0.5, 0.5)
    if len(mean) != 3:
        raise ModelError(f"processor_config.json: image_mean has {len(mean)} values, not 3")
    return mean
