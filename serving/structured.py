"""Answers of a given form: response formats and tools, as fields and as grammars. Host only."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from jaxmm.errors import RequestError
from jaxmm.host.grammar import json_grammar
from jaxmm.host.tools import read_tools, tool_grammar
from serving.body import Strict
from serving.errors import BadBody

if TYPE_CHECKING:
    from serving.protocol import ChatRequest

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class JsonSchema(Strict):
    """The form of an answer."""

    name: str = Field(pattern=FUNCTION_NAME)
    schema_: dict[str, Any] = Field(alias="schema")
    """JSON schema; what cannot be followed in it is refused with the reason."""
    description: str | None = None
    strict: bool | None = None
    """Every schema is followed strictly."""


class ResponseFormat(Strict):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema stands beside the type json_schema, and only there")
        return self


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; left out: it takes none."""
    strict: bool | None = None
    """Every schema is followed strictly."""


class ToolDefinition(Strict):
    """A tool of the request."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    name: str = Field(pattern=FUNCTION_NAME)
    arguments: str
    """JSON object, as text."""


class CalledTool(Strict):
    """A call in an assistant's earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def offered_tools(chat: "ChatRequest") -> list[dict[str, Any]]:
    """Tools that the prompt tells of, as chat templates take them; none with `none`."""
    if chat.tool_choice == "none":
        return []
    return tool_dicts(chat.tools or ())


def tool_dicts(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Tools as chat templates take them."""
    return [{"type": tool.type, "function": _given(tool.function.model_dump())} for tool in tools]


def grammar_of(chat: "ChatRequest") -> str | None:
    """What the answer must match; None for any text.

    Raises:
        BadBody: A choice of tools without such a tool.
        RequestError: Tools or a schema that are wrong in themselves.
    """
    tools, schema = _allowed_tools(chat), _response_schema(chat.response_format)
    try:
        if tools:
            return tool_grammar(
                read_tools(tools),
                required=chat.tool_choice not in (None, "auto"),
                parallel=chat.parallel_tool_calls is not False
                and not isinstance(chat.tool_choice, NamedTool),
                response=schema,
            )
        return None if schema is None else json_grammar(schema)
    except RequestError as e:
        raise BadBody(str(e), "tools" if tools else "response_format") from None


def _response_schema(format: ResponseFormat | None) -> dict[str, Any] | None:
    if format is None or format.type == "text":
        return None
    return {"type": "object"} if format.json_schema is None else format.json_schema.schema_


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _allowed_tools(chat: "ChatRequest") -> Sequence[dict[str, Any]]:
    tools = offered_tools(chat)
    if isinstance(chat.tool_choice, NamedTool):
        name = chat.tool_choice.function.name
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    if not tools and chat.tool_choice not in (None, "none", "auto"):
        raise BadBody("tool_choice names no tool of the request", "tool_choice")
    return tools
