"""Laws of lane packing; the oracle is the image laid out as a plain two-dimensional grid."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.host.lanes import (
    EncodeBatch,
    Grid,
    join_lanes,
    pack_lane,
    packed_patches,
    spread,
)

WINDOW = 64
DROP = 10_000

grids = st.tuples(st.integers(1, 2), st.integers(1, 13), st.integers(1, 13)).map(
    lambda g: (g[0], 2 * g[1], 2 * g[2])
)
lanes = st.lists(grids, min_size=1, max_size=4)


def labelled_patches(grid: Grid, item: int) -> np.ndarray:
    """Patches in the processor's order that say where they come from: item, frame, row, column."""
    t, h, w = grid
    frame, top, left, y, x = np.indices((t, h // 2, w // 2, 2, 2))
    labels = np.stack([np.full_like(frame, item), frame, 2 * top + y, 2 * left + x], axis=-1)
    return labels.reshape(-1, 4).astype(np.uint8)


def pack(lane: list[Grid], window_patches: int) -> EncodeBatch:
    sizes = [t * h * w // 4 for t, h, w in lane]
    slots = np.split(np.arange(sum(sizes), dtype=np.int32)[::-1], np.cumsum(sizes)[:-1])
    return pack_lane(
        [labelled_patches(grid, item) for item, grid in enumerate(lane)],
        lane,
        slots,
        lane_patches=sum(packed_patches(g, window_patches) for g in lane) + WINDOW,
        patch_values=4,
        window_patches=window_patches,
        with_sizes=True,
        drop_slot=DROP,
    )


@given(lane=lanes, window_patches=st.sampled_from([0, WINDOW]))
def test_every_patch_is_in_the_lane_once(lane: list[Grid], window_patches: int) -> None:
    batch = pack(lane, window_patches)
    packed = batch.patches[batch.segment >= 0]
    given_patches = np.concatenate([labelled_patches(g, item) for item, g in enumerate(lane)])
    assert sorted(map(tuple, packed)) == sorted(map(tuple, given_patches))
    assert batch.num_patches == len(given_patches)


@given(lane=lanes, window_patches=st.sampled_from([0, WINDOW]))
def test_coords_are_those_of_the_patch(lane: list[Grid], window_patches: int) -> None:
    batch = pack(lane, window_patches)
    real = batch.segment >= 0
    np.testing.assert_array_equal(batch.coords[real], batch.patches[real][:, 2:])


@given(lane=lanes, window_patches=st.sampled_from([0, WINDOW]))
def test_each_frame_of_each_item_is_one_segment_and_segments_never_fall(
    lane: list[Grid], window_patches: int
) -> None:
    batch = pack(lane, window_patches)
    real = batch.segment >= 0
    assert (np.diff(batch.segment[real]) >= 0).all()
    frames = list(map(tuple, batch.patches[real][:, :2]))
    pairs = set(zip(frames, batch.segment[real], strict=True))
    assert len(pairs) == len(set(frames)) == batch.segment.max() + 1


@given(lane=lanes)
def test_windows_are_squares_of_eight_patches_and_none_crosses_a_block(lane: list[Grid]) -> None:
    batch = pack(lane, WINDOW)
    assert batch.window is not None
    real = batch.segment >= 0
    np.testing.assert_array_equal(batch.window < 0, ~real)
    block = np.arange(len(real)) // WINDOW
    place = [(item, frame, y // 8, x // 8) for item, frame, y, x in batch.patches[real].astype(int)]
    packed = list(zip(block[real], batch.window[real], strict=True))
    assert len(set(place)) == len(set(packed)) == len(set(zip(place, packed, strict=True)))


@given(lane=lanes, window_patches=st.sampled_from([0, WINDOW]))
def test_the_four_patches_of_a_row_go_to_the_slot_of_the_row(
    lane: list[Grid], window_patches: int
) -> None:
    batch = pack(lane, window_patches)
    num_rows = sum(t * h * w // 4 for t, h, w in lane)
    slot = num_rows - 1  # `pack` gives slots from the highest down, in raster order
    rows = {
        tuple(patches.ravel()): s
        for patches, s in zip(batch.patches.reshape(-1, 4, 4), batch.slots, strict=True)
        if s != DROP
    }
    for item, grid in enumerate(lane):
        for patches in labelled_patches(grid, item).reshape(-1, 16):
            assert rows[tuple(patches)] == slot
            slot -= 1
    assert (batch.slots == DROP).sum() == len(batch.slots) - num_rows


def test_edge_windows_share_blocks() -> None:
    # 10 x 14 patches: one full window (64), right edge 8 x 6 = 48, bottom 2 x 8 = 16, corner
    # 2 x 6 = 12; the bottom fits beside the right edge, the corner does not: three blocks
    assert packed_patches((1, 10, 14), WINDOW) == 3 * WINDOW


def test_whole_windows_leave_no_padding() -> None:
    assert packed_patches((2, 16, 24), WINDOW) == 2 * 16 * 24


def test_without_windows_nothing_is_padded() -> None:
    assert packed_patches((1, 10, 14), 0) == 140
    assert pack([(1, 10, 14)], 0).window is None


@given(lane=lanes, window_patches=st.sampled_from([0, WINDOW]))
def test_each_patch_knows_the_size_of_its_frame(lane: list[Grid], window_patches: int) -> None:
    batch = pack(lane, window_patches)
    real = batch.segment >= 0
    item_of = batch.patches[real][:, 0]
    assert batch.sizes is not None
    np.testing.assert_array_equal(batch.sizes[real], [lane[i][1:] for i in item_of])


@given(lane=lanes, window_patches=st.sampled_from([0, WINDOW]), moving=st.integers(0, 3))
def test_second_frames_lie_where_their_first_ones_do(
    lane: list[Grid], window_patches: int, moving: int
) -> None:
    sizes = [t * h * w // 4 for t, h, w in lane]
    labels = [labelled_patches(grid, item) for item, grid in enumerate(lane)]
    features = [
        np.concatenate([x, 255 - x], axis=1) if i == moving else x for i, x in enumerate(labels)
    ]
    batch = pack_lane(
        features,
        lane,
        np.split(np.arange(sum(sizes), dtype=np.int32), np.cumsum(sizes)[:-1]),
        lane_patches=sum(packed_patches(g, window_patches) for g in lane) + WINDOW,
        patch_values=4,
        window_patches=window_patches,
        with_sizes=False,
        drop_slot=DROP,
    )
    assert batch.sizes is None
    if moving >= len(lane):
        assert batch.later is None
        return
    assert batch.later is not None
    real = batch.segment >= 0
    first, second = batch.patches[real], batch.later[real]
    is_moving = first[:, 0] == moving
    np.testing.assert_array_equal(second[is_moving], 255 - first[is_moving])
    np.testing.assert_array_equal(second[~is_moving], first[~is_moving])


@given(
    sizes=st.lists(st.integers(1, 8), max_size=20),
    num_lanes=st.integers(1, 4),
)
def test_every_item_gets_into_one_lane_and_no_lane_overflows(
    sizes: list[int], num_lanes: int
) -> None:
    rounds = spread(sizes, num_lanes, 8)
    assert sorted(i for lanes in rounds for lane in lanes for i in lane) == list(range(len(sizes)))
    for lanes in rounds:
        assert len(lanes) == num_lanes
        assert all(sum(sizes[i] for i in lane) <= 8 for lane in lanes)
    if len(rounds) == 1:  # to the emptiest lane: none is ahead of another by more than one item
        totals = [sum(sizes[i] for i in lane) for lane in rounds[0]]
        assert max(totals) - min(totals) <= max(sizes)


@given(lane=lanes, window_patches=st.sampled_from([0, WINDOW]))
def test_lanes_of_one_size_stay_what_they_are_behind_each_other(
    lane: list[Grid], window_patches: int
) -> None:
    one, other = (pack(grids, window_patches) for grids in (lane, lane[::-1]))
    both = join_lanes([one, other])
    for name in ("patches", "coords", "segment", "sizes", "slots"):
        parts = [getattr(one, name), getattr(other, name)]
        np.testing.assert_array_equal(getattr(both, name), np.concatenate(parts))
    assert both.num_patches == one.num_patches + other.num_patches
    assert join_lanes([one]) is one
