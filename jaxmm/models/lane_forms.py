"""How a model's pictures lie in an encode lane: whole, or in tiles. Host only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxmm.host.item import Grid
from jaxmm.host.lanes import EncodeBatch, pack_lane, packed_patches
from jaxmm.host.tiles import TileForm, pack_tiles
from jaxmm.models.config import VisionConfig


def tile_form(vision: VisionConfig) -> TileForm | None:
    """How the model cuts pictures into tiles; None: it does not."""
    return TileForm(vision.tile_side, vision.overview_first) if vision.tile_side else None


def lane_patches(grid: Grid, vision: VisionConfig) -> int:
    """Patches of a lane that an item takes."""
    form = tile_form(vision)
    return packed_patches(grid, vision.window_patches) if form is None else form.num_patches(grid)


def lane_rows(num_patches: int, vision: VisionConfig) -> int:
    """Rows that the encoder gives for a lane of so many patches."""
    form = tile_form(vision)
    return num_patches // vision.merged_patches if form is None else form.lane_rows(num_patches)


def pack_items(
    features: Sequence[npt.NDArray[np.uint8]],
    grids: Sequence[Grid],
    slots: Sequence[npt.NDArray[np.int32]],
    vision: VisionConfig,
    *,
    lane_patches: int,
    drop_slot: int,
) -> EncodeBatch:
    """Pack items into a lane, see `pack_lane` and `pack_tiles`."""
    form = tile_form(vision)
    if form is not None:
        return pack_tiles(
            features,
            grids,
            slots,
            form,
            lane_patches=lane_patches,
            patch_values=vision.patch_values,
            drop_slot=drop_slot,
        )
    return pack_lane(
        features,
        grids,
        slots,
        lane_patches=lane_patches,
        patch_values=vision.patch_values,
        window_patches=vision.window_patches,
        with_sizes=vision.position_side > 0,
        drop_slot=drop_slot,
        merge_size=vision.merge_size,
    )
