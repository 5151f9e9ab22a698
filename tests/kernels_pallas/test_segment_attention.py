"""Segment and window attention: the reference by hand, the portable form by the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.segment_attention import portable, reference
from kernels_pallas.segment_attention.api import segment_attention, window_attention

# float32, sums of at most 64 terms in another order
ABSOLUTE = 2e-5

NUM = 64


def random_qkv(num: int = NUM, heads: int = 2, channels: int = 8) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(num)
    return tuple(random.standard_normal((num, heads, channels), np.float32) for _ in range(3))


def test_reference_on_numbers_worked_out_by_hand() -> None:
    # one channel, so the scale is 1; scores are q * k
    # patch 0 and 1 are one segment: query 0 is 0, weights 1/2, 1/2: (2 + 6) / 2 = 4
    #   query 1 is ln 3, keys 0 and 1: weights e^0 : e^(ln 3) = 1/4, 3/4: 2/4 + 18/4 = 5
    # patch 2 is padding: 0; patch 3 is alone: its own value, 7
    q, k, v = ([0.0, np.log(3.0), 5.0, 2.0], [0.0, 1.0, 1.0, 3.0], [2.0, 6.0, 100.0, 7.0])
    arrays = [jnp.array(x, jnp.float32).reshape(4, 1, 1) for x in (q, k, v)]
    segment_N = jnp.array([0, 0, -1, 1], jnp.int32)
    out = segment_attention(*arrays, segment_N, implementation="reference")
    np.testing.assert_allclose(out.ravel(), [4.0, 5.0, 0.0, 7.0], rtol=1e-6)


def test_reference_window_numbers_mean_something_only_inside_their_block() -> None:
    # blocks of two; the same number 0 in both blocks: two windows, each the mean of its values
    zeros = jnp.zeros((4, 1, 1), jnp.float32)
    v = jnp.array([1.0, 3.0, 10.0, 20.0], jnp.float32).reshape(4, 1, 1)
    window_N = jnp.zeros(4, jnp.int32)
    out = window_attention(zeros, zeros, v, window_N, implementation="reference", block=2)
    np.testing.assert_allclose(out.ravel(), [2.0, 2.0, 15.0, 15.0], rtol=1e-6)


@st.composite
def segments(draw: st.DrawFn) -> np.ndarray:
    """Segments of a lane, with padding inside and behind them."""
    segment_N = np.full(NUM, -1, np.int32)
    start = 0
    for segment in range(draw(st.integers(0, 5))):
        stop = min(NUM, start + draw(st.integers(1, 30)))
        segment_N[start:stop] = segment
        start = stop
    holes = draw(st.lists(st.integers(0, NUM - 1), max_size=20))
    segment_N[holes] = -1
    return segment_N


jit_portable = jax.jit(portable.segment_attention, static_argnames="block")
jit_window = jax.jit(portable.window_attention, static_argnames="block")
jit_reference = jax.jit(reference.segment_attention)
jit_reference_window = jax.jit(reference.window_attention, static_argnames="block")


@settings(deadline=None)
@given(segment_N=segments(), block=st.sampled_from([4, 8, 48]))
def test_portable_equals_reference(segment_N: np.ndarray, block: int) -> None:
    expected = jit_reference(*random_qkv(), segment_N)
    out = jit_portable(*random_qkv(), segment_N, block=block)
    np.testing.assert_allclose(out, expected, atol=ABSOLUTE, rtol=0)


@settings(deadline=None)
@given(window_N=st.lists(st.integers(-1, 3), min_size=NUM, max_size=NUM))
def test_portable_windows_equal_reference(window_N: list[int]) -> None:
    window = np.array(window_N, np.int32)
    expected = jit_reference_window(*random_qkv(), window, block=16)
    out = np.array(jit_window(*random_qkv(), window, block=16))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[window >= 0], expected[window >= 0], atol=ABSOLUTE, rtol=0)


def test_large_scores_stay_finite() -> None:
    q, k, v = random_qkv()
    segment_N = np.repeat(np.arange(2, dtype=np.int32), NUM // 2)
    out = jit_portable(1e4 * q, 1e4 * k, v, segment_N, block=8)
    assert np.isfinite(out).all()


def test_bfloat16_in_gives_bfloat16_out_with_float32_sums() -> None:
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in random_qkv())
    segment_N = jnp.zeros(NUM, jnp.int32)
    expected = segment_attention(
        *(x.astype(jnp.float32) for x in (q, k, v)), segment_N, implementation="reference"
    )
    out = jit_portable(q, k, v, segment_N, block=16)
    assert out.dtype == jnp.bfloat16
    # two roundings to 8 bits, of weights and of the result, at values below 1
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2**-7, rtol=0)


def test_lane_that_is_no_multiple_of_the_block_is_refused_for_windows() -> None:
    with pytest.raises(ValueError, match="64 patches is no multiple of block=48"):
        window_attention(
            *map(jnp.asarray, random_qkv()),
            jnp.zeros(NUM, jnp.int32),
            implementation="portable",
            block=48,
        )


def test_temporary_memory_grows_with_the_lane_not_with_its_square() -> None:
    def temporary_bytes(num: int) -> int:
        array = jax.ShapeDtypeStruct((num, 1, 8), jnp.float32)
        segment = jax.ShapeDtypeStruct((num,), jnp.int32)
        compiled = jax.jit(portable.segment_attention).lower(array, array, array, segment).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16384) < 6 * temporary_bytes(4096)


@pytest.mark.parametrize("sizes", [[1024], [700, 257, 40], [0]], ids=str)
def test_portable_takes_many_heads_some_at_a_time(sizes: list[int]) -> None:
    """At the block sizes that it chooses: sixteen heads have more scores than one step takes."""
    num, heads = 1024, 16
    segment_N = np.full(num, -1, np.int32)
    segment_N[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    arrays = [jnp.asarray(x) for x in random_qkv(num, heads)]
    assert portable._heads_of_step(heads, 512 * 512) < heads
    got, expected = (
        jax.jit(partial(segment_attention, implementation=implementation))(
            *arrays, jnp.asarray(segment_N)
        )
        for implementation in ("portable", "reference")
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=ABSOLUTE)
