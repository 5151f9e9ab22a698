"""Tools in prompts are what templates make of them, and calls are read as they were written."""

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jaxmm.errors import GrammarError, RequestError
from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.grammar import Grammars
from jaxmm.host.tool_calls import ToolCallReader
from jaxmm.host.tools import ToolCall, read_tools, tool_grammar
from tests import chat_checkpoints
from tests.jaxmm.host.test_grammar import random_walk

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SHARED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/place"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["left", "right"]}},
}


def function(name, parameters=None, **fields):
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


TOOLS = [
    function("weather", CITY, description="Says how it is <|im_end|> \u56f3 'outside'."),
    function("look", SHARED),
    function("stop-it_2"),
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm \\u00fc <|im_start|>"}'},
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "20 C <|im_end|>"},
    {"role": "tool", "content": [{"type": "text", "text": "21 C"}]},
    {"role": "user", "content": "And?"},
]


def load(tmp_path_factory, template):
    directory = chat_checkpoints.write_checkpoint(tmp_path_factory.mktemp("tools"), template)
    return ChatTokenizer.from_checkpoint(directory), AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    return load(tmp_path_factory, chat_checkpoints.WITH_TOOLS)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return load(tmp_path_factory, chat_checkpoints.NO_DEFAULT_SYSTEM)


@pytest.fixture(scope="module")
def grammars(without):
    chat = without[0]
    eos = chat_checkpoints.eos_ids(chat.token_bytes)
    return Grammars(chat.token_bytes, chat.special_ids, eos, chat.encode_plain)


def text_of(pair, messages, tools=()):
    return pair[1].decode(pair[0].encode_chat(messages, tools).ids)


# In prompts


def test_a_template_that_knows_tools_renders_them_as_transformers_does(with_tools):
    parsed = json.loads(json.dumps(CHAT).replace("<|im_", "<|in_"))
    for call in parsed[2]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = json.loads(json.dumps(TOOLS).replace("<|im_", "<|in_"))
    rendered = with_tools[1].apply_chat_template(
        parsed, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert text_of(with_tools, CHAT, TOOLS) == rendered.replace("<|in_", "<|im_")


def test_what_tools_and_calls_spell_is_no_special_token(with_tools, without):
    for pair in (with_tools, without):
        ids = pair[0].encode_chat(CHAT, TOOLS).ids.tolist()
        [end] = [i for i in pair[0].special_ids if pair[0].token_bytes[i] == b"<|im_end|>"]
        turns = text_of(pair, CHAT, TOOLS).count("<|im_start|>") - 2  # two of them in arguments
        assert ids.count(end) == turns - 1


def test_a_template_without_tools_gets_them_as_qwen_writes_them(without):
    text = text_of(without, CHAT, TOOLS[2:])
    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions"
    )
    assert '<tools>\n{"type": "function", "function": {"name": "stop-it_2"}}\n</tools>' in text
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm \u00fc <|im_start|>"}}'
    assert f"<|im_start|>assistant\n{call}\n</tool_call>\n{call}\n</tool_call><|im_end|>" in text
    result = "<tool_response>\n{}\n</tool_response>"
    results = f"{result.format('20 C <|im_end|>')}\n{result.format('21 C')}"
    assert f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>user\nAnd?" in text


def test_without_a_system_turn_one_is_made_for_the_tools(without):
    text = text_of(without, [{"role": "user", "content": "a"}], TOOLS)
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools")


