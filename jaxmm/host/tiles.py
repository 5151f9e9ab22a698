"""Pictures cut into square tiles beside a view of the whole: rows and lane. Host only.

As in DeepSeek-VL2 (arXiv:2412.10302, section 3.1). Each tile and the overview become g x g rows;
those of the tiles are laid out as the tiles are, and each line of rows ends with a row that marks
its end. A row that separates stands between the two views:

    overview         tiles, 2 across            order of the rows, and so of the tokens
    o o |n           a a b b |n                 o o n  o o n   s   a a b b n  a a b b n
    o o |n     s     a a b b |n                 (the tiles first where the model wants it so)

A lane holds tiles one behind the other from its first patch on, so where each stands is no news to
the device. The marks are the model's own vectors: the encoder gives as many of both as the tiles
of a lane can need, behind the tiles' rows, and `slots` says which of them is wanted where.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.host.item import Grid
from jaxmm.host.lanes import MERGE_SIZE, EncodeBatch


class TileForm(NamedTuple):
    """How a model cuts pictures."""

    side: int
    """Patches by side of a tile."""
    overview_first: bool = True

    @property
    def patches(self) -> int:
        """Patches of a tile."""
        return self.side**2

    @property
    def rows_across(self) -> int:
        """Rows of a tile in each direction; a patch short of a row is filled up."""
        return -(-self.side // MERGE_SIZE)

    def tiles(self, grid: Grid) -> tuple[int, int]:
        """Tiles down and across of a picture.

        Args:
            grid: Patches by (time, height, width) of the tiles together; the overview, of one
                tile's patches, is not in it.
        """
        _, height, width = grid
        return height // self.side, width // self.side

    def num_patches(self, grid: Grid) -> int:
        """Patches of all views together."""
        down, across = self.tiles(grid)
        return (1 + down * across) * self.patches

    def num_rows(self, grid: Grid) -> int:
        """Rows of all views together, marks included."""
        down, across = self.tiles(grid)
        g = self.rows_across
        return g * (g + 1) + 1 + down * g * (across * g + 1)

    def lane_rows(self, lane_patches: int) -> int:
        """Rows that the encoder gives for a lane: of tiles, line ends, separators."""
        tiles, g = lane_patches // self.patches, self.rows_across
        return tiles * g * (g + 1) + tiles // 2  # a picture has two views at least


class _Places(NamedTuple):
    """Where in a picture each of its rows stands; arrays are shared and read-only."""

    tiles: npt.NDArray[np.int32]
    """int32[tiles * g * g]: of the rows of each tile, the overview first, then line by line."""
    line_ends: npt.NDArray[np.int32]
    """int32[lines]"""
    separator: int


def pack_tiles(
    features: Sequence[npt.NDArray[np.uint8]],
    grids: Sequence[Grid],
    slots: Sequence[npt.NDArray[np.int32]],
    form: TileForm,
    *,
    lane_patches: int,
    patch_values: int,
    drop_slot: int,
) -> EncodeBatch:
    """Pack pictures into a lane, one after the other; a lane of none is padding.

    Args:
        features: For each picture uint8[n, U]: the overview, then its tiles line by line, each
            tile's patches in raster order.
        grids: For each picture its patches, as `TileForm.tiles` has them.
        slots: For each picture int32[rows], arena row of each of its rows in order.
        form: The model's.
        lane_patches: N, at least the sum of `TileForm.num_patches`.
        patch_values: U, values of one patch.
        drop_slot: Slot of rows that nobody wants, out of the arena's range.
    """
    tiles, g = lane_patches // form.patches, form.rows_across
    lane = EncodeBatch(
        patches=np.zeros((lane_patches, patch_values), np.uint8),
        later=None,
        coords=np.zeros((lane_patches, 2), np.int32),
        segment=np.full(lane_patches, -1, np.int32),
        window=None,
        sizes=None,
        slots=np.full(form.lane_rows(lane_patches), drop_slot, np.int32),
        num_patches=sum(map(form.num_patches, grids)),
    )
    rows, line_ends, separators = np.split(lane.slots, (tiles * g * g, tiles * g * (g + 1)))
    tile = line = 0
    for index, (item, grid, item_slots) in enumerate(zip(features, grids, slots, strict=True)):
        places, count = _places(*form.tiles(grid), g, form.overview_first), len(item)
        start = tile * form.patches
        assert start + count <= lane_patches, "items exceed the lane"
        lane.patches[start : start + count] = item
        rows[tile * g * g :][: len(places.tiles)] = item_slots[places.tiles]
        line_ends[line:][: len(places.line_ends)] = item_slots[places.line_ends]
        separators[index] = item_slots[places.separator]
        tile, line = tile + count // form.patches, line + len(places.line_ends)
    lane.segment[: tile * form.patches] = np.repeat(np.arange(tile, dtype=np.int32), form.patches)
    return lane


@lru_cache(maxsize=256)
def _places(down: int, across: int, g: int, overview_first: bool) -> _Places:
    overview = np.arange(g * (g + 1), dtype=np.int32).reshape(g, g + 1)
    local = np.arange(down * g * (across * g + 1), dtype=np.int32).reshape(down * g, -1)
    separator = overview.size if overview_first else local.size
    if overview_first:
        local += separator + 1
    else:
        overview += separator + 1
    cut = local[:, :-1].reshape(down, g, across, g).swapaxes(1, 2)
    places = _Places(
        tiles=np.concatenate([overview[:, :-1].ravel(), cut.ravel()]),
        line_ends=np.concatenate([overview[:, -1], local[:, -1]]),
        separator=separator,
    )
    places.tiles.flags.writeable = places.line_ends.flags.writeable = False
    return places
