"""Packs the patches of several images into one lane that the encoder takes at once. Host only.

Full attention needs to know which patches are of one image: `segment`. Window attention runs on
blocks of 64 consecutive patches, so no window may cross a multiple of 64. A full window fills a
block; the smaller windows at the right and bottom edge share blocks, first fit, and what they
leave is padding (segment and window -1):

    image of 6 x 5 windows, the last of each row and column smaller

    F F F F r      blocks:  F F F F F F ... | r r | r r | r b | b b | b c
    F F F F r
    ...            rows come out of the encoder in this order; `slots` puts each in its place,
    b b b b c      so nothing is sorted back.

All of that depends on the grid alone and is remembered for the grids seen last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxmm.host.item import Grid

MERGE_SIZE = 2
"""Patches by side of the square that becomes one row, in most families."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodeBatch:
    """One lane of N patches, or several one behind the other, N in all. Patches and coords of
    padding are of no consequence."""

    patches: npt.NDArray[np.uint8]
    """uint8[N, U], the patches of a row one after the other."""
    later: npt.NDArray[np.uint8] | None
    """uint8[N, U]: the second frame of each time step; None for a lane of still pictures."""
    coords: npt.NDArray[np.int32]
    """int32[N, 2]: row and column in the image's grid of patches."""
    segment: npt.NDArray[np.int32]
    """int32[N]: which frame of which item, in each lane from 0 up; -1 for padding."""
    window: npt.NDArray[np.int32] | None
    """int32[N]: which window of the frame, -1 for padding; None for a family without windows."""
    sizes: npt.NDArray[np.int32] | None
    """int32[N, 2]: height and width of each patch's frame, in patches; None if not asked for."""
    slots: npt.NDArray[np.int32]
    """int32[M]: where each row goes in the arena; `drop_slot` for padding. Of pictures that are
    taken whole M is N // 4."""
    num_patches: int
    """Patches that are not padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """How one frame is packed; arrays are shared and read-only."""

    rows: npt.NDArray[np.int32]
    """int32[n // merged]: index of each packed row in raster order, -1 for padding."""
    coords: npt.NDArray[np.int32]
    """int32[n, 2]"""
    window: npt.NDArray[np.int32]
    """int32[n]"""
    merged: int
    """Patches of a row."""

    @property
    def num_patches(self) -> int:
        return len(self.coords)


def packed_patches(grid: Grid, window_patches: int) -> int:
    """Patches of a lane that an item takes, padding between its windows included.

    Args:
        grid: The item's patches by (time, height, width).
        window_patches: Patches of a full window; 0 for a family without windows.
    """
    t, h, w = grid
    return t * (_layout(h, w, window_patches).num_patches if window_patches else h * w)


def pack_lane(
    features: Sequence[npt.NDArray[np.uint8]],
    grids: Sequence[Grid],
    slots: Sequence[npt.NDArray[np.int32]],
    *,
    lane_patches: int,
    patch_values: int,
    window_patches: int,
    with_sizes: bool,
    drop_slot: int,
    merge_size: int = MERGE_SIZE,
) -> EncodeBatch:
    """Pack items into a lane, one after the other.

    Args:
        features: For each item uint8[t*h*w, U], frame by frame, rows in raster order and the four
            patches of a row together (the order of the Hugging Face processor); of video
            uint8[t*h*w, 2 * U], the first frame of a time step and then the second.
        grids: For each item its patches by (time, height, width).
        slots: For each item int32[t*h*w // 4], arena row of each of its rows in that order.
        lane_patches: N, at least the sum of `packed_patches`, a multiple of 64 with windows.
        patch_values: U, values of one patch of one frame.
        window_patches: Patches of a full window; 0 for a family without windows.
        with_sizes: Tell each patch the size of its frame, for learned positions.
        drop_slot: Slot of padding rows, out of the arena's range.
        merge_size: Patches by side of the square that becomes one row; 2 with windows.
    """
    any_later = any(item.shape[1] > patch_values for item in features)
    lane = EncodeBatch(
        patches=np.zeros((lane_patches, patch_values), np.uint8),
        later=np.zeros((lane_patches, patch_values), np.uint8) if any_later else None,
        coords=np.zeros((lane_patches, 2), np.int32),
        segment=np.full(lane_patches, -1, np.int32),
        window=np.full(lane_patches, -1, np.int32) if window_patches else None,
        sizes=np.zeros((lane_patches, 2), np.int32) if with_sizes else None,
        slots=np.full(lane_patches // merge_size**2, drop_slot, np.int32),
        num_patches=sum(t * h * w for t, h, w in grids),
    )
    start = segment = 0
    for item, (t, h, w), item_slots in zip(features, grids, slots, strict=True):
        layout = _layout(h, w, window_patches, merge_size)
        frames = item.reshape(t, h * w, -1)
        for frame, frame_slots in zip(frames, item_slots.reshape(t, -1), strict=True):
            assert start + layout.num_patches <= lane_patches, "items exceed the lane"
            _write_frame(lane, start, segment, layout, frame, frame_slots)
            if lane.sizes is not None:
                lane.sizes[start : start + layout.num_patches] = (h, w)
            start += layout.num_patches
            segment += 1
    return lane


def spread(sizes: Sequence[int], num_lanes: int, capacity: int) -> list[list[list[int]]]:
    """Spread items over lanes, the largest first, each to the emptiest lane.

    Args:
        sizes: Patches of each item, none over `capacity`.
        num_lanes: Lanes that are encoded together, each on a chip of its own.
        capacity: Patches of a lane at most.

    Returns:
        Rounds, mostly one; of each its lanes, some empty; of each the indices of its items.
    """
    rounds: list[list[list[int]]] = []
    filled: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = (r for r in range(len(rounds)) if min(filled[r]) + sizes[index] <= capacity)
        place = next(fits, len(rounds))
        if place == len(rounds):
            rounds.append([[] for _ in range(num_lanes)])
            filled.append([0] * num_lanes)
        lane = filled[place].index(min(filled[place]))
        rounds[place][lane].append(index)
        filled[place][lane] += sizes[index]
    return rounds


def join_lanes(lanes: Sequence[EncodeBatch]) -> EncodeBatch:
    """Lay lanes of one size one behind the other, for as many chips."""
    if len(lanes) == 1:
        return lanes[0]

    def join(arrays: Iterable[npt.NDArray[Any] | None]) -> Any:
        there = [array for array in arrays if array is not None]
        return np.concatenate(there) if there else None

    moving = any(lane.later is not None for lane in lanes)  # a still picture is twice the same
    later = (lane.patches if lane.later is None else lane.later for lane in lanes)
    return EncodeBatch(
        patches=join(lane.patches for lane in lanes),
        later=join(later) if moving else None,
        coords=join(lane.coords for lane in lanes),
        segment=join(lane.segment for lane in lanes),
        window=join(lane.window for lane in lanes),
        sizes=join(lane.sizes for lane in lanes),
        slots=join(lane.slots for lane in lanes),
        num_patches=sum(lane.num_patches for lane in lanes),
    )


def _write_frame(
    lane: EncodeBatch,
    start: int,
    segment: int,
    layout: _Layout,
    frame: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.int32],
) -> None:
    """Write one time step (uint8[h*w, U] or uint8[h*w, 2 * U]) at patch `start` of the lane."""
    stop = start + layout.num_patches
    rows = slice(start // layout.merged, stop // layout.merged)
    real = layout.rows >= 0
    values = lane.patches.shape[1]
    _write_pixels(lane.patches[start:stop], frame[:, :values], layout)
    if lane.later is not None:  # a still picture is the same frame twice
        _write_pixels(lane.later[start:stop], frame[:, -values:], layout)
    np.copyto(lane.slots[rows], slots.take(layout.rows, mode="clip"), where=real)
    np.copyto(lane.segment[start:stop], segment, where=np.repeat(real, layout.merged))
    lane.coords[start:stop] = layout.coords
    if lane.window is not None:
        lane.window[start:stop] = layout.window


def _write_pixels(
    target: npt.NDArray[np.uint8], frame: npt.NDArray[np.uint8], layout: _Layout
) -> None:
    """Write one frame, uint8[h*w, U], in the order of its layout."""
    rows = frame.reshape(len(frame) // layout.merged, -1)
    # "clip" makes -1 read row 0, pixels that padding may hold, and lets take write in place
    np.take(rows, layout.rows, axis=0, out=target.reshape(len(layout.rows), -1), mode="clip")


@lru_cache(maxsize=1024)
def _layout(height: int, width: int, window_patches: int, merge_size: int = MERGE_SIZE) -> _Layout:
    """Lay out one frame of height x width patches."""
    merged = merge_size**2
    num_rows = height * width // merged
    windows = _windows(height, width, window_patches, merge_size)
    if window_patches:
        blocks = _blocks([len(w) for w in windows], window_patches // merged)
    else:
        blocks = [[0]]
    size = window_patches // merged if window_patches else num_rows
    rows = np.full(len(blocks) * size, -1, np.int32)
    window = np.full(len(rows), -1, np.int32)
    for block, members in enumerate(blocks):
        start = block * size
        for member in members:
            stop = start + len(windows[member])
            rows[start:stop] = windows[member]
            window[start:stop] = member
            start = stop
    layout = _Layout(
        rows=rows,
        coords=_coords(rows, width // merge_size, merge_size),
        window=np.repeat(window, merged),
        merged=merged,
    )
    for array in (layout.rows, layout.coords, layout.window):
        array.flags.writeable = False
    return layout


def _windows(
    height: int, width: int, window_patches: int, merge_size: int
) -> list[npt.NDArray[np.int32]]:
    """Raster row indices of each window, windows in raster order; one window if there are none."""
    down, across = height // merge_size, width // merge_size
    rows = np.arange(down * across, dtype=np.int32).reshape(down, across)
    side = isqrt(window_patches) // merge_size or max(down, across)
    return [
        rows[top : top + side, left : left + side].ravel()
        for top in range(0, down, side)
        for left in range(0, across, side)
    ]


def _blocks(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit, largest first: indices of the windows in each block."""
    blocks: list[list[int]] = []
    room: list[int] = []
    first_open = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        while first_open < len(room) and room[first_open] == 0:
            first_open += 1
        fits = (b for b in range(first_open, len(room)) if room[b] >= sizes[index])
        block = next(fits, len(room))
        if block == len(room):
            blocks.append([])
            room.append(capacity)
        blocks[block].append(index)
        room[block] -= sizes[index]
    return blocks


def _coords(
    rows: npt.NDArray[np.int32], rows_across: int, merge_size: int
) -> npt.NDArray[np.int32]:
    """int32[merged * len(rows), 2]: row and column of the patches of each raster row; -1 is read
    as 0."""
    top, left = np.divmod(np.maximum(rows, 0), rows_across)
    corner = np.stack([top, left], axis=-1) * merge_size
    inside = np.indices((merge_size, merge_size), np.int32).reshape(2, -1).T
    coords: npt.NDArray[np.int32] = (corner[:, None] + inside).reshape(-1, 2)
    return coords
