"""Rows given in place of a picture: the same answer, the same caches, and errors of their own.

The rows are those that the engine's own encoder wrote.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxmm.api import generate
from jaxmm.engine import Engine
from jaxmm.errors import MediaError, RequestError
from jaxmm.host.arena import RowKey
from jaxmm.request import Embeddings
from tests.checkpoints import FAMILIES, Family
from tests.engines import (
    ask,
    assert_same,
    engine,
    on_loop,
    pages_left,
    picture,
    png,
    request,
    rows_left,
    scheduling,
    solo,
    turn,
)

WIDE, TALL = png(picture(200, 130, 1)), png(picture(90, 210, 2))
ASK = turn("describe", "<image>", "and the house", "<image>", "in one sentence")


def encoded(on: Engine, data: bytes) -> Embeddings:
    """The rows that this engine makes of a picture."""
    ask(on, request(turn("<image>"), [data], max_tokens=1))
    (item,) = on._parts.preparer.prepare_items([data])
    lease = on._parts.arena._leases[RowKey.of(item, "")]
    rows = on_loop(on, lambda: np.asarray(on._parts.runner._arena)[lease.slots])
    return Embeddings(rows=rows, grid_thw=item.grid_thw)


@pytest.fixture(params=FAMILIES)
def on(request: pytest.FixtureRequest) -> Engine:
    family: Family = request.param
    shared = engine(family)
    shared.flush_caches()
    return shared


def test_rows_of_a_picture_give_the_answer_of_the_picture(on: Engine) -> None:
    wide, tall = encoded(on, WIDE), encoded(on, TALL)
    expected = solo(on, ASK, [WIDE, TALL])
    counters = on.scheduler.counters
    before = counters.encoded_items
    assert_same(solo(on, ASK, [wide, tall]), expected)
    assert counters.encoded_items == before
    assert_same(solo(on, ASK, [WIDE, tall]), expected)  # beside a picture
    with scheduling(on, max_step_tokens=23):  # cut inside
        assert_same(solo(on, ASK, [wide, tall]), expected)


def test_rows_are_uploaded_once_and_not_at_all_behind_a_prefix(on: Engine) -> None:
    wide = encoded(on, WIDE)
    on.flush_caches()
    before = on.scheduler.counters.uploaded_items
    copies = [dataclasses.replace(wide, rows=wide.rows.copy()) for _ in range(4)]
    ask(on, *(request(turn(f"{i} and", "<image>", "what"), [copies[i]]) for i in range(4)))
    assert on.scheduler.counters.uploaded_items == before + 1
    messages = turn("<image>", "what is in the picture and how many cats are there")
    [first] = ask(on, request(messages, [wide]))
    on_loop(on, on._parts.arena.clear)
    [second] = ask(on, request(messages, [wide]))
    assert second.usage.cached_tokens >= second.usage.image_tokens > 0
    assert on.scheduler.counters.uploaded_items == before + 1
    assert_same(second, first)


def test_rows_never_pass_for_the_picture_nor_for_another_tenants(on: Engine) -> None:
    wide = encoded(on, WIDE)
    [seen] = ask(on, request(turn("what", "<image>"), [WIDE]))
    before = on.scheduler.counters.uploaded_items
    for salt in ("", "a", "b", "a"):
        [given] = ask(on, request(turn("what", "<image>"), [wide], salt=salt))
        assert given.token_ids == seen.token_ids
    assert on.scheduler.counters.uploaded_items == before + 3


def test_rows_survive_a_retract_and_an_eviction(on: Engine) -> None:
    wide, tall = encoded(on, WIDE), encoded(on, TALL)
    expected = solo(on, ASK, [WIDE, TALL], max_tokens=64)
    rival = request(turn("one red house " * 12), max_tokens=64)
    retracts = on.scheduler.counters.retracts
    with pages_left(on, 16), rows_left(on, 64), scheduling(on, reserve_tokens=0):
        result = ask(on, rival, request(ASK, [wide, tall], max_tokens=64))[1]
    assert on.scheduler.counters.retracts > retracts
    assert_same(result, expected)


def test_more_rows_than_one_upload_takes() -> None:
    on = engine("qwen2_vl")
    width = on._parts.model.text.width
    rows = np.random.default_rng(3).normal(size=(300, width)).astype(np.float32)
    given = Embeddings(rows=rows, grid_thw=(1, 30, 40))  # 15 * 20 rows
    whole = solo(on, turn("<image>", "what"), [given])
    key = RowKey.of(on._parts.preparer.prepare_items([given])[0], "")
    slots = on._parts.arena._leases[key].slots
    np.testing.assert_array_equal(
        on_loop(on, lambda: np.asarray(on._parts.runner._arena)[slots]), rows
    )
    with scheduling(on, max_step_tokens=37):
        assert_same(solo(on, turn("<image>", "what"), [given]), whole)


def test_generate_takes_rows_of_any_float_type() -> None:
    on = engine("qwen2_vl")
    wide = encoded(on, WIDE)
    half = np.asarray(wide.rows, ml_dtypes.bfloat16)
    answers = {
        generate(
            "what", dataclasses.replace(wide, rows=rows), engine=on, ignore_eos=True, max_tokens=9
        ).token_ids
        for rows in (half, half.astype(np.float32), half.astype(np.float64).tolist())
    }
    assert len(answers) == 1  # the same values are the same rows


def broken(rows: Any = None, grid: Any = (1, 4, 6)) -> Embeddings:
    width = engine("qwen2_vl")._parts.model.text.width
    return Embeddings(rows=np.zeros((6, width)) if rows is None else rows(width), grid_thw=grid)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": lambda w: np.zeros((6, w + 1))}, "this model takes"),
        ({"rows": lambda w: np.zeros((2, 3, w))}, "this model takes"),
        ({"rows": lambda w: np.zeros((6, w), np.int32)}, "dtype int32; send float32"),
        ({"rows": lambda w: np.zeros((6, w), complex)}, "dtype complex128"),
        ({"rows": lambda w: np.full((6, w), np.nan)}, "NaN or infinity"),
        ({"rows": lambda w: np.full((6, w), -np.inf)}, "NaN or infinity"),
        ({"rows": lambda w: np.full((6, w), 1e39)}, "NaN or infinity"),
        ({"rows": lambda w: np.full((6, w), -3e38)}, r"beyond 1e\+16"),
        ({"rows": lambda w: np.zeros((5, w))}, r"5 rows; the grid \[1, 4, 6\] makes 6"),
        ({"rows": lambda w: [[1.0], [1.0, 2.0]]}, "no array"),
        ({"rows": lambda w: "rows"}, "dtype <U4"),
        ({"grid": (1, 3, 8)}, "no grid of a picture"),
        ({"grid": (1, -4, -6)}, "no grid of a picture"),
        ({"grid": (1, 0, 6)}, "no grid of a picture"),
        ({"grid": (2, 2, 6)}, "no grid of a picture"),
        ({"grid": (4, 6)}, "no grid of a picture"),
        ({"grid": (1, 4.0, 6.0)}, "no grid of a picture"),
        ({"grid": None}, "no grid of a picture"),
    ],
)
def test_rows_that_cannot_be_are_refused_for_their_request_alone(given: Any, message: str) -> None:
    on = engine("qwen2_vl")
    messages = turn("<image>", "what", "<image>")
    with pytest.raises(MediaError, match=f"^image 2 of 2: .*{message}"):
        ask(on, request(messages, [WIDE, broken(**given)]))
    [fine] = ask(on, request(messages, [WIDE, broken()]))
    assert fine.finish_reason == "length"


def test_rows_without_a_place_are_refused() -> None:
    with pytest.raises(RequestError, match="places for 0 images"):
        ask(engine("qwen2_vl"), request(turn("what"), [broken()]))


def test_more_rows_than_the_arena_holds() -> None:
    given = broken(lambda w: np.zeros((2000, w)), (1, 80, 100))
    with pytest.raises(RequestError, match="limit"):
        ask(engine("qwen2_vl"), request(turn("<image>"), [given]))
