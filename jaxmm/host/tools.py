"""Tools that a model may call: how a prompt tells of them, and the grammar of a call. Host only.

Calls have the form that Qwen's models were trained on and others took from Hermes:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Ulm"}}
    </tool_call>
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmm.errors import RequestError
from jaxmm.host.grammar import json_text

CALL_START = "<tool_call>"
CALL_NAME = '\n{"name": "'
CALL_ARGUMENTS = '", "arguments": '
CALL_END = "}\n</tool_call>"
MAX_TOOLS = 128

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(NamedTuple):
    """One function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    definition: Mapping[str, Any]
    """As the caller gave it, for the prompt."""


class ToolCall(NamedTuple):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        body = f"{CALL_NAME}{self.name}{CALL_ARGUMENTS}{_dumps(self.arguments)}"
        return f"{CALL_START}{body}{CALL_END}"


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check tools as the OpenAI API writes them, `{"type": "function", "function": {…}}`.

    Raises:
        RequestError: One is not a function with a name of its own; names the place.
    """
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"there are {len(tools)} tools; the limit is {MAX_TOOLS}")
    read = tuple(_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    if len({tool.name for tool in read}) < len(read):
        raise RequestError("two tools have the same name")
    return read


def _read_tool(where: str, tool: object) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f'{where} is not {{"type": "function", "function": {{…}}}}')
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type is not function, the one kind of tool that there is")
    name = read_name(f"{where}.function.name", function.get("name"))
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters is not a JSON schema of an object")
    return Tool(name, parameters, tool)


def read_name(where: str, name: object) -> str:
    """Check the name of a function.

    Raises:
        RequestError: It is not one; names `where`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where} is not 1 to 64 letters, digits, _ and -")
    return name


def tools_text(tools: Sequence[Tool]) -> str:
    """What the system turn says of tools where the chat template does not say it itself.

    Word for word what the templates of Qwen2.5 say, because the models know it so.
    """
    listed = "".join(f"\n{_dumps(tool.definition)}" for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
        f"{listed}\n</tools>\n\nFor each function call, return a json object with function name "
        "and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def tool_grammar(
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool = True,
    response: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that calls tools: names that exist, arguments by their schemas.

    Args:
        tools: At least one.
        required: The answer is a call; else it may be text, with a call at its end.
        parallel: Several calls may follow each other.
        response: JSON schema of an answer without a call; None for any text.
    """
    if required:
        lines = [f"start: {_quoted(CALL_START)} calls"]
    elif response is not None:
        lines = [
            f"start: response | {_quoted(CALL_START)} calls",
            f"response: %json {json_text(response)}",
        ]
    else:  # lazy: the first <tool_call> in a text begins a call, whatever precedes it
        lines = [
            "start: TEXT | begin calls",
            f"begin[lazy]: TEXT {_quoted(CALL_START)}",
            r"TEXT: /(.|\n)*/",
        ]
    more = f" (call_end {_quoted(f'{chr(10)}{CALL_START}')} call)*" if parallel else ""
    lines += [
        f"calls: call{more} call_end",
        f"call: {_quoted(CALL_NAME)} ({' | '.join(f'tool_{i}' for i in range(len(tools)))})",
        f"call_end: {_quoted(CALL_END)}",
    ]
    lines += [
        f"tool_{i}: {_quoted(tool.name + CALL_ARGUMENTS)} %json {json_text(tool.parameters)}"
        for i, tool in enumerate(tools)
    ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
