"""From the bytes of a request body to a checked model of it. Host only."""

import difflib
from typing import Any, TypeVar

import pydantic
import pydantic_core
from pydantic import ConfigDict

from serving.errors import BadBody, BodyTooLarge

_MAX_TEXT_BYTES = 8 << 20
"""Of a body without the pictures that were taken out of it: more than the text of any prompt.
Parsing holds Python's lock, and with it all other requests, for up to 5 ms a megabyte."""
_MAX_COMMAS = 300_000
"""In a body: more than the tokens of a prompt that is given as ids. Each value of JSON becomes an
object of 30 bytes and more, so that a body of nothing but commas would take seconds."""


class Strict(pydantic.BaseModel):
    """A body, or a part of one: no unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Body = TypeVar("_Body", bound=Strict)


def parse(model: type[_Body], body: bytes) -> _Body:
    """Read and check a request body.

    Raises:
        BadBody: Names the field at fault; repeats nothing of its content.
    """
    return validated(model, read_object(body))


def read_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        BadBody: It is none, or has too many values in it.
        BodyTooLarge: It has too much text.
    """
    if len(body) > _MAX_TEXT_BYTES:
        raise BodyTooLarge(
            f"the body has {len(body)} bytes beside its pictures; the limit is {_MAX_TEXT_BYTES}"
        )
    if body.count(b",") > _MAX_COMMAS:
        raise BadBody(f"the body has more than {_MAX_COMMAS} values")
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as e:
        raise BadBody(f"the body is not valid JSON: {e}") from None
    if not isinstance(data, dict):
        raise BadBody("the body is not a JSON object")
    return data


def validated(model: type[_Body], data: dict[str, Any], **context: str) -> _Body:
    """Check an object against a model, whose validators are told the context.

    Raises:
        BadBody: Names the field at fault.
    """
    try:
        return model.model_validate(data, context=context)
    except pydantic.ValidationError as e:
        raise _bad_body(e, model) from None


def drop_neutral(data: dict[str, Any], neutral: dict[str, tuple[Any, ...]], where: str) -> None:
    """Take out fields that are not supported, and refuse them where they ask for something.

    Args:
        data: Changed.
        neutral: Such fields, and the values at which each asks for nothing; null always does.
        where: Path of the object, with its dot.

    Raises:
        BadBody: Names the field.
    """
    for name in neutral.keys() & data.keys():
        value = data.pop(name)
        if value is not None and value not in neutral[name]:
            raise BadBody(f"{where}{name} is not supported", f"{where}{name}")


def _bad_body(error: pydantic.ValidationError, model: type[Strict]) -> BadBody:
    """Tell the first fault, of several readings of one value the one that went furthest."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = faults[0]["loc"][:1]
    fault = max((f for f in faults if f["loc"][:1] == first), key=lambda f: len(f["loc"]))
    # pydantic names the branch of a union in the path: str, list[Part]
    steps = [s for s in fault["loc"] if not (isinstance(s, str) and _is_branch(s))]
    place = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps).lstrip(".")
    if fault["type"] == "extra_forbidden":
        return BadBody(f"unknown field {place}{_suggestion(place, model)}", place)
    message = fault["msg"].removeprefix("Value error, ")
    return BadBody(f"{place}: {message}" if place else message, place or None)


def _is_branch(step: str) -> bool:
    return step in ("str", "int", "bool") or not step.isidentifier() or step[:1].isupper()


def _suggestion(place: str, model: type[Strict]) -> str:
    near = difflib.get_close_matches(place, model.model_fields, n=1)
    return f"; did you mean {near[0]}?" if near else ""
