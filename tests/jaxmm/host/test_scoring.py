"""Videos are scored beside running sequences, and neither waits for the other for ever."""

import dataclasses

import numpy as np
import pytest

from jaxmm.errors import PromptTooLong
from jaxmm.host.item import Modality
from jaxmm.host.scoring import Scoring
from tests.jaxmm.host.prompts import MERGE, Picture, make_item
from tests.jaxmm.host.test_scheduler import assert_nothing_is_held, build, sequence_of

ROWS = 4


def video(names, salt="", gone=lambda: False):
    """A scoring, and the list that its scores go to."""
    steps = tuple(
        dataclasses.replace(make_item(Picture(name, ROWS), ()), modality=Modality.VIDEO, step=i)
        for i, name in enumerate(names)
    )
    scores = []
    return Scoring(steps, salt, scores.append, gone), scores


def run(loop, plan):
    """Run a plan; each pair's score is whether the two steps differ in content."""
    rows = loop.device.rows
    loop.device.run(plan)
    for job in plan.scores:
        steps = job.pair.scoring.steps
        before, after = (
            [rows[slot] for slot in slots.tolist()] for slots in (job.before, job.after)
        )
        assert before == [(steps[job.pair.step - 1].identity, i) for i in range(ROWS)]
        assert after == [(steps[job.pair.step].identity, i) for i in range(ROWS)]
        job.pair.scoring.take(job.pair.step, np.full(ROWS, job.pair.step, np.float32))


def drain(loop, max_plans=50):
    for _ in range(max_plans):
        plan = loop.scheduler.plan()
        if plan is None:
            return
        run(loop, plan)
    raise AssertionError("it does not end")


def test_every_step_is_encoded_once_and_compared_with_the_one_before():
    loop, pool, cache, arena = build()
    scoring, scores = video("abcbc")
    loop.scheduler.scorings.add(scoring)
    assert loop.scheduler.has_work
    drain(loop)
    assert not loop.scheduler.has_work
    assert [s[:, 0].tolist() for s in scores] == [[0, 1, 2, 3, 4]]
    assert len(loop.device.encoded) == 3  # b and c are there when they come again
    assert_nothing_is_held(pool, cache, arena)


def test_a_video_larger_than_the_arena_is_scored_two_steps_at_a_time():
    loop, pool, cache, arena = build(num_rows=2 * ROWS)
    scoring, scores = video("abcdefg")
    loop.scheduler.scorings.add(scoring)
    drain(loop)
    assert len(scores) == 1
    assert len(loop.device.encoded) == 7
    assert_nothing_is_held(pool, cache, arena)


def test_patches_of_a_plan_are_not_exceeded():
    loop, *_ = build(max_patches_per_step=2 * ROWS * MERGE, max_lane_patches=2 * ROWS * MERGE)
    scoring, scores = video("abcde")
    loop.scheduler.scorings.add(scoring)
    plans = []
    while (plan := loop.scheduler.plan()) is not None:
        plans.append(len(plan.encodes))
        run(loop, plan)
    assert plans == [2, 2, 1]
    assert len(scores) == 1


def test_a_running_sequence_gets_the_rows_that_a_video_holds():
    """The picture needs the whole arena while the video holds a step of it."""
    loop, pool, cache, arena = build(num_rows=2 * ROWS, max_step_tokens=4, max_running=1)
    scoring, scores = video("abcd")
    sequence = sequence_of([1] * 4, Picture("p", 2 * ROWS), [1], max_tokens=1)
    loop.scheduler.add(sequence)
    run(loop, loop.scheduler.plan())  # text alone
    loop.scheduler.scorings.add(scoring)
    for _ in range(60):
        plan = loop.scheduler.plan()
        if plan is None:
            break
        run(loop, plan)
    assert sequence.num_sampled == 1
    assert len(scores) == 1
    loop.scheduler.append(sequence, 0)
    loop.scheduler.finish(sequence, "stop")
    assert_nothing_is_held(pool, cache, arena)


def test_a_video_that_nobody_waits_for_gives_its_rows_back():
    loop, pool, cache, arena = build(
        max_patches_per_step=ROWS * MERGE, max_lane_patches=ROWS * MERGE
    )
    gone = []
    scoring, scores = video("abcd", gone=lambda: bool(gone))
    loop.scheduler.scorings.add(scoring)
    for _ in range(2):
        run(loop, loop.scheduler.plan())
    gone.append(True)
    assert loop.scheduler.plan() is None
    assert not loop.scheduler.has_work
    assert scores == []
    assert_nothing_is_held(pool, cache, arena)


def test_a_video_that_is_aborted_while_a_plan_begins_gives_its_rows_back():
    """Another thread aborts: between any two questions the answer may change."""
    loop, pool, cache, arena = build(
        max_patches_per_step=ROWS * MERGE, max_lane_patches=ROWS * MERGE
    )
    answers = iter([False] * 3)
    scoring, _ = video("abcdefgh", gone=lambda: next(answers, True))
    loop.scheduler.scorings.add(scoring)
    while (plan := loop.scheduler.plan()) is not None:
        run(loop, plan)
    assert not loop.scheduler.has_work
    assert_nothing_is_held(pool, cache, arena)


def test_work_is_left_until_the_rows_of_the_last_plan_are_given_back():
    """Nothing may come after a video: its client was gone by then."""
    loop, pool, cache, arena = build()
    loop.scheduler.scorings.add(video("ab")[0])
    run(loop, loop.scheduler.plan())
    assert loop.scheduler.has_work
    assert loop.scheduler.plan() is None
    assert not loop.scheduler.has_work
    assert_nothing_is_held(pool, cache, arena)


def test_two_steps_that_the_arena_cannot_hold_are_refused_with_the_figures():
    loop, *_ = build(num_rows=6)
    scoring, _ = video("ab")
    with pytest.raises(PromptTooLong, match="8 rows; the arena has 6"):
        loop.scheduler.scorings.check(scoring.steps[0])
