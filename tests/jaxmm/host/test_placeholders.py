"""Expansion, spans and cache ids against token-by-token rewrites."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.errors import PlaceholderError
from jaxmm.host.identity import SENTINEL_BASE, sentinels_for
from jaxmm.host.item import Item, Modality, Span
from jaxmm.host.mrope import item_positions
from jaxmm.host.placeholders import (
    build_prompt,
    check_slots,
    expand_slots,
    find_spans,
    fold_expanded,
    pad_expanded,
    prompt_of_spans,
    unfold,
)

PAD, START, END = 90, 91, 92
A, B = sentinels_for(b"a" * 32), sentinels_for(b"b" * 32)


def item(height: int, width: int, name: bytes = b"a") -> Item:
    return Item(
        modality=Modality.IMAGE,
        features=np.zeros((height * width, 1), np.uint8),
        embeddings=None,
        grid_thw=(1, height, width),
        num_rows=height * width // 4,
        identity=name * 32,
        sentinels=sentinels_for(name * 32),
    )


def positions(num_tokens: int, items: tuple[Item, ...]) -> tuple[np.ndarray, int]:
    return item_positions(num_tokens, items, merge_size=2)


prompts = st.lists(st.integers(0, 80) | st.builds(lambda n: (n,), st.integers(1, 30)), max_size=20)
"""Token ids, and items as 1-tuples of their rows."""


@given(prompts)
def test_expansion_equals_token_by_token_rewriting(parts: list) -> None:
    ids = np.array([PAD if isinstance(p, tuple) else p for p in parts], np.int64)
    rows = [p[0] for p in parts if isinstance(p, tuple)]
    expected: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, tuple):
            spans.append((Span(len(expected), len(expected) + part[0]),))
        expected += [PAD] * part[0] if isinstance(part, tuple) else [part]
    before = ids.copy()
    expanded, offsets = expand_slots(ids, np.flatnonzero(np.asarray(ids) == PAD), rows)
    assert expanded.dtype == np.int64
    assert expanded.tolist() == expected
    assert list(offsets) == spans
    assert np.array_equal(ids, before)


@given(prompts)
def test_prompt_names_every_row_once_and_in_order(parts: list) -> None:
    ids = np.array([PAD if isinstance(p, tuple) else p for p in parts], np.int64)
    items = [item(2, 2 * p[0], bytes([i])) for i, p in enumerate(parts) if isinstance(p, tuple)]
    prompt = build_prompt(ids, np.flatnonzero(np.asarray(ids) == PAD), items, positions)
    is_item = prompt.item_index >= 0
    assert np.array_equal(is_item, prompt.ids == PAD)
    assert np.array_equal(is_item, prompt.row_index >= 0)
    assert np.array_equal(prompt.cache_ids[~is_item], prompt.ids[~is_item])
    for index, placed in enumerate(prompt.items):
        here = prompt.item_index == index
        assert prompt.row_index[here].tolist() == list(range(placed.num_rows))
        assert prompt.cache_ids[here].tolist() == [
            placed.sentinels[row % 4] for row in range(placed.num_rows)
        ]
        (span,) = placed.offsets
        assert np.flatnonzero(here).tolist() == list(range(span.start, span.stop))
    arrays = (prompt.cache_ids, prompt.item_index, prompt.row_index, prompt.positions)
    assert all(a.shape[-1] == prompt.num_tokens for a in arrays)
    assert {a.dtype for a in arrays[1:]} == {np.dtype(np.int32)}


def test_prompt_by_hand() -> None:
    prompt = build_prompt(np.array([5, PAD, 6]), [1], [item(4, 6)], positions)
    assert prompt.ids.tolist() == [5, *[PAD] * 6, 6]
    assert prompt.cache_ids.tolist() == [5, *A, *A[:2], 6]
    assert prompt.item_index.tolist() == [-1, *[0] * 6, -1]
    assert prompt.row_index.tolist() == [-1, 0, 1, 2, 3, 4, 5, -1]
    assert prompt.positions[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert prompt.delta == 5 - 8
    assert prompt.items[0].offsets == (Span(1, 7),)


def test_same_item_twice_stands_at_two_places() -> None:
    prompt = build_prompt(np.array([PAD, PAD]), [0, 1], [item(2, 4), item(2, 4)], positions)
    assert prompt.cache_ids.tolist() == [*A[:2], *A[:2]]
    assert prompt.item_index.tolist() == [0, 0, 1, 1]


def test_text_alone_is_its_own_cache_key() -> None:
    prompt = build_prompt(np.array([3, 4, 5]), [], [], positions)
    assert prompt.cache_ids.tolist() == prompt.ids.tolist() == [3, 4, 5]
    assert prompt.cache_ids is not prompt.ids
    assert prompt.delta == 0


@pytest.mark.parametrize(
    ("slots", "rows", "message"),
    [
        ([1], [4, 4], "1 placeholders for 2 items"),
        ([1, 2], [4], "2 placeholders for 1 items"),
        ([2, 1], [4, 4], "ascend"),
        ([1, 1], [4, 4], "ascend"),
        ([-1], [4], "ascend"),
        ([3], [4], "ascend"),
        ([1], [0], "at least one"),
    ],
)
def test_slots_that_do_not_match_are_refused(slots: list, rows: list, message: str) -> None:
    with pytest.raises(PlaceholderError, match=message):
        expand_slots(np.array([5, PAD, PAD]), slots, rows)


def test_placeholder_outside_the_slots_is_refused_with_both_counts() -> None:
    ids = np.array([5, PAD, 6, PAD])
    check_slots(ids, [1, 3], PAD)
    check_slots(np.array([5, 6]), [], PAD)
    for slots in ([3], [1], [], [0, 1], [1, 2, 3]):
        with pytest.raises(PlaceholderError, match=f"2 placeholders .* for {len(slots)} items"):
            check_slots(ids, slots, PAD)


def test_every_span_of_an_item_starts_with_its_first_sentinel() -> None:
    ids = np.arange(9)
    cache_ids = pad_expanded(ids, [(Span(0, 2), Span(6, 9)), (Span(3, 5),)], [A, B])
    assert cache_ids.tolist() == [*A[:2], 2, *B[:2], 5, *A[:3]]
    assert ids.tolist() == list(range(9))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([(Span(0, 3),), (Span(2, 4),)], "overlap"),
        ([(Span(0, 3), Span(2, 4)), (Span(5, 6),)], "overlap"),
        ([(Span(2, 3),), (Span(2, 3),)], "overlap"),
        ([(Span(4, 5), Span(1, 2)), (Span(6, 7),)], "ascending"),
        ([(Span(2, 2),), (Span(3, 4),)], "empty"),
        ([(Span(-1, 2),), (Span(3, 4),)], "leaves"),
        ([(Span(0, 2),), (Span(7, 9),)], "leaves"),
        ([(Span(0, 2),)], "2 items for 1"),
    ],
)
def test_impossible_offsets_are_refused(offsets: list, message: str) -> None:
    with pytest.raises(PlaceholderError, match=message):
        pad_expanded(np.arange(8), offsets, [A, B])


@pytest.mark.parametrize(
    ("ids", "spans"),
    [
        ([], []),
        ([1, 2], []),
        ([START, 5, END], [(1, 2)]),
        ([1, START, 5, 6, END, 2, START, 7, END], [(2, 4), (7, 8)]),
        ([START, START, 5, END, START, 6, END, END, 3], [(1, 7)]),
        ([START, 5, END, START, START, 6, END, END], [(1, 2), (4, 7)]),
    ],
)
def test_markers_bound_the_outer_item(ids: list, spans: list) -> None:
    assert [tuple(s) for s in find_spans(np.array(ids, np.int64), START, END)] == spans


@pytest.mark.parametrize(
    "ids",
    [[START], [END], [END, START], [START, START, 5, END], [START, END], [START, 5, END, END]],
)
def test_markers_that_do_not_pair_are_refused(ids: list) -> None:
    with pytest.raises(PlaceholderError):
        find_spans(np.array(ids), START, END)


def test_an_expanded_prompt_is_folded_to_one_placeholder_an_item() -> None:
    """A picture, a video of two steps with text before each, and markers around text alone."""
    clip = PAD + 5
    step = [7, START, clip, clip, END]
    ids = [1, START, PAD, PAD, PAD, END, 2, START, *step, *step, END, START, 6, END, 3]
    folded, slots = fold_expanded(np.array(ids), START, END, PAD, clip)
    assert folded.tolist() == [1, START, PAD, END, 2, START, clip, END, START, 6, END, 3]
    assert slots.tolist() == [2, 6]
    same, unmoved = fold_expanded(folded, START, END, PAD, clip)
    assert (same.tolist(), unmoved.tolist()) == (folded.tolist(), slots.tolist())


def test_one_id_cannot_mark_both_ends() -> None:
    with pytest.raises(PlaceholderError):
        find_spans(np.array([START, 5, START]), START, START)


def test_expanded_prompt_is_bound_by_its_markers() -> None:
    ids = np.array([1, START, PAD, PAD, END, 2])
    spans = find_spans(ids, START, END)
    prompt = prompt_of_spans(ids, [(s,) for s in spans], [item(2, 4)], positions)
    assert prompt.cache_ids.tolist() == [1, START, *A[:2], END, 2]
    with pytest.raises(PlaceholderError, match="1 rows and 2 tokens"):
        prompt_of_spans(ids, [(s,) for s in spans], [item(2, 2)], positions)


def test_items_of_the_caller_are_not_changed() -> None:
    given_item = item(2, 4)
    prompt = build_prompt(np.array([PAD]), [0], [given_item], positions)
    assert given_item.offsets == ()
    assert prompt.items[0].features is given_item.features
    assert dataclasses.replace(prompt.items[0], offsets=()).sentinels == given_item.sentinels


def test_cache_ids_keep_sentinels_above_every_token() -> None:
    prompt = build_prompt(np.array([999_999, PAD]), [1], [item(2, 40)], positions)
    assert (prompt.cache_ids[1:] >= SENTINEL_BASE).all()
    assert prompt.ids.max() < SENTINEL_BASE


def test_each_step_of_a_video_gets_a_place_with_what_stands_around_it() -> None:
    ids = np.array([1, 2, 90, 3, 91, 4, 90])
    a, b, none = np.array([7, 8]), np.array([9]), np.zeros(0, np.int64)
    unfolded, slots = unfold(ids, [2, 4, 6], [None, [(a, b), (b, none)], None])
    assert unfolded.tolist() == [1, 2, 90, 3, 7, 8, 91, 9, 9, 91, 4, 90]
    assert slots.tolist() == [2, 6, 9, 11]
    assert ids.tolist() == [1, 2, 90, 3, 91, 4, 90]
    same, unmoved = unfold(ids, [2, 6], [None, None])
    assert same.tolist() == ids.tolist()
    assert unmoved.tolist() == [2, 6]
