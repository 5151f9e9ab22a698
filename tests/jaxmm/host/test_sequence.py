"""Any span of a sequence reads the same, however prompt, items and output lie in it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.host.arena import Arena, RowKey
from jaxmm.host.item import Span
from jaxmm.host.sequence import PageTable, Sequence
from jaxmm.request import SamplingParams
from tests.jaxmm.host.prompts import PLACEHOLDER, Picture, make_prompt

PARTS = ([1, 2], Picture("a", 3), [3], Picture("b", 2), Picture("a", 3), [4])
"""12 tokens: 1 2 a0 a1 a2 3 b0 b1 a0 a1 a2 4"""


def make_sequence(*parts, outputs=(), **fields):
    sequence = Sequence(
        request_id="r", prompt=make_prompt(*parts), sampling=SamplingParams(), **fields
    )
    sequence.output_ids.extend(outputs)
    return sequence


@pytest.fixture
def sequence():
    return make_sequence(*PARTS, outputs=[50, 51, 52])


SPANS = st.tuples(st.integers(0, 15), st.integers(0, 15)).map(lambda ab: Span(*sorted(ab)))


@given(SPANS)
def test_a_span_of_ids_is_a_part_of_all_ids(span):
    sequence = make_sequence(*PARTS, outputs=[50, 51, 52])
    p = PLACEHOLDER
    everything = [1, 2, p, p, p, 3, p, p, p, p, p, 4, 50, 51, 52]
    assert sequence.ids(span).tolist() == everything[span.start : span.stop]
    assert sequence.ids(span).dtype == np.int64


def test_cache_ids_hold_sentinels(sequence):
    sentinels = sequence.prompt.items[0].sentinels
    np.testing.assert_array_equal(sequence.cache_ids(Span(1, 5)), [2, *sentinels[:3]])


def test_an_unknown_id_is_not_made_up(sequence):
    with pytest.raises(AssertionError, match="before it was known"):
        sequence.ids(Span(14, 16))


@given(SPANS)
def test_positions_go_on_by_delta(span):
    prompt = dataclasses.replace(make_prompt(*PARTS), delta=-3)
    sequence = Sequence(request_id="r", prompt=prompt, sampling=SamplingParams())
    everything = np.array([[*range(12), 9, 10, 11]] * 3)
    np.testing.assert_array_equal(sequence.positions(span), everything[:, span.start : span.stop])


@given(SPANS)
def test_every_token_reads_its_own_row(span):
    sequence = make_sequence(*PARTS, outputs=[50, 51, 52])
    arena = Arena(16, 1)
    for index, item in enumerate(sequence.prompt.items):
        key = RowKey.of(item, "")
        sequence.leases[index] = arena.lookup(key) or arena.reserve(key)
    a, b = (sequence.leases[i].slots.tolist() for i in (0, 1))
    everything = [-1, -1, *a, -1, *b, *a, -1, -1, -1, -1]
    assert sequence.arena_rows(span).tolist() == everything[span.start : span.stop]


@pytest.mark.parametrize(("token", "start"), [(0, 0), (2, 2), (3, 2), (5, 5), (8, 8), (9, 8)])
def test_a_cut_moves_to_the_start_of_the_item_it_would_split(sequence, token, start):
    assert sequence.item_start(token) == start


@pytest.mark.parametrize(
    ("token", "items"), [(0, {0, 1, 2}), (5, {1, 2}), (7, {1, 2}), (11, set())]
)
def test_items_after_a_token_have_rows_left(sequence, token, items):
    assert sequence.items_after(token) == items


def test_a_page_table_grows_and_is_emptied():
    table = PageTable()
    table.extend(np.arange(10, dtype=np.int32))
    table.extend(np.arange(10, 40, dtype=np.int32))
    assert table.array.tolist() == list(range(40))
    assert table.clear().tolist() == list(range(40))
    assert len(table) == 0


def test_exchanged_pages_are_told_apart():
    table = PageTable()
    table.extend(np.array([1, 2, 3, 4], np.int32))
    gained, dropped = table.exchange(np.array([1, 7, 8], np.int32))
    assert (gained.tolist(), dropped.tolist()) == ([7, 8], [2, 3])
    assert table.array.tolist() == [1, 7, 8, 4]
