"""Sampling parameters through the engine: seeds under load, stops, lengths, log-probabilities."""

from typing import Any

import numpy as np
import pytest

from jaxmm.engine import Engine
from tests.engines import ask, engine, logprobs, pages_left, picture, png, request, scheduling, turn

PICTURE = png(picture(112, 84, 61))
ASK = turn("<image>", "describe the picture")
RANDOM = {"temperature": 1.3, "top_p": 0.95, "max_tokens": 24}


@pytest.fixture
def on() -> Engine:
    return engine("qwen2_vl")


def one(on: Engine, **fields: Any) -> Any:
    return ask(on, request(ASK, [PICTURE], **fields))[0]


def noise(num: int) -> list[Any]:
    """Requests that draw without a seed, of many lengths."""
    return [request(turn("red " * (3 * i + 1)), temperature=1.5, max_tokens=20) for i in range(num)]


# Seeds


def test_seeded_request_gives_the_same_tokens_alone_and_under_load(on: Engine) -> None:
    alone = one(on, seed=11, **RANDOM)
    for position in (0, 3, 7):
        crowd = noise(7)
        crowd.insert(position, request(ASK, [PICTURE], seed=11, **RANDOM))
        assert ask(on, *crowd)[position].token_ids == alone.token_ids


def test_seeded_request_gives_the_same_tokens_after_a_retract(on: Engine) -> None:
    fields = {**RANDOM, "seed": 12, "max_tokens": 96, "repetition_penalty": 1.1}
    alone, before = one(on, **fields), on.scheduler.counters.retracts
    rival = request(turn("one red house " * 12), max_tokens=120)
    # 15 pages at most for the rival, 11 for the other
    with pages_left(on, 16), scheduling(on, reserve_tokens=0):
        assert ask(on, rival, request(ASK, [PICTURE], **fields))[1].token_ids == alone.token_ids
    assert on.scheduler.counters.retracts > before


def test_seeds_differ_and_no_seed_differs_each_time(on: Engine) -> None:
    seeded = {one(on, seed=seed, **RANDOM).token_ids for seed in (1, 2, -1, 1 << 62)}
    free = {one(on, **RANDOM).token_ids for _ in range(4)}
    assert len(seeded) == len(free) == 4


def test_completions_of_one_request_differ_and_are_those_of_the_seed(on: Engine) -> None:
    first, second = (one(on, n=4, seed=5, **RANDOM) for _ in range(2))
    tokens = [c.token_ids for c in first.completions]
    assert len(set(tokens)) == 4
    assert [c.token_ids for c in second.completions] == tokens
    assert [c.index for c in first.completions] == [0, 1, 2, 3]
    assert tokens[0] == one(on, seed=5, **RANDOM).token_ids
    assert first.usage.completion_tokens == sum(map(len, tokens))
    assert first.usage.prompt_tokens == one(on).usage.prompt_tokens


def test_draws_follow_the_models_own_distribution(on: Engine) -> None:
    [greedy] = ask(on, request(ASK, [PICTURE], max_tokens=1, logprobs=20))
    top = greedy.logprobs[0].top
    drawn = [
        c.token_ids[0]
        for result in ask(
            on, *(request(ASK, [PICTURE], temperature=1.0, seed=s, n=64, max_tokens=1)
                  for s in range(8))
        )
        for c in result.completions
    ]  # fmt: skip
    for token, logprob in top[:5]:
        p = np.exp(logprob)
        # 512 draws: four standard deviations are left to chance, and the seeds are fixed
        assert abs(drawn.count(token) / 512 - p) < 4 * (p * (1 - p) / 512) ** 0.5


# Greedy rules that log-probabilities make visible


def test_greedy_takes_the_most_likely_token_at_every_place(on: Engine) -> None:
    result = one(on, logprobs=20)
    for entry in result.logprobs:
        assert (entry.token_id, entry.logprob) == entry.top[0]
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert np.exp(values).sum() <= 1 + 1e-5


