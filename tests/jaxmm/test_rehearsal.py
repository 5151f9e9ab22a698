"""Rehearsals: every small bucket is run before anybody asks, and nobody sees anything of it."""

import time

import pytest

from tests.checkpoints import Family
from tests.engines import LOGPROB_ATOL, ask, engine, make_engine, picture, request, turn
from tests.guards import guarded


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "deepseek_vl2_mla"])
def test_idle_engine_runs_every_small_bucket_and_answers_as_before(family: Family) -> None:
    asked = request(turn("<image>", "what is it"), [picture(90, 60)], max_tokens=4, logprobs=0)
    (expected,) = ask(engine(family), asked)
    on = make_engine(family, **{"buckets.rehearse": True})
    try:
        parts, buckets = on._parts, on.sizes.buckets
        free = parts.pool.num_free
        with guarded(on):
            deadline = time.monotonic() + 120
            while parts.rehearsal.seconds_left is not None:
                assert time.monotonic() < deadline and on.healthy
                time.sleep(0.05)
            (answer,) = ask(on, asked)
        assert all(parts.runner.was_run("language", rung) for rung in buckets.tokens)
        assert all(parts.runner.was_run("encode", rung) for rung in buckets.patches)
        assert parts.runner.was_run("score", 0) == (parts.model.video_token_id >= 0)
        assert on.ledger.num_recompiles == 0
        on.flush_caches()
        assert parts.pool.num_free == free
        assert answer.token_ids == expected.token_ids
        for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
            assert abs(ours.logprob - theirs.logprob) < LOGPROB_ATOL
    finally:
        on.close()


def test_request_comes_before_rehearsals_that_are_left() -> None:
    on = make_engine("qwen2_5_vl", **{"buckets.rehearse": True})
    try:
        rehearsal = on._parts.rehearsal
        (answer,) = ask(on, request(turn("red"), max_tokens=2))
        assert len(answer.token_ids) == 2
        assert rehearsal.seconds_left is not None, "some are left"
    finally:
        on.close()


def test_engine_that_is_told_not_to_rehearse_has_nothing_left() -> None:
    assert engine("qwen2_5_vl")._parts.rehearsal.seconds_left is None
