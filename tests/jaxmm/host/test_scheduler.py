"""Plans are legal, fair and get on, whatever runs, ends or runs out."""

import dataclasses
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxmm.errors import ConfigError, MediaTooLarge, Overloaded, PromptTooLong, RequestError
from jaxmm.host.arena import Arena
from jaxmm.host.item import Span
from jaxmm.host.kept import Keep
from jaxmm.host.page_pool import PagePool
from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.scheduler import Scheduler, SchedulerConfig
from jaxmm.host.scoring import Scoring
from jaxmm.host.sequence import Sequence, Status
from jaxmm.host.waiting import FAIRNESS_WINDOW, MAX_OVERTAKEN
from jaxmm.request import SamplingParams
from tests.jaxmm.host.device_model import DeviceModel, Loop, reference_output
from tests.jaxmm.host.prompts import MERGE, Picture, make_item, make_prompt, steps_of

PAGE = 4
CONFIG = SchedulerConfig(
    max_step_tokens=16,
    max_patches_per_step=8 * MERGE,
    max_lane_patches=12 * MERGE,
    max_running=4,
    max_waiting=64,
    max_model_len=64,
    page_size=PAGE,
)


def build(num_pages=32, num_rows=32, page_rows=2, prefix_cache=True, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, PAGE, enabled=prefix_cache)
    arena = Arena(num_rows, page_rows)
    scheduler = Scheduler(config, pool, cache, arena)
    return Loop(scheduler, DeviceModel(PAGE, num_rows, config.max_running)), pool, cache, arena


def sequence_of(*parts, name="r", max_tokens=4, salt="", index=0):
    return Sequence(
        request_id=name,
        index=index,
        prompt=make_prompt(*parts),
        sampling=SamplingParams(max_tokens=max_tokens),
        salt=salt,
    )


def spans(plan):
    return [(chunk.sequence.request_id, tuple(chunk.span)) for chunk in plan.extends]


def assert_nothing_is_held(pool, cache, arena):
    cache.clear()
    arena.clear()
    assert (pool.num_free, arena.num_free) == (pool.num_pages, arena.num_rows)


def plan_now(loop):
    """Plan and run, without telling the scheduler any token."""
    plan = loop.scheduler.plan()
    loop.device.run(plan)
    return plan


# Steps


def test_a_prompt_is_cut_by_the_token_budget():
    loop, *_ = build()
    loop.scheduler.add(sequence_of([1] * 40))
    plans = [plan_now(loop) for _ in range(3)]
    assert [spans(plan) for plan in plans] == [
        [("r", (0, 16))],
        [("r", (16, 32))],
        [("r", (32, 40))],
    ]
    assert [plan.extends[0].samples for plan in plans] == [False, False, True]


def test_a_sequence_decodes_before_its_tokens_are_known():
    loop, *_ = build()
    sequence = sequence_of([1] * 5, max_tokens=3)
    loop.scheduler.add(sequence)
    indices = [[row.token_index for row in plan_now(loop).decodes] for _ in range(3)]
    assert indices == [[], [5], [6]]
    assert loop.scheduler.plan() is None
    assert (sequence.num_sampled, sequence.output_ids) == (3, [])


def test_a_sequence_with_a_grammar_decodes_once_its_token_is_known():
    loop, *_ = build()
    free, bound = (sequence_of([i] * 5, name=f"r{i}", max_tokens=8) for i in (1, 2))
    bound.matcher = object()  # nothing of it is asked here
    loop.scheduler.add(free)
    loop.scheduler.add(bound)
    assert not loop.scheduler.awaits_tokens
    loop.scheduler.plan()
    assert [row.sequence for row in loop.scheduler.plan().decodes] == [free]
    assert not loop.scheduler.awaits_tokens  # the other one can go on
    loop.scheduler.append(bound, 7)
    assert {row.sequence for row in loop.scheduler.plan().decodes} == {free, bound}
    loop.scheduler.append(free, 7)
    loop.scheduler.finish(free, "stop")
    assert loop.scheduler.awaits_tokens
    loop.scheduler.append(bound, 7)
    assert not loop.scheduler.awaits_tokens


