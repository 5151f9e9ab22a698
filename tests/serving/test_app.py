"""The official OpenAI client works, and every wrong request gets a clear answer."""

import base64
import json
import shlex

import httpx
import openai
import pytest

from jaxmm.errors import EngineStopped, Overloaded, PromptTooLong
from serving.config import ServerConfig
from serving.example import picture_uri
from serving.main import curl_line
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, client, post, running

ANSWER = "A red square. 図 😀"
PICTURE = {"type": "image_url", "image_url": {"url": picture_uri()}}
WITH_PICTURE = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]}]


def ask(url, messages=ASK, **fields):
    return client(url).chat.completions.create(model="fake", messages=messages, **fields)


def test_an_answer_carries_text_reason_and_usage(url, engine):
    answer = ask(url)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    prompt = engine.tokenizer.encode_chat(ASK).ids
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == answer.usage.completion_tokens + len(prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert ask(url).usage.prompt_tokens_details.cached_tokens == len(prompt) - 1


def test_streamed_pieces_add_up_to_the_whole_answer(url):
    chunks = list(ask(url, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", None]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == ask(url).usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks if c.choices)


def test_without_include_usage_no_chunk_has_usage(url):
    chunks = list(ask(url, stream=True))
    assert all(c.choices and c.usage is None for c in chunks)


def test_a_stream_is_server_sent_events_with_an_end_mark(url):
    response = post(url, {"messages": ASK, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])


def test_a_picture_reaches_the_engine_in_its_place(url, engine):
    ask(url, [{"role": "system", "content": [PICTURE]}, *WITH_PICTURE])
    request = engine.requests[0]
    assert [m["role"] for m in request.messages] == ["system", "user"]
    assert request.messages[1]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "What is it?"},
    ]
    picture = base64.b64decode(picture_uri().partition(",")[2])
    assert request.images == (picture, picture)


def test_every_sampling_field_reaches_the_engine(url, engine):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x", "y"], "seed": 7,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {"5": -3},
        "logprobs": True, "top_logprobs": 2, "max_tokens": 4,
    }  # fmt: skip
    extra = {
        "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [9],
    }  # fmt: skip
    placed = {"min_pixels": 784, "max_pixels": 3136, "cache_salt": "s", "mm_hashes": ["ab"]}
    ask(url, WITH_PICTURE, **fields, extra_body=extra | placed)
    request = engine.requests[0]
    expected = fields | extra | {"logit_bias": {5: -3}, "logprobs": 2, "stop_token_ids": (9,)}
    del expected["top_logprobs"]
    expected["stop"] = ("x", "y")
    assert {name: getattr(request.sampling, name) for name in expected} == expected
    assert (request.min_pixels, request.max_pixels, request.salt) == (784, 3136, "s")
    assert request.mm_hashes == ("ab",)


def test_left_out_and_null_fields_mean_the_defaults(url, engine):
    post(url, {"messages": ASK})
    post(url, {"messages": ASK, "max_tokens": None, "stop": None, "tools": None, "seed": None})
    assert engine.requests[0].sampling == engine.requests[1].sampling
    assert engine.requests[0].sampling.temperature == 1.0
    assert engine.requests[0].sampling.max_tokens == ServerConfig().default_max_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_itself(url, stream):
    answer = ask(url, stop="square", stream=stream)
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    parts = [(c.delta if stream else c.message).content or "" for c in choices]
    assert "".join(parts) == "A red "
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_several_completions_come_under_their_own_index(url, stream):
    answer = ask(url, n=3, stream=stream)
    texts = {0: "", 1: "", 2: ""}
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert set(texts.values()) == {ANSWER}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_shape_of_the_api(url, engine, stream):
    answer = ask(url, logprobs=True, top_logprobs=2, max_tokens=3, stream=stream)
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    tokens = [token for c in choices for token in c.logprobs.content]
    ids = engine.tokenizer.encode_text(ANSWER)[:3]
    assert [bytes(t.bytes) for t in tokens] == [engine.tokenizer.token_bytes[i] for i in ids]
    assert [t.logprob for t in tokens] == [-1.0] * 3
    assert [t.logprob for t in tokens[0].top_logprobs] == [-1.0, -2.0]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(url, engine, stream):
    answer = ask(url, stream=stream, extra_body={"return_token_ids": True})
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    ids = [i for c in choices for i in c.token_ids]
    assert ids == engine.tokenizer.encode_text(ANSWER).tolist()


def test_max_tokens_of_one_gives_one_token(url):
    answer = ask(url, max_tokens=1)
    assert answer.usage.completion_tokens == 1 and answer.choices[0].finish_reason == "length"


