"""The ladders: every size has its rung, and no rung is wasted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.errors import ConfigError, MediaTooLarge
from jaxmm.host.buckets import Buckets, patch_rungs, round_up, tile_rungs, token_rungs


def test_tile_rungs_hold_whole_tiles() -> None:
    # 2, 3, 4, 5, 6, 7, 8 and 10 tiles of 27 x 27 patches
    rungs = tile_rungs(729, 256, 7290, dense=True, align=64)
    assert rungs == (1472, 2240, 2944, 3648, 4416, 5120, 5888, 7296)
    assert [rung // 729 for rung in rungs] == [2, 3, 4, 5, 6, 7, 8, 10]
    assert tile_rungs(729, 3000, 3000, dense=False, align=256) == (3840,)  # five


def test_token_rungs_worked_out_by_hand() -> None:
    assert token_rungs(1, 16, dense=False) == (1, 2, 4, 8, 16)
    assert token_rungs(3, 100, dense=False) == (4, 8, 16, 32, 64, 128)
    assert token_rungs(1, 256, dense=True) == (
        *(1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256),
    )
    assert token_rungs(1, 80, dense=True) == (1, 2, 4, 8, 16, 32, 64, 96)
    assert token_rungs(128, 200, dense=True) == (128, 160, 192, 224)
    assert token_rungs(256, 340, dense=True) == (256, 288, 320, 352)
    assert token_rungs(480, 600, dense=True) == (512, 576, 640)


def test_patch_rungs_worked_out_by_hand() -> None:
    assert patch_rungs(256, 256, dense=True) == (256,)
    assert patch_rungs(256, 512, dense=False) == (256, 384, 512)
    assert patch_rungs(256, 512, dense=True) == (256, 320, 384, 448, 512)
    assert patch_rungs(200, 300, dense=True) == (256, 320)


@given(low=st.integers(1, 300), extra=st.integers(0, 4000), dense=st.booleans())
def test_token_rungs_ascend_from_low_to_high(low: int, extra: int, dense: bool) -> None:
    rungs = token_rungs(low, low + extra, dense=dense)
    assert list(rungs) == sorted(set(rungs))
    assert rungs[-1] >= low + extra
    assert rungs[0] < 2 * low  # the lowest rung is the first at or above low
    assert rungs[0] >= low
    # nothing above the rung that the highest size needs
    assert len(rungs) == 1 or rungs[-2] < low + extra


@given(low=st.integers(1, 1000), extra=st.integers(0, 20000), dense=st.booleans())
def test_patch_rungs_are_multiples_of_a_window(low: int, extra: int, dense: bool) -> None:
    rungs = patch_rungs(low, low + extra, dense=dense)
    assert list(rungs) == sorted(set(rungs))
    assert all(rung % 64 == 0 for rung in rungs)
    assert rungs[-1] >= low + extra
    assert rungs[-1] - (low + extra) < 64 or len(rungs) == 1


@given(high=st.integers(256, 20000), size=st.floats(0, 1), dense=st.booleans(), low=st.just(256))
def test_padding_of_a_lane_is_bounded(high: int, size: float, dense: bool, low: int) -> None:
    buckets = Buckets(tokens=(1,), patches=patch_rungs(low, high, dense=dense))
    patches = low + int(size * (high - low))
    rung = buckets.lane_patches(patches)
    # four rungs an octave lie at most a quarter apart, two at most a half; and a window's rounding
    assert patches <= rung <= patches * (1.25 if dense else 1.5) + 64


@given(rungs=st.sets(st.integers(1, 500), min_size=1), data=st.data())
def test_smallest_rung_that_holds_a_step(rungs: set[int], data: st.DataObject) -> None:
    buckets = Buckets(tokens=tuple(sorted(rungs)), patches=(64,))
    size = data.draw(st.integers(1, max(rungs)))
    assert buckets.step_tokens(size) == min(rung for rung in rungs if rung >= size)


def test_lane_above_the_top_rung_is_refused_with_both_figures() -> None:
    buckets = Buckets(tokens=(1,), patches=(64, 128))
    assert buckets.lane_patches(128) == 128
    with pytest.raises(MediaTooLarge, match="takes 129 patches in the encoder; the limit is 128"):
        buckets.lane_patches(129)


@pytest.mark.parametrize("tokens", [(), (2, 1), (1, 1)])
def test_rungs_that_do_not_ascend_are_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="do not ascend"):
        Buckets(tokens=tokens, patches=(64,))


def test_executables_are_one_a_rung_and_three_more() -> None:
    assert Buckets(tokens=(1, 2), patches=(64, 128, 192)).num_executables == 2 + 3 + 3


def test_round_up() -> None:
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