def test_decodes_come_first_and_the_longest_of_them():
    loop, *_ = build(prefix_cache=False)
    for name, length in (("a", 3), ("b", 7), ("c", 5)):
        loop.scheduler.add(sequence_of([1] * length, name=name, max_tokens=8))
    plan_now(loop)
    loop.scheduler.add(sequence_of([2] * 30, name="d"))
    plan = plan_now(loop)
    assert [row.sequence.request_id for row in plan.decodes] == ["b", "c", "a"]
    assert spans(plan) == [("d", (0, 13))]


def test_an_idle_scheduler_plans_nothing():
    loop, *_ = build()
    assert (loop.scheduler.plan(), loop.scheduler.has_work) == (None, False)


# Prefixes


def test_a_second_prompt_reads_what_the_first_computed():
    loop, *_ = build()
    loop.scheduler.add(sequence_of([1] * 10, name="a", max_tokens=1))
    loop.drain(5)
    second = sequence_of([1] * 10 + [2], name="b", max_tokens=1)
    loop.scheduler.add(second)
    assert spans(loop.step()) == [("b", (8, 11))]
    assert second.num_cached == 8


def test_a_fully_cached_prompt_extends_its_last_page():
    loop, *_ = build()
    for name in ("a", "b"):
        loop.scheduler.add(sequence_of([1] * 8, name=name, max_tokens=1))
        loop.drain(5)
    assert spans(loop.plans[-1]) == [("b", (4, 8))]


def test_equal_prompts_in_flight_are_computed_once():
    loop, *_ = build()
    prompt = [1] * 20
    loop.scheduler.add(*(sequence_of(prompt, index=i, max_tokens=1) for i in range(3)))
    loop.drain(9)
    assert [spans(plan) for plan in loop.plans] == [
        [("r", (0, 16))],
        [("r", (16, 20))] * 3,
    ]


def test_prompts_that_share_little_do_not_wait_for_each_other():
    loop, *_ = build(max_step_tokens=40)
    loop.scheduler.add(sequence_of([1] * 4 + [2] * 8, name="a"))
    loop.scheduler.add(sequence_of([1] * 4 + [3] * 8, name="b"))
    assert spans(loop.step()) == [("a", (0, 12)), ("b", (0, 12))]


def test_pages_computed_twice_are_kept_once():
    loop, pool, *_ = build(max_step_tokens=40)
    a, b = (sequence_of([1] * 4 + [token] * 9, name=str(token)) for token in (2, 3))
    loop.scheduler.add(a, b)
    plan_now(loop)
    num_free = pool.num_free
    plan_now(loop)
    assert a.pages.array[0] == b.pages.array[0]
    assert pool.num_free == num_free + 1


def test_the_longest_cached_prefix_goes_first():
    loop, *_ = build()
    loop.scheduler.add(sequence_of([1] * 12, name="a", max_tokens=1))
    loop.drain(5)
    loop.scheduler.add(sequence_of([2] * 12, name="cold"))
    loop.scheduler.add(sequence_of([1] * 16, name="warm"))
    assert spans(loop.step()) == [("warm", (12, 16)), ("cold", (0, 12))]


def test_nobody_is_overtaken_for_ever():
    loop, *_ = build(max_running=1, num_pages=64)
    loop.scheduler.add(sequence_of([1] * 12, name="seed", max_tokens=1))
    loop.drain(5)
    cold = sequence_of([2] * 12, name="cold", max_tokens=1)
    loop.scheduler.add(cold)
    for i in range(2 * MAX_OVERTAKEN):
        loop.scheduler.add(sequence_of([1] * 12 + [3, i], name=f"warm{i}", max_tokens=1))
    loop.drain(99)
    first = [plan.extends[0].sequence.request_id for plan in loop.plans if plan.extends]
    assert first.index("cold") == 1 + MAX_OVERTAKEN
    assert FAIRNESS_WINDOW > MAX_OVERTAKEN


def test_cached_prompt_tokens_are_counted_once():
    loop, *_ = build()
    for name in ("a", "b"):
        loop.scheduler.add(sequence_of([1] * 10, name=name, max_tokens=1))
        loop.drain(5)
    counters = loop.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (20, 8)
    assert (counters.extend_tokens, counters.decode_tokens, counters.finished) == (12, 0, 2)


# Items


def test_an_item_is_encoded_when_its_first_token_is_extended():
    loop, *_ = build()
    loop.scheduler.add(sequence_of([1] * 16, Picture("a", 6), [2]))
    assert [len(plan_now(loop).encodes) for _ in range(3)] == [0, 1, 0]


