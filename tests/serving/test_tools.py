"""Tools and response formats over HTTP, as the official client sends and reads them."""

import json

import openai
import pytest

from jaxmm.host.tools import ToolCall
from serving.config import ServerConfig
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, client, post, running

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "default": None}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLS = (ToolCall("weather", {"city": "Ulm \u56f3 }\n"}), ToolCall("clock", {}))
SAID = "Let me see.\n" + "\n".join(map(str, CALLS))


@pytest.fixture(scope="module")
def calling(tokenizer):
    """A server whose model always calls two tools."""
    engine = FakeEngine(tokenizer, SAID)
    with running(engine) as base:
        yield engine, base


def ask(url, **fields):
    fields = {"tools": [WEATHER, CLOCK], "messages": ASK, **fields}
    return client(url).chat.completions.create(model="fake", **fields)


def test_calls_come_as_tool_calls_with_ids_of_their_own(calling):
    choice = ask(calling[1]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.\n")
    calls = choice.message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == list(CALLS)
    assert len({c.id for c in calls}) == 2 and {c.type for c in calls} == {"function"}


def test_streamed_calls_add_up_to_the_same(calling):
    content, calls, reasons = "", {}, []
    for chunk in ask(calling[1], stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for piece in choice.delta.tool_calls or ():
            if piece.id:
                calls[piece.index] = [piece.function.name, ""]
            calls[piece.index][1] += piece.function.arguments
    assert content == "Let me see.\n" and reasons[-1] == "tool_calls"
    assert [(name, json.loads(given)) for name, given in calls.values()] == list(CALLS)


def test_an_answer_that_is_cut_inside_a_call_says_length(calling):
    whole = ask(calling[1], max_tokens=60).choices[0]
    assert whole.finish_reason == "length"
    [call] = whole.message.tool_calls
    assert json.dumps(CALLS[0].arguments, ensure_ascii=False).startswith(call.function.arguments)


def test_without_tools_or_with_none_the_text_is_the_text(calling):
    engine, url = calling
    assert ask(url, tool_choice="none").choices[0].message.content == SAID
    assert engine.requests[-1].tools == [] and engine.requests[-1].sampling.grammar is None
    assert (
        client(url).chat.completions.create(model="fake", messages=ASK).choices[0].message.content
        == SAID
    )


def test_tools_reach_the_prompt_as_they_were_given(calling):
    ask(calling[1])
    assert calling[0].requests[-1].tools == [WEATHER, CLOCK]


@pytest.mark.parametrize(
    ("fields", "starts", "names"),
    [
        ({}, "start: TEXT", ["weather", "clock"]),
        ({"tool_choice": "auto"}, "start: TEXT", ["weather", "clock"]),
        ({"tool_choice": "required"}, 'start: "<tool_call>"', ["weather", "clock"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            'start: "<tool_call>"',
            ["clock"],
        ),
        ({"response_format": {"type": "json_object"}}, "start: response", ["weather", "clock"]),
    ],
)
def test_a_choice_of_tools_becomes_a_grammar(calling, fields, starts, names):
    ask(calling[1], **fields)
    grammar = calling[0].requests[-1].sampling.grammar
    assert grammar.startswith(starts)
    assert [name for name in ("weather", "clock") if f'"{name}\\"' in grammar] == names


@pytest.mark.parametrize("fields", [{"parallel_tool_calls": False}, {
    "tool_choice": {"type": "function", "function": {"name": "clock"}}}])  # fmt: skip
def test_one_call_alone_where_one_is_asked_for(calling, fields):
    ask(calling[1], **fields)
    assert ")*" not in calling[0].requests[-1].sampling.grammar.splitlines()[-5]


def test_calls_and_results_may_be_sent_back(calling):
    engine, url = calling
    message = ask(url).choices[0].message
    turns = [*ASK, message.model_dump(exclude_none=True)]
    turns += [
        {"role": "tool", "tool_call_id": call.id, "content": "20"} for call in message.tool_calls
    ]
    ask(url, messages=turns)
    sent = engine.requests[-1].messages
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool"]
    assert [c["function"]["name"] for c in sent[1]["tool_calls"]] == ["weather", "clock"]


def test_a_response_format_becomes_a_grammar(calling):
    schema = {"type": "object", "properties": {"a": {"const": 7}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    post(calling[1], {"messages": ASK, "response_format": named})
    assert '"const": 7' in calling[0].requests[-1].sampling.grammar
    post(calling[1], {"messages": ASK, "response_format": {"type": "json_object"}})
    assert '"type": "object"' in calling[0].requests[-1].sampling.grammar
    post(calling[1], {"messages": ASK, "response_format": {"type": "text"}})
    assert calling[0].requests[-1].sampling.grammar is None


BAD = {
    "unknown tool": ({"tools": [CLOCK], "tool_choice": {
        "type": "function", "function": {"name": "no"}}}, "tool_choice"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "twice": ({"tools": [CLOCK, CLOCK]}, "tools"),
    "odd name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
                 "tools[0].function.name"),
    "other kind": ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "call of a user": ({"messages": [{"role": "user", "content": "a", "tool_calls": [
        {"type": "function", "function": {"name": "a", "arguments": "{}"}}]}]}, "messages[0]"),
    "functions": ({"functions": [{"name": "a"}]}, "functions"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=list(BAD))
def test_wrong_tools_and_formats_are_refused_by_name(url, fields, param):
    response = post(url, {"messages": ASK, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_named_choice_needs_its_tool(calling):
    with pytest.raises(openai.BadRequestError, match="tool_choice names no tool"):
        ask(calling[1], tool_choice={"type": "function", "function": {"name": "other"}})


def test_the_default_length_applies_to_calls_too(calling):
    ask(calling[1])
    assert calling[0].requests[-1].sampling.max_tokens == ServerConfig().default_max_tokens
