"""The reference of paged attention, on numbers worked out by hand."""

import numpy as np

from kernels_pallas.online_softmax import LOG2_E
from kernels_pallas.ragged_paged_attention import kernel_reference
from tests.kernels_pallas.steps import random_step


def test_a_token_averages_the_values_by_two_to_the_score():
    # One head of one channel; keys 0 and 1, values 10 and 40, query 1. With scale 1/log2(e) the
    # weights are 2^0 : 2^1, so the last token gets (1·10 + 2·40) / 3 = 30; the first sees itself.
    q = np.ones((2, 1, 1))
    k, v = np.array([[[0.0]], [[1.0]]]), np.array([[[10.0]], [[40.0]]])
    out = kernel_reference.attend_one(q, k, v, scale=1 / LOG2_E)
    np.testing.assert_allclose(out[:, 0, 0], [10.0, 30.0], rtol=1e-6)


def test_a_window_of_one_gives_each_token_its_own_value():
    v = np.arange(3.0).reshape(3, 1, 1)
    out = kernel_reference.attend_one(np.ones((3, 1, 1)), v, v, scale=1.0, window=1)
    np.testing.assert_allclose(out[:, 0, 0], [0.0, 1.0, 2.0])


def test_tokens_see_up_to_the_key_that_they_name_and_the_window_counts_from_themselves():
    # Values 1, 2, 4 behind each other, all keys alike. The first two tokens see two keys: 1.5 each,
    # the last one 7/3. In a window of one, the first sees itself and one behind, the others
    # themselves.
    v = np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    zeros, seen = np.zeros((3, 1, 1)), np.array([1, 1, 2], np.int32)
    for window, wanted in ((None, [1.5, 1.5, 7 / 3]), (1, [1.5, 2.0, 4.0])):
        out = kernel_reference.attend_one(zeros, zeros, v, scale=1.0, seen_T=seen, window=window)
        np.testing.assert_allclose(out[:, 0, 0], wanted, rtol=1e-6)


def test_a_cap_near_zero_makes_all_keys_equal():
    v = np.array([[[0.0]], [[100.0]]])
    out = kernel_reference.attend_one(np.ones((1, 1, 1)), v, v, scale=1.0, soft_cap=1e-6)
    np.testing.assert_allclose(out[0, 0, 0], 50.0, rtol=1e-5)


def test_query_heads_share_the_kv_head_of_their_group():
    # Four query heads over two KV heads: heads 0 and 1 read KV head 0, heads 2 and 3 KV head 1.
    v = np.array([[[1.0], [2.0]]])
    out = kernel_reference.attend_one(np.ones((1, 4, 1)), v, v, scale=1.0)
    np.testing.assert_allclose(out[0, :, 0], [1.0, 1.0, 2.0, 2.0])


def test_new_rows_land_behind_the_old_ones():
    # Five old tokens and three new ones on pages of four slots: slots 5, 6, 7, all on page 1.
    step = random_step([], [(5, 3)], num_tokens=3, page_size=4)
    _, pages = kernel_reference.ragged_paged_attention(
        step.q_THC, step.new_TKJ, step.pages_PKSJ, *step.tables, 1
    )
    page = pages[step.page_table_BQ[0, 1]]
    np.testing.assert_array_equal(page[:, 1:].swapaxes(0, 1), step.new_TKJ)
    np.testing.assert_array_equal(page[:, 0], step.pages_PKSJ[step.page_table_BQ[0, 1]][:, 0])