def test_the_same_picture_twice_is_encoded_once():
    loop, *_ = build()
    a = Picture("a", 4)
    loop.scheduler.add(sequence_of(a, [1], a, name="r"), sequence_of([2], a, name="s"))
    assert len(loop.step().encodes) == 1


def test_a_picture_is_encoded_once_across_requests():
    loop, *_ = build()
    for i in range(10):
        loop.scheduler.add(sequence_of([i], Picture("a", 6), [i], name=str(i)))
        loop.drain(9)
    assert len(loop.device.encoded) == 1


def test_a_picture_in_the_prefix_is_not_encoded():
    loop, _, _, arena = build()
    parts = (Picture("a", 6), [1] * 4)
    loop.scheduler.add(sequence_of(*parts))
    loop.drain(9)
    arena.clear()
    loop.scheduler.add(sequence_of(*parts, [2]))
    loop.drain(9)
    assert len(loop.device.encoded) == 1


def test_a_picture_half_in_the_prefix_is_encoded_again():
    loop, _, _, arena = build()
    loop.scheduler.add(sequence_of([1] * 2, Picture("a", 6), [2]))
    loop.drain(9)
    arena.clear()
    loop.scheduler.add(sequence_of([1] * 2, Picture("a", 6)))
    plan = loop.step()
    assert spans(plan) == [("r", (4, 8))]
    assert len(plan.encodes) == 1


def test_the_patch_budget_cuts_a_chunk_before_an_item():
    loop, *_ = build()
    loop.scheduler.add(sequence_of(Picture("a", 5), [1], Picture("b", 4)))
    assert [spans(plan_now(loop)) for _ in range(2)] == [[("r", (0, 6))], [("r", (6, 10))]]


def test_an_item_beyond_the_patch_budget_is_encoded_alone():
    loop, *_ = build()
    loop.scheduler.add(sequence_of(Picture("a", 2), Picture("b", 12)))
    plans = [plan_now(loop) for _ in range(2)]
    assert [[job.item.num_rows for job in plan.encodes] for plan in plans] == [[2], [12]]


def test_more_items_than_the_arena_holds_go_through_it_in_turn():
    loop, pool, cache, arena = build(num_rows=8)
    loop.scheduler.add(sequence_of(*(Picture(str(i), 6) for i in range(5))))
    loop.drain(20)
    assert len(loop.device.encoded) == 5
    assert_nothing_is_held(pool, cache, arena)


def test_a_lease_ends_when_its_rows_are_passed():
    loop, *_ = build()
    sequence = sequence_of(Picture("a", 4), [1] * 20)
    loop.scheduler.add(sequence)
    plan_now(loop)
    assert sequence.leases.keys() == {0}
    plan_now(loop)
    assert not sequence.leases


def test_whole_items_are_never_cut():
    loop, *_ = build(whole_items=True)
    loop.scheduler.add(sequence_of([1] * 10, Picture("a", 8), [2], Picture("b", 8)))
    plans = [plan_now(loop) for _ in range(3)]
    assert [spans(p) for p in plans] == [[("r", (0, 10))], [("r", (10, 19))], [("r", (19, 27))]]


def test_a_whole_item_half_in_the_prefix_is_extended_whole():
    loop, *_ = build(whole_items=True)
    for _ in range(2):
        loop.scheduler.add(sequence_of([1] * 6, Picture("a", 6), max_tokens=1))
        loop.drain(9)
    assert spans(loop.plans[-1]) == [("r", (4, 12))]


def test_missing_features_are_asked_for_once_and_hold_up_nobody_else():
    loop, *_ = build()
    waits = sequence_of([1], Picture("a", 4, has_features=False), name="waits")
    loop.scheduler.add(waits)
    loop.scheduler.add(sequence_of([2], name="runs", max_tokens=1))
    plan = loop.step()
    assert plan.missing_features == ((waits, 0),)
    assert spans(plan) == [("runs", (0, 1))]
    loop.step()
    assert loop.scheduler.plan() is None
    item = make_item(Picture("a", 4), waits.prompt.items[0].offsets)
    loop.scheduler.provide_features(waits, 0, [item])
    assert spans(loop.step()) == [("waits", (0, 5))]


