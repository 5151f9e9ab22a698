"""Grammars through the engine: random weights say anything, and what comes out still matches."""

import json
import re
from typing import Any

import jsonschema
import pytest

import jaxmm
from jaxmm.engine import Engine
from jaxmm.errors import GrammarError
from tests.engines import ask, engine, pages_left, picture, png, request, scheduling, turn

PICTURE = png(picture(112, 84, 62))
ASK = turn("<image>", "describe the picture")
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "bright \u00fc blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 12},
        "seen": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["colour", "count", "seen", "note"],
    "additionalProperties": False,
}
RANDOM: dict[str, Any] = {
    "temperature": 1.5,
    "max_tokens": 300,
    "ignore_eos": False,
    "grammar": jaxmm.json_grammar(SCHEMA),
}


@pytest.fixture
def on() -> Engine:
    return engine("qwen2_vl")


def constrained(**fields: Any) -> Any:
    return request(ASK, [PICTURE], **{**RANDOM, **fields})


def check(completion: Any) -> bool:
    """Validate an answer; false for one that `max_tokens` cut."""
    if completion.finish_reason == "length":
        return False
    assert completion.finish_reason == "stop"
    jsonschema.validate(json.loads(completion.text), SCHEMA)
    return True


def test_answers_among_others_parse_and_validate(on: Engine) -> None:
    mixed = [request(turn("red " * i), temperature=1.0, max_tokens=40) for i in range(1, 5)]
    mixed += [constrained(seed=i, n=1 + i % 2) for i in range(6)]
    results = ask(on, *mixed)
    assert all(len(r.token_ids) == 40 for r in results[:4])
    complete = [check(c) for r in results[4:] for c in r.completions]
    assert sum(complete) >= 7  # of 9: few run into max_tokens


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(on: Engine) -> None:
    [alone] = ask(on, constrained(seed=7))
    crowd = [request(turn("blue " * i), temperature=1.0, max_tokens=30) for i in range(1, 5)]
    crowd += [constrained(seed=7), constrained(seed=8)]
    results = ask(on, *crowd)
    assert results[4].token_ids == alone.token_ids != results[5].token_ids


def test_requests_without_a_grammar_answer_as_ever_beside_one(on: Engine) -> None:
    plain = request(ASK, [PICTURE], max_tokens=24)
    [alone] = ask(on, plain)
    beside = ask(on, request(ASK, [PICTURE], max_tokens=24), constrained(seed=1))[0]
    assert beside.token_ids == alone.token_ids


def test_a_retracted_answer_goes_on_in_its_grammar(on: Engine) -> None:
    fields = {"seed": 12, "grammar": "start: /[a-z ]{80}/", "max_tokens": 96}
    [alone] = ask(on, constrained(**fields))
    before = on.scheduler.counters.retracts
    rival = request(turn("one red house " * 12), max_tokens=120)
    with pages_left(on, 16), scheduling(on, reserve_tokens=0):
        result = ask(on, rival, constrained(**fields))[1]
    assert on.scheduler.counters.retracts > before
    assert result.token_ids == alone.token_ids
    assert result.finish_reason == "stop" and re.fullmatch("[a-z ]{80}", result.text)


def test_an_answer_ends_where_nothing_can_follow_and_is_cut_where_tokens_end(on: Engine) -> None:
    fixed = constrained(grammar='start: "one two three"', ignore_eos=True)
    few = constrained(grammar='start: "one two three"', max_tokens=2)
    whole, cut = ask(on, fixed, few)
    assert (whole.text, whole.finish_reason) == ("one two three", "stop")
    assert cut.finish_reason == "length" and len(cut.token_ids) == 2
    assert "one two three".startswith(cut.text)
    exact = constrained(grammar='start: "one two three"', max_tokens=len(whole.token_ids))
    assert ask(on, exact)[0].finish_reason == "stop"


def test_a_stop_string_ends_an_answer_inside_its_grammar(on: Engine) -> None:
    [result] = ask(on, constrained(grammar='start: "one two three"', stop=("two",)))
    assert (result.text, result.finish_reason) == ("one ", "stop")


def test_min_tokens_holds_the_end_back_as_long_as_the_grammar_has_more(on: Engine) -> None:
    [result] = ask(on, constrained(grammar="start: /a{1,20}/", min_tokens=3, max_tokens=30))
    assert len(result.token_ids) >= 3 and set(result.text) == {"a"}
    [result] = ask(on, constrained(grammar='start: "a"', min_tokens=9, max_tokens=30))
    assert (result.text, result.finish_reason) == ("a", "stop")


def test_the_grammar_is_stronger_than_bias_and_penalties(on: Engine) -> None:
    [comma] = on.tokenizer.encode_plain(",")
    result = ask(on, constrained(seed=3, logit_bias={comma: 100.0}, repetition_penalty=1.5))[0]
    check(result.completions[0])


def test_logprobs_are_the_models_own(on: Engine) -> None:
    [result] = ask(on, constrained(grammar='start: "one"', logprobs=2))
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    assert all(-30 < entry.logprob < 0 for entry in result.logprobs)


@pytest.mark.parametrize("grammar", ["start: (", '{"no": 1}', ""])
def test_a_wrong_grammar_is_refused_and_costs_nobody_else(on: Engine, grammar: str) -> None:
    other = request(ASK, [PICTURE])
    [before] = ask(on, other)
    with pytest.raises(GrammarError):
        ask(on, constrained(grammar=grammar))
    assert ask(on, request(ASK, [PICTURE]))[0].token_ids == before.token_ids


def test_a_grammar_that_no_token_goes_on_with_ends_its_request_alone(on: Engine) -> None:
    """`b` must follow, and the request holds it back."""
    with_b = [
        i for i, raw in enumerate(on.tokenizer.token_bytes) if raw[:1] == b"b" or b"ab" in raw
    ]
    stuck = constrained(grammar='start: "a" "b!"', stop_token_ids=with_b[:16], min_tokens=5)
    with pytest.raises(GrammarError):
        ask(on, stuck, request(ASK, [PICTURE]))
    assert ask(on, request(ASK, [PICTURE]))[0].finish_reason == "length"