@pytest.mark.parametrize("num_top", [0, 1, 7, 20])
def test_logprobs_have_as_many_alternatives_as_asked(on: Engine, num_top: int) -> None:
    result = one(on, logprobs=num_top)
    assert [len(entry.top) for entry in result.logprobs] == [num_top] * 16
    np.testing.assert_allclose(logprobs(result), logprobs(one(on, logprobs=20)), atol=1e-4)


def test_without_logprobs_there_are_none_and_the_tokens_are_the_same(on: Engine) -> None:
    plain, asked = ask(
        on, request(ASK, [PICTURE], logprobs=None), request(ASK, [PICTURE], logprobs=5)
    )
    assert plain.logprobs is None
    assert plain.token_ids == asked.token_ids


def test_bias_bans_and_forces(on: Engine) -> None:
    first = one(on).token_ids[0]
    assert first not in one(on, logit_bias={first: -100.0}).token_ids
    assert set(one(on, logit_bias={77: 100.0}).token_ids) == {77}


def test_penalties_and_bias_of_one_request_leave_the_others_alone(on: Engine) -> None:
    plain = one(on)
    results = ask(
        on,
        request(ASK, [PICTURE], logit_bias={77: 100.0}),
        request(ASK, [PICTURE]),
        request(ASK, [PICTURE], frequency_penalty=2.0, repetition_penalty=2.0),
        request(ASK, [PICTURE], min_tokens=10, ignore_eos=False),
    )
    assert results[1].token_ids == plain.token_ids
    assert set(results[0].token_ids) == {77}
    assert one(on).token_ids == plain.token_ids  # nor those that come later in the same slot


def test_frequency_penalty_forbids_endless_repetition(on: Engine) -> None:
    forced = {"logit_bias": {77: 12.0}, "max_tokens": 40}
    repeated = one(on, **forced).token_ids.count(77)
    penalised = one(on, **forced, frequency_penalty=2.0).token_ids.count(77)
    assert penalised < repeated


# Where an answer ends


def test_max_tokens_ends_with_length(on: Engine) -> None:
    result = one(on, max_tokens=7)
    assert (len(result.token_ids), result.finish_reason) == (7, "length")


def test_stop_id_ends_and_is_not_in_the_text(on: Engine) -> None:
    plain = one(on)
    third = plain.token_ids[2]
    end = plain.token_ids.index(third)
    stopped = one(on, stop_token_ids=(third,))
    assert stopped.token_ids == plain.token_ids[: end + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == one(on, max_tokens=end).text if end else stopped.text == ""


def test_end_of_text_ends_unless_it_is_ignored(on: Engine) -> None:
    eos = on._parts.eos_ids[0]
    forced = {"logit_bias": {eos: 100.0}, "max_tokens": 5}
    ended = one(on, ignore_eos=False, **forced)
    assert (ended.token_ids, ended.finish_reason, ended.text) == ((eos,), "stop", "")
    assert one(on, ignore_eos=True, **forced).token_ids == (eos,) * 5


def test_min_tokens_hold_back_every_end_and_stop_id(on: Engine) -> None:
    eos = on._parts.eos_ids
    bias = dict.fromkeys([*eos, 77], 100.0)
    result = one(
        on, ignore_eos=False, stop_token_ids=(77,), min_tokens=6, max_tokens=20, logit_bias=bias
    )
    assert len(result.token_ids) == 7  # six free ones, then an end at once
    assert not set(result.token_ids[:6]) & {*eos, 77}
    assert result.finish_reason == "stop"


def test_stop_string_ends_before_itself_wherever_tokens_cut_it(on: Engine) -> None:
    plain = one(on, max_tokens=30)
    text = plain.text
    for start in (0, len(text) // 3, len(text) // 2):
        word = text[start : start + 4]
        stopped = one(on, max_tokens=30, stop=("never in any text", word))
        assert stopped.text == text[: text.index(word)]
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]


def test_length_of_the_model_ends_an_answer(on: Engine) -> None:
    [result] = ask(on, request(None, token_ids=[9] * 1000, max_tokens=500))
    assert (len(result.token_ids), result.finish_reason) == (24, "length")