def test_the_completions_of_a_request_ask_for_features_once():
    loop, *_ = build()
    prompt = (Picture("a", 8, has_features=False), [1])
    loop.scheduler.add(*(sequence_of(*prompt, index=i, max_tokens=1) for i in range(2)))
    (question,) = loop.step().missing_features
    assert loop.scheduler.plan() is None
    item = make_item(Picture("a", 8), (Span(0, 8),))
    loop.scheduler.provide_features(*question, [item])
    loop.drain(9)
    assert len(loop.device.encoded) == 1


def test_a_known_picture_needs_no_features():
    loop, *_ = build()
    loop.scheduler.add(sequence_of(Picture("a", 6), max_tokens=1))
    loop.drain(5)
    loop.scheduler.add(sequence_of([1], Picture("a", 6, has_features=False), max_tokens=1))
    loop.drain(5)
    assert len(loop.device.encoded) == 1


# Running out


def test_the_newest_is_retracted_when_pages_run_out():
    loop, *_ = build(num_pages=6, prefix_cache=False, reserve_tokens=0)
    old = sequence_of([1] * 4, name="old", max_tokens=16)
    new = sequence_of([2] * 4, name="new", max_tokens=16)
    loop.scheduler.add(old)
    loop.scheduler.add(new)
    while loop.scheduler.counters.retracts == 0:
        plan_now(loop)
    assert (old.status, new.status) == (Status.RUNNING, Status.WAITING)
    assert len(new.pages) == 0


def test_pages_kept_for_running_sequences_hold_back_new_ones():
    loop, *_ = build(num_pages=6, reserve_tokens=16)
    for name in ("a", "b"):
        loop.scheduler.add(sequence_of([ord(name)] * 4, name=name, max_tokens=16))
    assert spans(loop.step()) == [("a", (0, 4))]


def test_the_newest_is_retracted_when_leases_hold_the_rows():
    loop, *_ = build(num_rows=18)
    loop.scheduler.add(sequence_of(Picture("b", 10), name="seed", max_tokens=1))
    loop.drain(5)
    loop.scheduler.add(sequence_of([1] * 3, Picture("a", 8), Picture("c", 10), name="old"))
    loop.scheduler.add(sequence_of([2], Picture("b", 10), name="new"))
    assert spans(loop.step()) == [("old", (0, 11)), ("new", (0, 5))]
    assert spans(loop.step()) == [("old", (11, 21))]
    assert loop.scheduler.counters.retracts == 1
    loop.drain(20)


def long_winded():
    """Prompts whose output is 12 tokens or more."""
    for token in range(1, 999):
        sequence = sequence_of([token] * 4, name=str(token), max_tokens=20)
        sequence.max_output = 20
        if len(reference_output(sequence)) >= 12:
            yield sequence


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_retracted_sequence_goes_on_as_if_nothing_had_happened(prefix_cache):
    loop, pool, cache, arena = build(num_pages=8, prefix_cache=prefix_cache, reserve_tokens=0)
    sequences = [sequence for sequence, _ in zip(long_winded(), range(3), strict=False)]
    for sequence in sequences:
        loop.scheduler.add(sequence)
    loop.drain(300)
    assert loop.scheduler.counters.retracts > 0
    assert [s.output_ids for s in sequences] == [reference_output(s) for s in sequences]
    assert_nothing_is_held(pool, cache, arena)


def test_the_pool_ends_a_sequence_that_outgrows_it():
    loop, *_ = build(num_pages=3)
    sequence = sequence_of([1] * 4, max_tokens=99)
    loop.scheduler.add(sequence)
    assert sequence.max_output == 8


# Refusals and ends


@pytest.mark.parametrize(
    ("parts", "changes", "error", "figures"),
    [
        (
            [[1] * 64],
            {},
            PromptTooLong,
            "64 tokens, 0 of them .*limit is 63",
        ),
        ([[1] * 12], {"num_pages": 3}, PromptTooLong, "12 tokens.*limit is 11.*num_pages"),
        ([Picture("a", 9)], {"num_rows": 8}, PromptTooLong, "10 rows.*has 8"),
        ([Picture("a", 13)], {}, MediaTooLarge, "52 patches; the limit is 48"),
        (
            [Picture("a", 12)],
            {"whole_items": True, "max_step_tokens": 14},
            PromptTooLong,
            "12 tokens.*limit is 11",
        ),
        ([], {}, RequestError, "no tokens"),
    ],
    ids=["model", "pages", "rows", "patches", "whole", "empty"],
)
def test_what_can_never_fit_is_refused_with_the_figures(parts, changes, error, figures):
    loop, *_ = build(**changes)
    with pytest.raises(error, match=figures):
        loop.scheduler.add(sequence_of(*parts))
    assert not loop.scheduler.has_work


