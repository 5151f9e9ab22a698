"""A body that is wrong is refused with 400 and the name of what is wrong."""

import json
import re
from functools import partial

import pytest
from openai.types import completion_create_params as of_text
from openai.types.chat import completion_create_params as of_chat

from serving.errors import BadBody
from serving.example import picture_uri
from serving.protocol import ChatRequest, parse_chat_request
from serving.text_protocol import CompletionRequest, parse_completion_request
from tests.serving.conftest import ASK, post

PIXEL = picture_uri()
BAD = {
    "no JSON": (b"{", "not valid JSON"),
    "NaN": (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "JSON"),
    "a list": ([], "not a JSON object"),
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "unknown field": ({"messages": ASK, "max_token": 3}, "did you mean max_tokens"),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        r"messages\[0\].tool_calls\[0\].function",
    ),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\]: content"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]: content"),
    "unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "smell", "smell": {}}]}]},
        r"messages\[0\].content\[0\].type|unknown field messages\[0\].content\[0\].smell",
    ),
    "video without a URL": (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]},
        r"messages\[0\].content\[0\].video_url.url: Field required",
    ),
    "empty part": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"messages\[0\].content\[0\]: a part of type text must have text",
    ),
    "mixed detail": (
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
            {"type": "image_url", "image_url": {"url": PIXEL}}]}]},
        "detail is low for some",
    ),
    "unknown detail": (
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": PIXEL, "detail": "most"}}]}]},
        r"messages\[0\].content\[0\].image_url.detail",
    ),
    "string for number": ({"messages": ASK, "max_tokens": "5"}, "max_tokens: .*integer"),
    "fraction": ({"messages": ASK, "max_tokens": 2.5}, "max_tokens: .*integer"),
    "zero tokens": ({"messages": ASK, "max_tokens": 0}, "max_tokens=0 is outside"),
    "negative tokens": ({"messages": ASK, "max_completion_tokens": -1}, "max_tokens=-1 is outside"),
    "two lengths": ({"messages": ASK, "max_tokens": 1, "max_completion_tokens": 2}, "differ"),
    "temperature": ({"messages": ASK, "temperature": -1}, "temperature=-1"),
    "true for number": ({"messages": ASK, "temperature": True}, "temperature: .*number"),
    "huge n": ({"messages": ASK, "n": 100_000}, "n=100000 is outside"),
    "huge seed": ({"messages": ASK, "seed": 10**400}, "seed"),
    "logit bias": ({"messages": ASK, "logit_bias": {"x": 1}}, "logit_bias"),
    "logit bias id": ({"messages": ASK, "logit_bias": {"999999": 1}}, "logit_bias"),
    "stop ids": ({"messages": ASK, "stop_token_ids": [-1]}, "stop_token_ids"),
    "top logprobs alone": ({"messages": ASK, "top_logprobs": 3}, "needs logprobs"),
    "many logprobs": ({"messages": ASK, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "stream options alone": (
        {"messages": ASK, "stream_options": {"include_usage": True}},
        "needs stream",
    ),
    "empty stop": ({"messages": ASK, "stop": [""]}, "stop"),
    "many stops": ({"messages": ASK, "stop": ["a"] * 17}, "the limit is 16"),
    "half a surrogate pair": (
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON|surrogate"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "problem"), BAD.values(), ids=list(BAD))
def test_a_bad_body_is_refused_by_name(url, engine, body, problem):
    response = post(url, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert re.search(problem, error["message"]), error
    assert error["type"] == "invalid_request_error"
    field = re.match(r"\w+", error["message"])[0]
    if field in ChatRequest.model_fields:
        assert error["param"].startswith(field)
    assert post(url, {"messages": ASK}).status_code == 200


@pytest.mark.parametrize(
    ("official", "known", "parse", "least"),
    [(of_chat, ChatRequest, partial(parse_chat_request, served="model"), {"messages": ASK}),
     (of_text, CompletionRequest, parse_completion_request, {"prompt": "a"})],
    ids=["chat", "text"],
)  # fmt: skip
def test_no_field_of_the_official_client_is_left_unread(official, known, parse, least):
    """Those that are taken have tests of their own; the others are refused by their names."""
    parse(json.dumps(least).encode())
    fields = official.CompletionCreateParamsBase.__annotations__.keys()
    assert len(fields) > 15 and fields & known.model_fields.keys() >= {"logprobs", "seed", "stop"}
    for name in fields - known.model_fields.keys():
        with pytest.raises(BadBody, match=name):
            parse(json.dumps({**least, name: "x"}).encode())
