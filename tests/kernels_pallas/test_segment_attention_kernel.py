"""Segment and window attention in the TPU interpreter, against dense attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.segment_attention import kernel, windows
from tests.kernels_pallas.interpreter import interpret

FLOAT32_TOLERANCE = 2e-5
"""Sums of up to 256 products in another order."""
BFLOAT16_TOLERANCE = 2e-2
"""Weights and outputs are rounded to 8 bits; outputs are below 4."""


plan_segments = jax.jit(kernel.plan_segments, static_argnames=("tile", "block"))
attend = jax.jit(kernel.segment_attention, static_argnames=("tile", "block", "first_value_lane"))
attend_windows = jax.jit(windows.window_attention, static_argnames=("channels", "first_value_lane"))


def dense(q_HNC: np.ndarray, k_HNC: np.ndarray, v_HNC: np.ndarray, id_N: np.ndarray) -> np.ndarray:
    """Softmax over the whole lane, hidden where segments differ; zeros for padding."""
    q, k, v = (x.astype(np.float32) for x in (q_HNC, k_HNC, v_HNC))
    same_NN = (id_N[:, None] == id_N) & (id_N[:, None] >= 0)
    score = np.where(same_NN, np.einsum("hnc,hmc->hnm", q, k) * q.shape[-1] ** -0.5, -1e30)
    weight = np.where(same_NN, np.exp(score - score.max(axis=-1, keepdims=True)), 0.0)
    total = np.maximum(weight.sum(axis=-1, keepdims=True), 1e-30)
    return np.einsum("hnm,hmc->hnc", weight / total, v)


def heads(num: int, patches: int, channels: int, dtype: type = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(num, patches, channels)).astype(dtype) for _ in range(3)]


def flat(x_HNC: np.ndarray) -> np.ndarray:
    """Heads side by side."""
    return x_HNC.swapaxes(0, 1).reshape(x_HNC.shape[1], -1)


def check_segments(
    id_N: np.ndarray,
    *,
    num: int = 2,
    channels: int = 16,
    block: int = 128,
    dtype: type = np.float32,
) -> None:
    q, k, v = heads(num, len(id_N), channels, dtype)
    plan = plan_segments(id_N.astype(np.int32), tile=128, block=block)
    scaled = (q.astype(np.float32) * kernel.query_scale(channels)).astype(dtype)
    got = interpret(attend, flat(scaled), k, flat(v), plan, tile=128, block=block)
    tolerance = FLOAT32_TOLERANCE if dtype == np.float32 else BFLOAT16_TOLERANCE
    wanted = flat(dense(q, k, v, id_N))
    np.testing.assert_allclose(got.astype(np.float32), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block", [128, 256])
def test_images_of_one_patch_and_over_several_blocks(block):
    # One patch; 255 patches over two blocks; 100 up to inside the third; padding; one image more
    # behind a whole block of padding.
    sizes = [(0, 1), (1, 255), (2, 100), (-1, 156), (3, 256)]
    id_N = np.concatenate([np.full(size, i) for i, size in sizes])
    check_segments(id_N, block=block)


def test_images_of_half_a_block_are_attended_to_at_once():
    # 60 and 50 patches, padding, then 128: each tile sees one half of the block, and no other
    id_N = np.concatenate([np.full(60, 0), np.full(50, 1), np.full(18, -1), np.full(128, 2)])
    plan = plan_segments(id_N.astype(np.int32), tile=128, block=256)
    assert (int(plan.num_visits), plan.seen_V[:2].tolist()) == (2, [5, 6])
    check_segments(id_N, block=256)


@pytest.mark.parametrize(
    ("heads", "channels", "group"), [(16, 80, 8), (16, 72, 16), (2, 72, 2), (6, 64, 6), (4, 80, 4)]
)
def test_heads_of_a_group_fill_registers_or_are_all(heads, channels, group):
    assert kernel.heads_of_group(heads, channels) == group


@pytest.mark.parametrize(("num", "channels", "block"), [(16, 16, 128), (10, 24, 256)])
def test_groups_of_eight_heads_and_ten_heads_in_two_turns(num, channels, block):
    # two over two tiles, padding, and one that is alone in half a block
    id_N = np.repeat([0, 1, -1, 2], [100, 70, 214, 128])
    check_segments(id_N, num=num, channels=channels, block=block)


def test_heads_of_a_turn_divide_the_group():
    assert [kernel.heads_of_turn(n) for n in (1, 4, 8, 10, 16, 18)] == [1, 4, 8, 5, 8, 6]


@pytest.mark.parametrize("channels", [64, 72, 80])
def test_channels_of_the_encoders_in_bfloat16(channels):
    id_N = np.repeat([0, 1], [200, 56])
    check_segments(id_N, channels=channels, dtype=jnp.bfloat16)


def test_values_may_stand_behind_queries_and_keys():
    q, k, v = heads(2, 128, 64)
    sizes = {"tile": 128, "block": 128}
    plan = plan_segments(np.repeat([0, 1], 64).astype(np.int32), **sizes)
    packed = np.concatenate([flat(q), flat(k), flat(v)], axis=1)
    apart = interpret(attend, flat(q), k, flat(v), plan, **sizes)
    together = interpret(attend, flat(q), k, packed, plan, **sizes, first_value_lane=256)
    np.testing.assert_array_equal(together, apart)


def test_window_values_may_stand_behind_queries_and_keys():
    q, k, v = map(flat, heads(2, 128, 64))
    ids, packed = np.zeros(128, np.int32), np.concatenate([q, k, v], axis=1)
    apart = interpret(attend_windows, q, k, v, ids, channels=64)
    options = {"channels": 64, "first_value_lane": 256}
    together = interpret(attend_windows, q, k, packed, ids, **options)
    np.testing.assert_array_equal(together, apart)


def test_images_that_fill_blocks_are_visited_once_each_and_unmasked():
    plan = plan_segments(np.repeat(np.arange(4), 128), tile=128, block=128)
    assert plan.num_visits == 4
    np.testing.assert_array_equal(plan.tile_V[:4], plan.block_V[:4])
    np.testing.assert_array_equal(plan.seen_V[:4], 2)


def test_a_lane_of_padding_has_one_empty_visit_a_tile():
    plan = plan_segments(np.full(512, -1), tile=128, block=256)
    assert plan.num_visits == 4
    np.testing.assert_array_equal(plan.seen_V, 0)


def test_sixteen_images_cost_about_a_sixteenth():
    one = plan_segments(np.zeros(4096, np.int32), tile=256, block=512)
    many = plan_segments(np.arange(4096) // 256, tile=256, block=512)
    assert one.num_visits == 128
    assert many.num_visits == 16
    assert set(many.seen_V.tolist()) == {5, 6}  # half of a block each, and no other visit


@pytest.mark.parametrize(
    ("channels", "dtype"), [(80, jnp.float32), (64, jnp.bfloat16), (72, jnp.bfloat16)]
)
def test_ragged_windows_with_numbers_used_again(channels, dtype):
    # Runs of 64: one full window; 40 and 24; 10, 20 and padding; padding between windows.
    runs = [[(0, 64)], [(0, 40), (1, 24)], [(5, 10), (0, 20), (-1, 34)], [(1, 7), (-1, 50), (0, 7)]]
    window_N = np.concatenate([np.full(size, w) for run in runs for w, size in run])
    q, k, v = heads(2, 256, channels, dtype)
    scaled = (q.astype(np.float32) * kernel.query_scale(channels)).astype(dtype)
    ids = window_N.astype(np.int32)
    got = interpret(attend_windows, flat(scaled), flat(k), flat(v), ids, channels=channels)
    ids = np.where(window_N < 0, -1, np.arange(256) // 64 * 256 + window_N)
    wanted = dense(q, k, v, ids).swapaxes(0, 1)
    tolerance = FLOAT32_TOLERANCE if dtype == np.float32 else BFLOAT16_TOLERANCE
    real = window_N >= 0
    got_NHC = got.reshape(wanted.shape).astype(np.float32)
    np.testing.assert_allclose(got_NHC[real], wanted[real], atol=tolerance, rtol=tolerance)
    assert np.isfinite(got_NHC).all()


def test_lanes_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="cut 192 patches"):
        kernel.plan_segments(jnp.zeros(192, jnp.int32), tile=64, block=64)
    x = jnp.zeros((64, 32))
    with pytest.raises(ValueError, match="64 patches"):
        windows.window_attention(x, x, x, jnp.zeros(64, jnp.int32), channels=16)
