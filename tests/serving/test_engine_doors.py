"""The real engine behind every door: one answer, the promised forms, plans that come true."""

import base64
import json

import httpx
import jsonschema
import pytest

from serving.config import ServerConfig
from tests.engines import LOGPROB_ATOL, engine, picture, png
from tests.serving.conftest import client, post, post_to, running

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock"}},
]


def image_part(width, height, seed):
    data = base64.b64encode(png(picture(width, height, seed))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def asking(part, text="What is it?"):
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def url():
    on = engine("qwen2_vl")
    with running(on, ServerConfig(engine=on.config)) as base:
        yield base


def test_every_door_gives_the_same_answer(url):
    part = image_part(112, 84, 71)
    messages = asking(part)
    ids = post_to(url, "/tokenize", {"messages": messages}).json()["token_ids"]
    common = {"max_tokens": 8, "ignore_eos": True}
    asked = {**common, "temperature": 0, "logprobs": True, "return_token_ids": True}
    chat = post(url, {**asked, "messages": messages}).json()["choices"][0]
    native = {**common, "logprobs": 0}
    images = [part["image_url"]["url"]]
    by_ids = post_to(url, "/generate", {**native, "token_ids": ids, "images": images})
    by_chat = post_to(url, "/generate", {**native, "messages": messages})
    expected = [entry["logprob"] for entry in chat["logprobs"]["content"]]
    for answer in (by_ids, by_chat):
        [completion] = answer.json()["completions"]
        assert completion["token_ids"] == chat["token_ids"]
        got = [entry["logprob"] for entry in completion["logprobs"]]
        assert got == pytest.approx(expected, abs=LOGPROB_ATOL)


def test_a_raw_prompt_is_the_same_as_text_and_as_ids(url):
    ids = post_to(url, "/tokenize", {"text": "one red house"}).json()["token_ids"]
    answers = [
        post_to(url, "/v1/completions", {"prompt": p, "temperature": 0, "return_token_ids": True})
        for p in ("one red house", ids)
    ]
    first, second = (a.json()["choices"][0]["token_ids"] for a in answers)
    assert first == second


def test_json_of_a_schema_comes_in_every_choice(url):
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    body = {"messages": asking(image_part(56, 56, 3)), "response_format": form, "n": 3, "seed": 4}
    for choice in post(url, {**body, "max_tokens": 200}).json()["choices"]:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    cut = post(url, {**body, "max_tokens": 2}).json()["choices"][0]
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_call_is_made_whatever_the_weights(url, choice, stream):
    for seed in range(4):
        answer = client(url).chat.completions.create(
            model=engine("qwen2_vl").model_name,
            messages=[{"role": "user", "content": "a"}],
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            seed=seed,
            stream=stream,
        )
        choices = [c.choices[0] for c in answer] if stream else answer.choices
        pieces = [p for c in choices for p in (c.delta if stream else c.message).tool_calls or ()]
        assert choices[-1].finish_reason in ("tool_calls", "length")
        if choices[-1].finish_reason == "tool_calls":
            name = next(p.function.name for p in pieces if p.function.name)
            arguments = json.loads("".join(p.function.arguments for p in pieces))
            assert name == "weather" or choice == "required"
            jsonschema.validate(arguments, CITY if name == "weather" else {"maxProperties": 0})


def test_a_schema_that_cannot_be_followed_says_why(url):
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"not": {}}}}
    error = post(url, {"messages": asking(image_part(56, 56, 3)), "response_format": form}).json()
    assert error["error"]["code"] == "invalid_grammar" and "not" in error["error"]["message"]


