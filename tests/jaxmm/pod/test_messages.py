"""Messages: what is unpacked is what was packed, and little is sent of what is mostly zero."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from jaxmm.host.batch import StepLayout
from jaxmm.pod.messages import pack_arrays, pack_step, unpack_arrays, unpack_step

some_array = st.sampled_from(["uint8", "int32", "int64", "float32"]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
)


def joined(parts: Any) -> bytes:
    """What arrives of buffers that are sent one after the other."""
    return b"".join(bytes(part) for part in parts)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200), st.integers(0, 1 << 20))
def test_a_step_arrives_as_it_was(words: list[int], num_tokens: int) -> None:
    buffer = np.array(words, np.int32)
    bucket, arrived, masks = unpack_step(joined(pack_step(num_tokens, buffer)))
    assert (bucket, len(masks)) == (num_tokens, 0)
    np.testing.assert_array_equal(arrived, buffer)


@settings(deadline=None)
@given(st.integers(1, 5000), st.sets(st.integers(0, 4999), max_size=20))
def test_a_step_with_few_words_arrives_as_it_was(size: int, places: set[int]) -> None:
    buffer = np.zeros(size, np.int32)
    buffer[[p for p in places if p < size]] = -1
    np.testing.assert_array_equal(unpack_step(joined(pack_step(1, buffer)))[1], buffer)


def test_zeros_cost_a_bit_for_each_block() -> None:
    """128 sequences of up to 256 pages: 32 K words of page tables alone."""
    layout = StepLayout(64, 128, 256, 4752)
    buffer = np.zeros(layout.size, np.int32)
    num_blocks = -(-layout.size // 32)
    assert len(joined(pack_step(64, buffer))) == 8 + -(-num_blocks // 8)
    buffer[0] = 1
    assert len(joined(pack_step(64, buffer))) == 8 + -(-num_blocks // 8) + 4 * 32


@settings(deadline=None)
@given(st.lists(st.none() | some_array, max_size=6))
def test_arrays_arrive_as_they_were(given_: list[Any]) -> None:
    arrived = unpack_arrays(joined(pack_arrays(given_)))
    assert len(arrived) == len(given_)
    for one, other in zip(arrived, given_, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_arrays_that_are_no_single_piece_of_memory_arrive_too() -> None:
    whole = np.arange(24, dtype=np.int32).reshape(4, 6)
    [arrived] = unpack_arrays(joined(pack_arrays([whole[:, ::2]])))
    np.testing.assert_array_equal(arrived, whole[:, ::2])


def test_masks_arrive_with_the_step() -> None:
    masks = np.arange(12, dtype=np.uint32).reshape(3, 4)
    step = joined(pack_step(1, np.ones(70, np.int32), masks))
    _, buffer, arrived = unpack_step(step)
    assert buffer.tolist() == [1] * 70
    np.testing.assert_array_equal(arrived.reshape(3, 4), masks)