def test_a_full_queue_takes_no_completion_of_a_request():
    loop, *_ = build(max_waiting=2)
    loop.scheduler.add(sequence_of([1], name="a"))
    with pytest.raises(Overloaded, match="1 requests are waiting; the limit is 2"):
        loop.scheduler.add(*(sequence_of([1], name="b", index=i) for i in range(2)))
    assert loop.scheduler.num_waiting == 1


def test_more_running_than_step_tokens_cannot_be_set():
    with pytest.raises(ConfigError, match="max_running=17"):
        dataclasses.replace(CONFIG, max_running=17)


def test_an_abort_gives_everything_back_at_once():
    loop, pool, cache, arena = build()
    parts = (Picture("a", 6), [1] * 30)
    loop.scheduler.add(*(sequence_of(*parts, name="r", index=i) for i in range(2)))
    plan_now(loop)
    loop.scheduler.abort("r")
    assert not loop.scheduler.has_work
    assert_nothing_is_held(pool, cache, arena)


def test_aborting_an_unknown_request_does_nothing():
    loop, *_ = build()
    loop.scheduler.abort("nobody")


def test_an_item_of_several_spans_is_encoded_once_and_its_rows_stay_until_the_last_of_them():
    loop, pool, cache, arena = build(num_rows=16, max_step_tokens=4)
    sequence = sequence_of([1, 1], Picture("a", 8, cuts=(3, 5)), [2] * 6, max_tokens=1)
    [item] = sequence.prompt.items
    assert item.offsets == (Span(2, 5), Span(6, 8), Span(9, 12))
    loop.scheduler.add(sequence)
    leased = []
    while sequence.status is not Status.FINISHED:
        loop.step()
        leased.append(bool(sequence.leases))
    assert leased == [True, True, True, False, False, False]  # tokens up to 4, 8, 12, 16, 18
    assert loop.device.encoded == [item.identity]
    assert sequence.output_ids == reference_output(sequence)
    assert_nothing_is_held(pool, cache, arena)


# Anything, in any order

PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(1, 2), min_size=1, max_size=9),
        st.builds(
            Picture,
            st.sampled_from("ab"),
            st.sampled_from([3, 8, 11]),
            st.booleans(),
            st.booleans(),
            st.sampled_from([(), (1,), (1, 2)]),
        ),
    ),
    min_size=1,
    max_size=4,
).filter(lambda parts: sum(map(len, parts)) <= 40)


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny pools, so that everything runs out; the device model checks every plan."""

    changes: ClassVar = {"reserve_tokens": 0}

    def __init__(self):
        super().__init__()
        self.loop, self.pool, self.cache, self.arena = build(
            num_pages=14,
            num_rows=16,
            max_waiting=999,
            max_pinned_pages=5,
            max_sessions=2,
            **self.changes,
        )
        self.scheduler = self.loop.scheduler
        self.sequences: list[Sequence] = []
        self.num_requests = 0
        self.keeps = [Keep(seconds=1.0) for _ in range(3)]
        self.told: list[int] = []  # of each scoring, how often it was told its scores
        self.left: set[int] = set()

    @rule(parts=PARTS, n=st.integers(1, 2), tokens=st.integers(1, 16), salt=st.sampled_from("xxy"))
    def add(self, parts, n, tokens, salt):
        name = str(self.num_requests)
        self.num_requests += 1
        sequences = [
            sequence_of(*parts, name=name, index=i, max_tokens=tokens, salt=salt) for i in range(n)
        ]
        self.scheduler.add(*sequences)
        self.sequences += sequences

    @rule(
        videos=st.lists(st.text("abc", min_size=2, max_size=5), min_size=1, max_size=2),
        num_rows=st.sampled_from([3, 8]),
        salt=st.sampled_from("xy"),
    )
    def score(self, videos, num_rows, salt):
        index = len(self.told)
        self.told.append(0)

        def on_scores(scores):
            self.told[index] += 1
            assert [s[:, 0].tolist() for s in scores] == [list(range(len(v))) for v in videos]

        self.scheduler.scorings.add(
            Scoring(
                [steps_of(names, num_rows) for names in videos],
                salt,
                on_scores,
                is_gone=lambda: index in self.left,
            )
        )

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def leave(self, data):
        """Nobody waits for some scores any more."""
        self.left.add(data.draw(st.integers(0, len(self.told) - 1)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.loop.step()

    @property
    def unfinished(self):
        return [s for s in self.sequences if s.status is not Status.FINISHED]

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        self.scheduler.abort(data.draw(st.sampled_from(self.unfinished)).request_id)

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 9e9]))
    def keep(self, data, seconds):
        """A finished sequence was a turn of one of three conversations."""
        finished = [s for s in self.sequences if s.status is Status.FINISHED]
        if finished:
            keep = self.keeps[data.draw(st.integers(0, 2))]
            keep.seconds = seconds
            self.scheduler.keep(data.draw(st.sampled_from(finished)), keep)

    @rule(index=st.integers(0, 2))
    def drop(self, index):
        self.scheduler.pins.drop(self.keeps[index])

    @rule()
    def expire(self):
        self.scheduler.pins.expire()

    @invariant()
    def conversations_keep_no_more_than_their_share(self):
        assert self.cache.num_pinned <= 5
        assert len(self.scheduler.pins) <= 2

    @precondition(lambda self: self.loop.unanswered)
    @rule()
    def provide(self):
        self.answer(*self.loop.unanswered.pop(0))

    def answer(self, sequence, index):
        item = sequence.prompt.items[index]
        picture = Picture("", item.num_rows)
        features = make_item(picture, item.offsets).features
        full = dataclasses.replace(item, features=features)
        self.scheduler.provide_features(sequence, index, [full])

    @invariant()
    def every_page_has_the_owners_that_it_counts(self):
        owners = [0] * self.pool.num_pages
        for sequence in self.sequences:
            pages = sequence.pages.array.tolist()
            assert len(set(pages)) == len(pages)
            assert not pages or sequence.status is Status.RUNNING
            for page in pages:
                owners[page] += 1
        extra = [self.pool.num_owners(p) - owners[p] for p in range(self.pool.num_pages)]
        assert set(extra) <= {0, 1}
        assert sum(extra) == self.cache.num_pages

    @invariant()
    def what_nobody_runs_with_can_be_had(self):
        held = {p for s in self.sequences for p in s.pages.array.tolist()}
        can_be_had = self.pool.num_free + self.cache.num_unlocked
        assert can_be_had == self.pool.num_pages - len(held)

    @invariant()
    def only_running_sequences_hold_slots_and_leases(self):
        running = [s for s in self.sequences if s.status is Status.RUNNING]
        assert len({s.slot for s in running}) == len(running) == self.scheduler.num_running
        idle = [s for s in self.sequences if s.status is not Status.RUNNING]
        assert all(s.slot == -1 and not s.leases and s.node is None for s in idle)

    def teardown(self):
        budget = 60 + 60 * len(self.sequences) + 20 * len(self.told)
        while self.loop.unanswered:
            self.provide()
        self.loop.drain(budget, self.answer)
        for sequence in self.sequences:
            expected = reference_output(sequence)
            if sequence.finish_reason == "abort":
                expected = expected[: len(sequence.output_ids)]
            assert sequence.output_ids == expected
        assert all(told == 1 or (i in self.left and told == 0) for i, told in enumerate(self.told))
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        self.scheduler.pins.clear()
        assert_nothing_is_held(self.pool, self.cache, self.arena)


class WholeItemsMachine(SchedulerMachine):
    changes: ClassVar = {"whole_items": True, "reserve_tokens": 0}


class NoPrefixCacheMachine(SchedulerMachine):
    changes: ClassVar = {"prefix_cache": False, "reserve_tokens": 8}


MACHINE = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = MACHINE
TestWholeItemsMachine = pytest.mark.slow(WholeItemsMachine.TestCase)
TestWholeItemsMachine.settings = MACHINE
TestNoPrefixCacheMachine = pytest.mark.slow(NoPrefixCacheMachine.TestCase)
TestNoPrefixCacheMachine.settings = MACHINE
