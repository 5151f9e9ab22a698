"""Videos are scored beside running sequences, in turns, and nobody waits for another for ever."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxmm.errors import PromptTooLong
from jaxmm.host.scoring import Scoring
from tests.jaxmm.host.device_model import tell_scores
from tests.jaxmm.host.prompts import MERGE, Picture, steps_of
from tests.jaxmm.host.test_scheduler import assert_nothing_is_held, build, sequence_of

ROWS = 4


def video(names, salt="", gone=lambda: False):
    """A scoring of one video, and the list that its scores go to."""
    scores = []
    return Scoring(
        [steps_of(names, ROWS)], salt, lambda all: scores.extend(all), is_gone=gone
    ), scores


def run(loop, plan):
    loop.device.run(plan)
    tell_scores(plan)


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


def test_videos_of_one_request_are_told_together_and_not_compared_with_each_other():
    loop, pool, cache, arena = build()
    scores = []
    scoring = Scoring([steps_of("ab", ROWS), steps_of("cde", 6)], "", scores.append)
    loop.scheduler.scorings.add(scoring)
    drain(loop)
    assert [[s[:, 0].tolist() for s in all] for all in scores] == [[[0, 1], [0, 1, 2]]]
    assert [s.shape for s in scores[0]] == [(2, ROWS), (3, 6)]
    assert_nothing_is_held(pool, cache, arena)


def encoded_by_plan(loop, owners):
    """For each plan the owners of what it encodes, by identity."""
    plans = []
    while (plan := loop.scheduler.plan()) is not None:
        plans.append("".join(owners[job.item.identity] for job in plan.encodes))
        run(loop, plan)
    return plans


def test_requests_take_turns_at_the_patches():
    """Five steps a plan, of two videos; then of one a plan, a short one behind a long one."""
    loop, *_ = build(
        num_rows=64, max_patches_per_step=5 * ROWS * MERGE, max_lane_patches=5 * ROWS * MERGE
    )
    first, second = video("abcdef")[0], video("uvwxyz")[0]
    owners = {s.identity: "1" for s in first.steps} | {s.identity: "2" for s in second.steps}
    for scoring in (first, second):
        loop.scheduler.scorings.add(scoring)
    assert encoded_by_plan(loop, owners) == ["12121", "21212", "12"]

    loop, *_ = build(num_rows=64, max_patches_per_step=ROWS * MERGE, max_lane_patches=ROWS * MERGE)
    (long, _), (short, told) = video("abcdef"), video("xy")
    owners = {s.identity: "l" for s in long.steps} | {s.identity: "s" for s in short.steps}
    for scoring in (long, short):
        loop.scheduler.scorings.add(scoring)
    assert encoded_by_plan(loop, owners) == list("lslsllll")
    assert len(told) == 1


@pytest.mark.parametrize("num_steps", [2, 3, 4])
def test_many_videos_in_an_arena_of_few_steps_all_end_and_the_oldest_first(num_steps):
    loop, pool, cache, arena = build(
        num_rows=num_steps * ROWS, max_patches_per_step=ROWS * MERGE, max_lane_patches=ROWS * MERGE
    )
    told = []
    for i in range(4):
        names = [f"{i}{step}" for step in range(6)]
        loop.scheduler.scorings.add(
            Scoring([steps_of(names, ROWS)], "", lambda _, i=i: told.append(i))
        )
    drain(loop, 400)
    assert sorted(told) == [0, 1, 2, 3]
    assert told[0] == 0
    assert len(loop.device.encoded) == 4 * 6  # none in vain
    assert_nothing_is_held(pool, cache, arena)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([3, 8]),
        st.lists(st.text("abc", min_size=2, max_size=4), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=4,
)


@given(requests=REQUESTS, num_rows=st.sampled_from([16, 20, 24]))
@example(requests=[(8, ["aa", "bac"]), (8, ["bc"])], num_rows=16)
@example(requests=[(8, ["bac"]), (3, ["abc"]), (8, ["bc"])], num_rows=16)
def test_while_a_video_waits_there_is_a_plan(requests, num_rows):
    """Also where all that a request can do is to take rows that are there, and where those are all
    the room that its next step would have: without a plan nobody would plan again."""
    loop, pool, cache, arena = build(
        num_rows=num_rows, max_patches_per_step=8 * MERGE, max_lane_patches=8 * MERGE
    )
    told = []
    for rows, videos in requests:
        steps = [steps_of(names, rows) for names in videos]
        loop.scheduler.scorings.add(Scoring(steps, "", told.append))
    drain(loop, 200)
    assert len(told) == len(requests)
    assert_nothing_is_held(pool, cache, arena)


def test_pictures_that_wait_and_videos_that_are_scored_take_turns():
    """Every picture, and every step of the video, needs all patches of a plan."""
    loop, *_ = build(num_rows=64, max_patches_per_step=ROWS * MERGE, max_lane_patches=ROWS * MERGE)
    scoring, scores = video("abcdef")
    loop.scheduler.scorings.add(scoring)
    owners = {step.identity: "v" for step in scoring.steps}
    for name in "pqr":
        sequence = sequence_of(Picture(name, ROWS), name=name, max_tokens=1)
        owners[sequence.prompt.items[0].identity] = "p"
        loop.scheduler.add(sequence)
    assert encoded_by_plan(loop, owners) == list("vpvpvpvvv")
    assert len(scores) == 1


def test_what_is_scored_counts_as_work_ahead_and_as_a_place_that_is_taken():
    loop, *_ = build(max_running=1, max_patches_per_step=2 * ROWS * MERGE)
    scheduler, sequence = loop.scheduler, sequence_of([1] * 5)
    before = scheduler.offer(sequence)
    assert (before.ahead, before.is_full) == (0, False)
    scheduler.scorings.add(Scoring([steps_of("abcd", ROWS)], "", lambda _: None, num_tokens=10))
    offer = scheduler.offer(sequence)
    assert (offer.ahead, offer.is_full) == (10 + 4 * ROWS, True)
    assert scheduler.offer_rows(steps_of("xy", ROWS), "") == offer
    run(loop, scheduler.plan())
    assert scheduler.offer(sequence).ahead == 10 + 2 * ROWS
    drain(loop)
    assert scheduler.offer(sequence) == before
    assert scheduler.expected_tokens(sequence) == 5 + 4


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
    with pytest.raises(PromptTooLong, match="8 rows; the arena has 6"):
        loop.scheduler.scorings.check(steps_of("ab", ROWS)[0])
