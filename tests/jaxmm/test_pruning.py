"""Pruned videos through the whole engine: against transformers, served in every way."""

import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmm.engine import Engine
from jaxmm.errors import RequestError
from jaxmm.host.pruning import choose_rows, num_kept
from jaxmm.request import Result
from tests.checkpoints import Family, checkpoint
from tests.engines import (
    SMALL,
    ask,
    assert_same,
    engine,
    logprobs,
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
from tests.guards import guarded
from tests.held import now_or_soon, quiet
from tests.pruned_reference import pruned_greedy

RELATIVE = 1e-3
"""Of log-probabilities: both sides sum float32 in orders of their own."""
VIDEO_FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
STEP_ROWS = 16
WHAT = turn("describe", "<video>", "in one sentence")
PICTURE = png(picture(90, 110, 2))


def clip(
    family: Family, count: int = 8, seed: int = 0, *, grid: tuple[int, int] = (8, 2)
) -> list[Image.Image]:
    """Frames of 8 x 2 rows, so wide that transformers goes on after them as the models do."""
    side = 32 if family.startswith("qwen3") else 28
    size = (side * grid[0], side * grid[1])
    still = np.asarray(picture(*size, seed))
    return [
        Image.fromarray(
            np.where(np.arange(size[0])[:, None] < 100, still, np.asarray(picture(*size, seed + i)))
        )
        for i in range(count)
    ]


@pytest.fixture(params=VIDEO_FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def encoded(on: Engine) -> int:
    return on.scheduler.counters.encoded_items


def question(family: Family, rate: float | None = 0.5, **fields: Any) -> Any:
    return request(WHAT, videos=(clip(family),), video_pruning_rate=rate, **fields)


def cold(on: Engine, family: Family, rate: float | None = 0.5, **fields: Any) -> Result:
    return solo(on, WHAT, videos=(clip(family),), video_pruning_rate=rate, **fields)


@pytest.mark.parametrize("rate", [0.3, 0.75])
def test_rows_and_answer_equal_those_of_transformers_with_the_rows_dropped(
    family: Family, rate: float
) -> None:
    expected, scores, kept = pruned_greedy(
        checkpoint(family), WHAT, clip(family), rate, 16, max_pixels=SMALL["media.max_pixels"]
    )
    on = engine(family)
    result = cold(on, family, rate)
    [pruning] = on._parts.known_prunings._table.values()
    assert [rows.tolist() for rows in pruning.kept] == [np.flatnonzero(k).tolist() for k in kept]
    assert len(pruning.kept[0]) == STEP_ROWS
    assert result.usage.video_tokens == kept.sum() == num_kept(4, STEP_ROWS, rate)
    assert list(result.token_ids) == expected
    chosen = scores[np.arange(16), expected]
    np.testing.assert_allclose(logprobs(result), chosen, rtol=RELATIVE, atol=RELATIVE)


def test_same_answer_however_it_is_served(family: Family) -> None:
    on = engine(family)
    expected = cold(on, family)
    [hit] = ask(on, question(family))
    assert hit.usage.cached_tokens == (hit.usage.prompt_tokens - 1) // 16 * 16
    assert_same(hit, expected)
    cache = on._parts.prefix_cache
    for num_last in (20, 40):  # tokens that are evicted, from the tail
        keep = (expected.usage.prompt_tokens - num_last) // 16
        on_loop(on, lambda pages=keep: cache.evict(cache.num_pages - pages))
        [result] = ask(on, question(family))
        assert result.usage.cached_tokens == keep * 16
        assert_same(result, expected)
    with scheduling(on, max_step_tokens=17):
        assert_same(cold(on, family), expected)
    with rows_left(on, 2 * STEP_ROWS):  # two steps at a time, encoded again for the answer
        assert_same(ask(on, question(family))[0], expected)


def test_same_answer_after_a_retract(family: Family) -> None:
    """The rival alone fills the pages, and together the two outgrow them whenever the video joins,
    for which it has the time of some 300 steps."""
    on = engine(family)
    words = turn("one red house " * 12)
    prompt, expected = solo(on, words, max_tokens=1), cold(on, family, max_tokens=200)
    pages = -(-(prompt.usage.prompt_tokens + 400) // 16)
    before = on.scheduler.counters.retracts
    with pages_left(on, pages), scheduling(on, reserve_tokens=0, max_step_tokens=19):
        asked = [request(words, max_tokens=400), question(family, max_tokens=200)]
        assert_same(ask(on, *asked)[1], expected)
    assert on.scheduler.counters.retracts > before


def test_same_answer_among_others_and_for_another_tenant(family: Family) -> None:
    on = engine(family)
    expected = cold(on, family)
    on.flush_caches()
    others = [
        request(turn("<image>", "and", "<video>"), [PICTURE], videos=(clip(family, 6, 3),)),
        question(family, 0.9),
        question(family, salt="b"),
        question(family, None),
    ]
    first, *rest = ask(on, question(family), *others)
    assert_same(first, expected)
    assert_same(rest[2], expected)
    assert_same(rest[3], cold(on, family, None))


def test_rate_of_zero_and_one_that_drops_nothing_are_no_pruning(family: Family) -> None:
    """1 - 1e-17 is 1; a rate that is any greater drops a row: int(64 * 0.999) is 63."""
    on = engine(family)
    expected = cold(on, family, None)
    assert num_kept(4, STEP_ROWS, 0.001) == 4 * STEP_ROWS - 1
    for rate in (0.0, 1e-17):
        assert_same(cold(on, family, rate), expected)
        assert not on._parts.known_prunings._table
    [hit] = ask(on, question(family, None))
    assert hit.usage.cached_tokens > 0
    assert_same(
        solo(on, WHAT, videos=(clip(family, 2),), video_pruning_rate=0.9),
        solo(on, WHAT, videos=(clip(family, 2),)),
    )  # one step is kept whole


def test_a_step_is_encoded_once_for_every_rate(family: Family) -> None:
    on = engine(family)
    on.flush_caches()
    before = encoded(on)
    ask(on, *(question(family, rate) for rate in (0.5, 0.25, 0.5, None)))
    ask(on, question(family, 0.75))
    assert encoded(on) == before + 4


def test_a_repeat_whose_prefix_is_cached_needs_no_encoder_and_no_pixels() -> None:
    on = engine("qwen3_vl")
    frames = tuple(png(frame) for frame in clip("qwen3_vl"))
    asked = [request(WHAT, videos=(frames,), video_pruning_rate=0.5) for _ in range(2)]
    on.flush_caches()
    [first] = ask(on, asked[0])
    on_loop(on, on._parts.arena.clear)
    before = encoded(on), on._parts.media_map.num_misses
    [second] = ask(on, asked[1])
    assert (encoded(on), on._parts.media_map.num_misses) == before
    assert_same(second, first)


def test_a_known_file_whose_rows_and_choice_are_forgotten_is_scored_again(family: Family) -> None:
    on = engine(family)
    frames = tuple(png(frame) for frame in clip(family))
    expected = solo(on, WHAT, videos=(frames,), video_pruning_rate=0.5)

    def forget() -> None:
        on._parts.prefix_cache.clear()
        on._parts.arena.clear()
        on._parts.known_prunings.clear()

    on_loop(on, forget)
    before = encoded(on)
    [result] = ask(on, request(WHAT, videos=(frames,), video_pruning_rate=0.5))
    assert encoded(on) == before + 4
    assert_same(result, expected)


def test_videos_that_differ_in_a_dropped_step_alone_are_not_confused(family: Family) -> None:
    """Equal tokens before the text, but the text stands further on behind the longer video.

    It does so behind a video that has more steps than rows across: 4 x 4 rows, 5 and 6 steps.
    """
    on = engine(family)
    frames = clip(family, 10, grid=(4, 4))
    still = [*frames, *frames[-2:]]  # the last step is the one before it again
    short, long, other = (
        {"videos": (video,), "video_pruning_rate": 1 - 2.0001 / (len(video) // 2)}
        for video in (frames, still, clip(family, 10, 50, grid=(4, 4)))
    )  # as many rows as two steps have
    answers = [solo(on, WHAT, **short), solo(on, WHAT, **long)]
    assert [answer.usage.video_tokens for answer in answers] == [2 * STEP_ROWS] * 2
    assert not np.allclose(logprobs(answers[0]), logprobs(answers[1]), atol=1e-5)
    on.flush_caches()
    cached = []
    for fields, alone in zip((short, long, short), (*answers, answers[0]), strict=True):
        [result] = ask(on, request(WHAT, **fields))
        assert_same(result, alone)
        cached.append(result.usage.cached_tokens)
    [unlike] = ask(on, request(WHAT, **other))
    assert cached[1] == unlike.usage.cached_tokens < cached[2]  # the text before the video alone


def test_a_callers_hash_never_lets_another_rate_have_the_rows(family: Family) -> None:
    on = engine(family)
    expected = {rate: cold(on, family, rate) for rate in (0.3, 0.6)}
    on.flush_caches()
    for rate in (0.3, 0.6, 0.3):
        [result] = ask(on, question(family, rate, mm_hashes=("abcd",)))
        assert_same(result, expected[rate])


def test_nothing_compiles_and_nothing_is_left(family: Family) -> None:
    on, rng = engine(family), np.random.default_rng(3)
    before = quiet(on)
    with guarded(on):
        for _ in range(3):
            questions = [
                request(
                    WHAT,
                    videos=(clip(family, int(rng.integers(1, 12)), int(rng.integers(99))),),
                    video_pruning_rate=float(rng.uniform(0, 0.99)),
                    max_tokens=2,
                )
                for _ in range(4)
            ]
            assert all(result.token_ids for result in ask(on, *questions))
    assert on.ledger.num_recompiles == 0
    assert now_or_soon(lambda: quiet(on), before) == before


def test_aborted_while_its_video_is_scored_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the fifth plan or so; the arena has room for two of its twelve steps."""
    on = engine("qwen2_vl")
    before, scorings = quiet(on), on.scheduler.scorings
    settle, events, met = scorings.settle, [], threading.Event()
    frames = [png(frame) for frame in clip("qwen2_vl", 24)]
    asked = request(WHAT, videos=(frames,), video_pruning_rate=0.5)

    def abort_when_begun() -> None:
        """On the loop's thread, as a plan begins."""
        if any(2 < scoring.next_step < 12 for scoring in scorings._turns):
            on.abort(asked.id)
            met.set()
        settle()

    monkeypatch.setattr(scorings, "settle", abort_when_begun)
    with rows_left(on, 2 * STEP_ROWS):
        on.submit(asked, events.append)
        assert met.wait(60)
        assert quiet(on)["has work"] is False
    monkeypatch.undo()
    assert now_or_soon(lambda: quiet(on), before) == before
    assert events == []


def test_rows_are_not_chosen_on_the_loops_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 2 ms for a video of 768 frames of 42 rows, 15 for one of 256."""
    on, threads = engine("qwen2_vl"), []

    def choose(scores: Any, rate: float) -> Any:
        threads.append(threading.current_thread())
        return choose_rows(scores, rate)

    monkeypatch.setattr("jaxmm.pruner.choose_rows", choose)
    cold(on, "qwen2_vl")
    assert threads and on._thread not in threads


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_two_videos_of_a_request_are_scored_together(family: Family) -> None:
    on = engine(family)
    both = (clip(family, 6, 3), clip(family, 8, 60))
    messages = turn("<video>", "and", "<video>", "in one sentence")
    result = solo(on, messages, videos=both, video_pruning_rate=0.5)
    kept = [[rows.tolist() for rows in p.kept] for p in on._parts.known_prunings._table.values()]
    for video, rows in zip(both, kept, strict=True):
        solo(on, WHAT, videos=(video,), video_pruning_rate=0.5)
        [alone] = on._parts.known_prunings._table.values()
        assert [step.tolist() for step in alone.kept] == rows
    assert result.usage.video_tokens == sum(len(step) for video in kept for step in video)


def refused(rate: Any) -> str:
    with pytest.raises(RequestError) as caught:
        ask(engine("qwen2_vl"), question("qwen2_vl", rate))
    return str(caught.value)


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan"), "0.5", True])
def test_a_rate_outside_its_range_is_refused(rate: Any) -> None:
    assert f"video_pruning_rate={rate!r} is not a number in [0, 1)" in refused(rate)


def test_a_prompt_too_long_is_refused_before_anything_is_encoded() -> None:
    on = engine("qwen2_vl")
    on.flush_caches()
    before = encoded(on)
    frames = clip("qwen2_vl", 192)  # 96 steps, that share their pixels: 3 rows each, half kept
    with pytest.raises(RequestError, match="144 of them from images and videos; the limit is"):
        ask(on, request(turn("<video>", "red " * 450), videos=(frames,), video_pruning_rate=0.5))
    assert encoded(on) == before
    words = turn("<video>", "red " * 400)
    with pytest.raises(RequestError, match="288 of them from images and videos; the limit is"):
        ask(on, request(words, videos=(frames,)))
    [result] = ask(on, request(words, videos=(frames,), video_pruning_rate=0.5, max_tokens=1))
    assert result.usage.video_tokens == 144
