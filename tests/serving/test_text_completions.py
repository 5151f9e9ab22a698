"""POST /v1/completions as the official client uses it."""

import openai
import pytest

from tests.serving.conftest import client, post_to

ANSWER = "A red square. \u56f3 \U0001f600"


def ask(url, prompt="It is", **fields):
    return client(url).completions.create(
        model="fake", prompt=prompt, **{"max_tokens": 99, **fields}
    )


def test_a_prompt_is_gone_on_from_as_it_stands(url, engine):
    answer = ask(url)
    assert (answer.object, answer.choices[0].text) == ("text_completion", ANSWER)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].logprobs is None
    assert engine.requests[0].text == "It is" and engine.requests[0].messages is None
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode_text("It is"))


def test_sixteen_tokens_are_the_default_of_this_api(url, engine):
    post_to(url, "/v1/completions", {"prompt": "a"})
    assert engine.requests[0].sampling.max_tokens == 16


def test_several_prompts_and_answers_count_through(url, engine):
    answer = ask(url, ["a", "b b", "c"], n=2)
    assert [c.index for c in answer.choices] == list(range(6))
    assert [r.text for r in engine.requests] == ["a", "b b", "c"]
    lengths = [len(engine.tokenizer.encode_text(t)) for t in ("a", "b b", "c")]
    assert answer.usage.prompt_tokens == sum(lengths)
    assert answer.usage.completion_tokens == 6 * len(engine.tokenizer.encode_text(ANSWER))


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_token_ids_are_prompts_too(url, engine, prompt):
    ask(url, prompt)
    given = [list(r.token_ids) for r in engine.requests]
    assert given == (prompt if isinstance(prompt[0], list) else [prompt])


def test_streamed_pieces_of_all_prompts_add_up(url):
    texts, usage = {}, None
    for chunk in ask(url, ["a", "b"], stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        usage = chunk.usage or usage
    assert texts == {0: ANSWER, 1: ANSWER}
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(url, engine, stream):
    ids = engine.tokenizer.encode_text("It is").tolist()
    for prompt in ("It is", ids):
        answer = ask(url, prompt, echo=True, stream=stream)
        chunks = answer if stream else [answer]
        assert "".join(c.choices[0].text for c in chunks) == "It is" + ANSWER


def test_logprobs_have_the_shape_of_this_api(url, engine):
    logprobs = ask(url, logprobs=2, max_tokens=3).choices[0].logprobs
    ids = engine.tokenizer.encode_text(ANSWER)[:3]
    names = [engine.tokenizer.token_bytes[i].decode(errors="replace") for i in ids]
    assert logprobs.tokens == names and logprobs.token_logprobs == [-1.0] * 3
    assert logprobs.text_offset == [0, len(names[0]), len(names[0] + names[1])]
    assert logprobs.top_logprobs[0][names[0]] == -1.0 and len(logprobs.top_logprobs[0]) == 2


def test_streamed_offsets_go_on(url):
    offsets = [
        offset
        for chunk in ask(url, logprobs=0, max_tokens=3, stream=True)
        for offset in (chunk.choices[0].logprobs.text_offset if chunk.choices[0].logprobs else ())
    ]
    assert offsets == ask(url, logprobs=0, max_tokens=3).choices[0].logprobs.text_offset


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"suffix": "end"}, "suffix is not supported"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"messages": []}, "unknown field messages"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(url, fields, problem):
    response = post_to(url, "/v1/completions", {"prompt": "a", **fields})
    assert response.status_code == 400 and problem in response.json()["error"]["message"]


def test_fields_at_their_neutral_values_are_accepted(url):
    body = {"prompt": "a", "suffix": None, "best_of": 1, "echo": False, "user": "me"}
    assert post_to(url, "/v1/completions", body).status_code == 200


def test_an_unknown_model_is_not_found(url):
    with pytest.raises(openai.NotFoundError):
        client(url).completions.create(model="gpt", prompt="a")