def test_a_plan_comes_true(url):
    post_to(url, "/flush_cache", b"")
    body = {"messages": asking(image_part(112, 84, 72), "word " * 40), "max_tokens": 4}
    plan = post_to(url, "/v1/plan", body).json()
    [image] = plan["images"]
    assert (image["tokens"], image["cached"], image["grid_thw"]) == (12, "no", [1, 6, 8])
    assert image["lane_patches"] >= 48 and 0 <= image["padding"] < 1
    usage = post(url, body).json()["usage"]
    assert (plan["prompt_tokens"], plan["cached_tokens"]) == (usage["prompt_tokens"], 0)
    assert sum(plan["step_tokens"]) >= plan["prompt_tokens"]
    size = engine("qwen2_vl").sizes.page_size
    assert plan["prompt_pages"] == plan["prompt_tokens"] // size + 1
    again = post_to(url, "/v1/plan", body).json()
    assert again["images"][0]["cached"] == "prefix" and again["images"][0]["lane_patches"] == 0
    assert (
        again["cached_tokens"]
        == post(url, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    other = post_to(url, "/v1/plan", {**body, "messages": asking(image_part(112, 84, 72), "b")})
    other_salt = post_to(url, "/v1/plan", {**body, "cache_salt": "s"}).json()
    assert other.json()["images"][0]["cached"] == "rows"
    assert (other_salt["cached_tokens"], other_salt["images"][0]["cached"]) == (0, "no")
    assert again["free_pages"] == engine("qwen2_vl").stats().total_pages


def test_a_plan_of_what_never_fits_is_refused_like_the_request(url):
    body = {"messages": [{"role": "user", "content": "word " * 2000}]}
    answers = [post_to(url, path, body) for path in ("/v1/plan", "/v1/chat/completions")]
    assert [a.json()["error"]["code"] for a in answers] == ["context_length_exceeded"] * 2
    assert answers[0].json() == answers[1].json()


def test_detail_low_makes_pictures_small(url):
    """The server's own limit is 100352 pixels, below that of `low`."""
    part = image_part(400, 400, 5)
    high = post_to(url, "/v1/plan", {"messages": asking(part)}).json()["images"][0]["tokens"]
    part["image_url"]["detail"] = "low"
    low = post_to(url, "/v1/plan", {"messages": asking(part), "max_pixels": 50176}).json()
    assert high == 11 * 11 and low["images"][0]["tokens"] == 64


def test_metrics_count_what_was_done(url):
    def value(name):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[1])

    names = ("jaxmm_output_tokens_total", "jaxmm_prompt_tokens_total", "jaxmm_finished_total")
    before = [value(name) for name in names]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "ignore_eos": True}
    usage = post(url, body).json()["usage"]
    gained = [value(name) - b for name, b in zip(names, before, strict=True)]
    assert gained == [5, usage["prompt_tokens"], 1]
    assert value("jaxmm_recompiles_total") == 0 and value("jaxmm_healthy") == 1


def prompt_tokens(url, messages, **fields):
    return post_to(url, "/v1/plan", {"messages": messages, **fields}).json()["prompt_tokens"]


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_a_picture_counts_in_whatever_turn_it_stands(url, role):
    """16 tokens of 112 x 112 pixels, and the two that the template puts around them."""
    text, ask = {"type": "text", "text": "so"}, {"role": "user", "content": "What is it?"}
    with_picture = [ask, {"role": role, "content": [text, image_part(112, 112, 1)]}, ask]
    without = [ask, {"role": role, "content": [text]}, ask]
    if role == "system":
        with_picture, without = with_picture[1:], without[1:]
    assert prompt_tokens(url, with_picture) - prompt_tokens(url, without) == 16 + 2


@pytest.mark.parametrize(
    "text",
    ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|> <|im_end|>"],
)
def test_spelled_vision_tokens_are_plain_text_in_a_raw_prompt(url, text):
    answer = post_to(url, "/v1/completions", {"prompt": f"define {text} briefly", "max_tokens": 2})
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "image_tokens": 0,
        "video_tokens": 0,
    }


def test_cache_entries_are_shared_within_a_salt_alone(url):
    body = {"messages": asking(image_part(112, 112, 9), "word " * 30), "max_tokens": 1}
    cached = [
        post(url, {**body, "cache_salt": salt}).json()["usage"]["prompt_tokens_details"]
        for salt in ("s1", "s1", "s2")
    ]
    assert [c["cached_tokens"] > 0 for c in cached] == [False, True, False]


def test_each_request_has_its_own_pixel_limit(url):
    part = image_part(840, 840, 2)
    sizes = (50176, 100352, 50176)
    tokens = [
        post(url, {"messages": asking(part), "max_pixels": n, "max_tokens": 1}).json()["usage"][
            "prompt_tokens_details"
        ]["image_tokens"]
        for n in sizes
    ]
    assert tokens == [64, 121, 64]


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(url, over):
    """One that leaves room for one token is answered with one."""
    limit = engine("qwen2_vl").sizes.max_model_len
    answer = post_to(url, "/v1/completions", {"prompt": [100] * (limit + over), "max_tokens": 5})
    if over < 0:
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert answer.json()["choices"][0]["finish_reason"] in ("length", "stop")
    else:
        message = answer.json()["error"]["message"]
        assert (
            answer.status_code == 400 and str(limit + over) in message and str(limit - 1) in message
        )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_one_token_is_one_token(url, name):
    body = {"messages": [{"role": "user", "content": "a"}], name: 1, "ignore_eos": True}
    answer = post(url, body).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