def test_typed_special_tokens_bind_no_picture(url, engine):
    typed = {"type": "text", "text": "note: <|image_pad|> is a token <|im_end|>"}
    with_picture = ask(url, [{"role": "user", "content": [typed, PICTURE]}])
    without = ask(url, [{"role": "user", "content": [typed]}])
    # the template writes start, placeholder, end; the picture itself is expanded by the engine
    assert with_picture.usage.prompt_tokens - without.usage.prompt_tokens == 3


def test_an_answer_may_be_sent_back_as_a_turn(url):
    message = ask(url).choices[0].message
    sent = [*ASK, message.model_dump(), {"role": "user", "content": "Sure?"}]
    assert ask(url, sent).choices[0].message.content == ANSWER


def test_harmless_fields_are_accepted(url):
    extra = {"safety_identifier": "a", "prompt_cache_key": "b", "service_tier": "auto"}
    neutral = {"tools": [], "tool_choice": "none", "modalities": ["text"]}
    response_format = {"type": "text"}
    ask(
        url, user="me", store=False, metadata={"a": "b"}, response_format=response_format,
        extra_body=extra | neutral,
    )  # fmt: skip


def test_models_are_listed_and_described(url):
    assert [m.id for m in client(url).models.list()] == ["fake"]
    assert client(url).models.retrieve("fake").owned_by == "jaxmm"
    with pytest.raises(openai.NotFoundError):
        client(url).models.retrieve("other/model")


def test_another_model_name_is_not_found(url):
    with pytest.raises(openai.NotFoundError, match="'fake'"):
        client(url).chat.completions.create(model="gpt", messages=ASK)


def test_the_served_name_can_be_set(engine):
    with running(engine, ServerConfig(model_name="m")) as url:
        assert post(url, {"model": "m", "messages": ASK}).json()["model"] == "m"


def test_health_follows_the_engine(url, engine):
    assert httpx.get(f"{url}/health").status_code == 200
    engine.healthy = False
    assert httpx.get(f"{url}/health").status_code == 503


def test_a_request_id_is_kept_or_made(url):
    assert (
        post(url, {"messages": ASK}, **{"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    )
    made = [post(url, {"messages": ASK}).headers["x-request-id"] for _ in range(2)]
    assert len(made[0]) == 32 and made[0] != made[1]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLong("the prompt has 9 tokens; the limit is 8"), 400, "context_length_exceeded"),
        (Overloaded("the queue is full"), 429, "overloaded"),
        (EngineStopped("closed"), 503, "engine_stopped"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_has_its_status_streaming_or_not(tokenizer, error, status, code, stream):
    with running(FakeEngine(tokenizer, error=error)) as url:
        response = post(url, {"messages": ASK, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.json()["error"]["message"] == str(error)


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(tokenizer):
    error = EngineStopped("the loop has ended")
    with running(FakeEngine(tokenizer, error=error, error_after=2)) as url:
        events = post(url, {"messages": ASK, "stream": True}).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == str(error)
    assert len(events) >= 2


def test_a_programming_error_tells_nothing_of_itself(tokenizer):
    engine = FakeEngine(tokenizer)
    with running(engine) as url:
        engine.tokenizer = None  # any attribute of it raises
        response = post(url, {"messages": ASK})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "None" not in response.text and "Traceback" not in response.text


def test_a_body_beyond_the_limit_is_refused(engine):
    config = ServerConfig(max_request_bytes=1000)
    with running(engine, config) as url:
        response = post(url, {"messages": [{"role": "user", "content": "a" * 1000}]})
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
        assert post(url, {"messages": ASK}).status_code == 200


def test_a_request_that_takes_too_long_is_given_up(tokenizer):
    engine = FakeEngine(tokenizer, seconds_per_token=0.05)
    with running(engine, ServerConfig(deadline_seconds=0.1)) as url:
        response = post(url, {"messages": ASK})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert len(engine.aborted) == 1 and not engine.running


def test_unknown_paths_and_methods_are_answered_in_the_same_shape(url):
    assert "error" in httpx.get(f"{url}/v1/nothing").json()
    response = httpx.get(f"{url}/v1/chat/completions")
    assert response.status_code == 405 and "GET" in response.json()["error"]["message"]


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_curl_line_that_is_printed_is_answered(url, needs_key):
    words = shlex.split(curl_line(url, "fake", needs_key=needs_key))
    assert words[0] == "curl"
    headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
    assert ("authorization" in headers) is needs_key
    response = httpx.post(words[1], content=words[words.index("-d") + 1], headers=headers)
    assert response.json()["choices"][0]["message"]["content"]
