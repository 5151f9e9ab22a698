"""Which rows of a video are kept, and the prompt without the others."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.errors import RequestError
from jaxmm.host.identity import sentinel_array
from jaxmm.host.item import Modality
from jaxmm.host.mrope import item_positions
from jaxmm.host.placeholders import build_prompt
from jaxmm.host.prefix_key import marks_of
from jaxmm.host.pruning import (
    Pruning,
    check_rate,
    choose_rows,
    clip_of,
    clips_of,
    expected_rows,
    num_kept,
    prune,
    pruning_digest,
)
from tests.jaxmm.host.prompts import PLACEHOLDER, Picture, make_item

ROWS = 4
GRID = (1, 4, 4)
"""2 x 2 rows of 2 x 2 patches."""


def step(index, name, time=None):
    item = make_item(Picture(name, ROWS), ())
    return dataclasses.replace(item, modality=Modality.VIDEO, grid_thw=GRID, step=index, time=time)


def prompt_of(items):
    """A text token, the items in one run, three text tokens."""
    ids = [1, *[PLACEHOLDER] * len(items), 2, 3, 4]
    slots = range(1, 1 + len(items))
    return build_prompt(np.array(ids), list(slots), items, lambda n, i: item_positions(n, i, 2))


VIDEO = [step(i, name, i) for i, name in enumerate("abc")]
KEPT = tuple(np.array(rows, np.int32) for rows in ([0, 1, 2, 3], [], [1, 3]))


def test_the_rows_that_changed_most_are_kept_in_order():
    change = np.array([[0, 0, 0], [0.5, 0.1, 0.4], [0.2, 0.6, 0.3]], np.float32)
    # int(9 * 0.6) = 5: the first step, and of the others 0.6 and 0.5
    assert [rows.tolist() for rows in choose_rows(change, 0.4)] == [[0, 1, 2], [0], [1]]


def test_of_equal_rows_the_earlier_is_kept():
    change = np.full((3, 2), 0.25, np.float32)
    assert [rows.tolist() for rows in choose_rows(change, 0.5)] == [[0, 1], [0], []]


@given(
    st.integers(1, 9), st.integers(1, 9), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32)
)
def test_the_first_step_is_whole_and_the_count_is_known_before(num_steps, step_rows, rate, seed):
    change = np.random.default_rng(seed).random((num_steps, step_rows), np.float32)
    kept = choose_rows(change, rate)
    assert len(kept[0]) == step_rows
    assert all((np.diff(rows) > 0).all() for rows in kept)
    count = sum(map(len, kept))
    assert count == num_kept(num_steps, step_rows, rate)
    assert count == sum(map(len, expected_rows(num_steps, step_rows, rate)))


def test_what_is_left_keeps_its_place():
    whole = prompt_of(VIDEO)
    pruned = prune(whole, {0: Pruning(KEPT, b"rate")})
    # tokens: 1, four rows of a, rows 1 and 3 of c, then the text; time, height, width by hand
    assert pruned.ids.tolist() == [1, *[PLACEHOLDER] * 6, 2, 3, 4]
    assert pruned.item_index.tolist() == [-1, 0, 0, 0, 0, 2, 2, -1, -1, -1]
    assert pruned.row_index.tolist() == [-1, 0, 1, 2, 3, 1, 3, -1, -1, -1]
    assert pruned.positions.tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 4, 5, 6],
        [0, 1, 1, 2, 2, 1, 2, 4, 5, 6],
        [0, 1, 2, 1, 2, 2, 2, 4, 5, 6],
    ]
    assert [item.offsets for item in pruned.items] == [((1, 5),), (), ((5, 7),)]
    assert pruned.num_tokens + pruned.delta == whole.num_tokens + whole.delta == 7
    for item in pruned.items:
        for start, stop in item.offsets:
            expected = sentinel_array(item.sentinels, stop - start)
            assert pruned.cache_ids[start:stop].tolist() == expected.tolist()


def test_nothing_of_a_pruned_video_is_taken_for_another():
    """Not the whole video, nor one of another rate, with other rows, or that goes on."""
    whole = prompt_of(VIDEO)
    others = [whole]
    for steps, rate in ((VIDEO, 0.5), (VIDEO, 0.25), ([*VIDEO, step(3, "d", 3)], 0.5)):
        kept = KEPT + (np.zeros(0, np.int32),) * (len(steps) - 3)
        others.append(prune(prompt_of(steps), {0: Pruning(kept, pruning_digest(steps, rate))}))
    rows = (KEPT[0], KEPT[1], np.array([0, 3], np.int32))
    others.append(prune(whole, {0: Pruning(rows, pruning_digest(VIDEO, 0.5))}))
    first = {marks_of(prompt.items)[0].identity for prompt in others[:4]}
    assert len(first) == 4
    assert len({marks_of(prompt.items)[-1].identity for prompt in others}) == 5
    assert len({prompt.items[2].sentinels for prompt in others}) == 5
    assert {prompt.items[2].identity for prompt in others} == {VIDEO[2].identity}


def test_pictures_and_other_videos_are_left_as_they_are():
    picture = dataclasses.replace(make_item(Picture("p", ROWS), ()), grid_thw=GRID)
    items = [picture, *VIDEO, picture, *VIDEO[:2]]
    assert list(clips_of(items)) == [range(1, 4), range(5, 7)]
    assert [clip_of(items, i) for i in (0, 3, 6)] == [range(1), range(1, 4), range(5, 7)]
    whole = prompt_of(items)
    pruned = prune(whole, {1: Pruning(KEPT, b"rate")})
    for index in (0, 4, 5, 6):
        before, after = (
            [p.positions[:, slice(*span)].tolist() for span in p.items[index].offsets]
            for p in (whole, pruned)
        )
        assert before == after
        assert pruned.items[index].mark == whole.items[index].mark
    assert prune(whole, {}) is whole


def test_a_rate_is_a_number_from_0_to_below_1():
    for right in (0, 0.5, np.float32(0.5), np.float64(0.5)):
        assert check_rate(right) == right
    for wrong in (1, -0.1, float("nan"), "0.5", None, True):
        with pytest.raises(RequestError, match="video_pruning_rate"):
            check_rate(wrong)