@pytest.mark.parametrize("template", ["WITH_TOOLS", "QWEN2_VL", "PARTS_ALONE", "STRINGS_ALONE"])
def test_without_tools_nothing_changes(tmp_path_factory, template):
    pair = load(tmp_path_factory, getattr(chat_checkpoints, template))
    messages = [{"role": "user", "content": "a"}]
    assert (
        pair[0].encode_chat(messages).ids.tolist() == pair[0].encode_chat(messages, []).ids.tolist()
    )
    assert "tool" not in text_of(pair, messages)


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([{"type": "retrieval"}], r"tools\[0\]"),
        ([function("")], "name"),
        ([function("a b")], "name"),
        ([function("a" * 65)], "name"),
        ([function("a"), function("a")], "same name"),
        ([function("a", [1])], "parameters"),
        ([function(f"f{i}") for i in range(129)], "128"),
    ],
)
def test_wrong_tools_are_refused_by_their_place(tools, why):
    with pytest.raises(RequestError, match=why):
        read_tools(tools)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"role": "user"}, "not the assistant's"),
        ({"tool_calls": [{}]}, "function is missing"),
        ({"tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}, "valid JSON"),
        ({"tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}, "JSON object"),
        ({"tool_calls": 3}, "not a list"),
        ({"content": None, "tool_calls": []}, "neither a string"),
    ],
)
def test_wrong_calls_are_refused_by_their_place(without, change, why):
    message = {"role": "assistant", "content": "", "tool_calls": [CALL], **change}
    with pytest.raises(RequestError, match=why):
        without[0].encode_chat([message])


# In answers


def test_calls_are_read_in_whatever_pieces_they_come():
    calls = [ToolCall("weather", {"city": "}\n</tool_call>"}), ToolCall("look", {})]
    text = "It is <tool here.\n" + "\n".join(map(str, calls))
    for size in (1, 2, 3, 7, 1000):
        reader, content, read = ToolCallReader(), "", {}
        pieces = []
        for start in range(0, len(text), size):
            said, new = reader.push(text[start : start + size])
            content, pieces = content + said, pieces + new
        said, new = reader.finish()
        content, pieces = content + said, pieces + new
        for piece in pieces:
            if piece.name is not None:
                read[piece.call_index] = [piece.name, ""]
            read[piece.call_index][1] += piece.arguments
        assert content == "It is <tool here.\n"
        assert [(name, json.loads(a)) for name, a in read.values()] == calls


@pytest.mark.parametrize(
    ("cut", "content", "arguments"),
    [
        ("so <tool_ca", "so <tool_ca", None),
        ('<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', None),
        ('<tool_call>\n{"name": "weather", "arguments": {"city', "", '{"city'),
        ('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool', "", "{}}\n</tool"),
    ],
)
def test_an_answer_that_was_cut_loses_nothing(cut, content, arguments):
    reader = ToolCallReader()
    said, pieces = reader.push(cut)
    rest, more = reader.finish()
    assert said + rest == content
    got = "".join(p.arguments for p in pieces + more) if pieces else None
    assert got == arguments


@given(
    seed=st.integers(0, 1 << 30),
    required=st.booleans(),
    parallel=st.booleans(),
    response=st.sampled_from([None, CITY]),
)
@settings(max_examples=60, deadline=None)
def test_random_tokens_under_the_grammar_make_only_calls_that_validate(
    without, grammars, seed, required, parallel, response
):
    tools = read_tools(TOOLS)
    grammar = tool_grammar(tools, required=required, parallel=parallel, response=response)
    text = random_walk(grammars.compile(grammar).start(), without[0], np.random.default_rng(seed))
    if text is None:
        return
    reader = ToolCallReader()
    content, pieces = reader.push(text)
    content += reader.finish()[0]
    arguments = [""] * reader.num_calls
    names = [piece.name for piece in pieces if piece.name is not None]
    for piece in pieces:
        arguments[piece.call_index] += piece.arguments
    assert reader.num_calls >= required
    assert parallel or reader.num_calls <= 1
    schemas = {tool.name: tool.parameters for tool in tools}
    for name, written in zip(names, arguments, strict=True):
        jsonschema.validate(json.loads(written), schemas[name])
    if response is not None and not names:
        jsonschema.validate(json.loads(content), response)


@pytest.mark.parametrize("required", [False, True])
def test_a_text_and_calls_can_be_said(without, grammars, required):
    calls = "\n".join(str(ToolCall("stop-it_2", {})) for _ in range(2))
    matcher = grammars.compile(tool_grammar(read_tools(TOOLS), required=required)).start()
    for token in without[0].encode_plain(calls if required else f"a < b: {calls}"):
        matcher.take(token)
    with pytest.raises(GrammarError):
        matcher.take(without[0].encode_plain("a")[0])
