"""Tools, calls and their results as plain text, for chat templates that know none of them.
Host only."""

from collections.abc import Sequence

from jaxmm.host.messages import Turn
from jaxmm.host.tools import Tool, tools_text

DEFAULT_SYSTEM = "You are a helpful assistant."
"""What a conversation without a system turn begins with when tools must be told of."""


def tools_as_text(turns: Sequence[Turn], tools: Sequence[Tool]) -> tuple[Turn, ...]:
    """Tell of the tools at the end of the system turn, which is made if there is none."""
    has_system = turns[0].role == "system"
    system = turns[0] if has_system else Turn("system", (DEFAULT_SYSTEM,), True)
    rest = turns[1:] if has_system else turns
    return (_joined(system, "", f"\n\n{tools_text(tools)}"), *rest)


def calls_as_text(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Write calls at the end of their turns, and results as what a user says.

    Results that follow each other are one turn, as in the templates that know them.
    """
    written: list[Turn] = []
    after_result = False
    for turn in turns:
        if turn.role == "tool":
            result = _joined(turn, "<tool_response>\n", "\n</tool_response>")
            if after_result:
                previous = written.pop()
                result = _both(_joined(previous, "", "\n"), result)
            written.append(result._replace(role="user"))
        elif turn.calls:
            calls = "\n".join(map(str, turn.calls))
            written.append(_joined(turn, "", f"\n{calls}" if turn.parts != ("",) else calls))
        else:
            written.append(turn)
        after_result = turn.role == "tool"
    return tuple(written)


def _joined(turn: Turn, before: str, after: str) -> Turn:
    """The turn with text around its content, and without its calls."""
    if turn.is_string:
        return turn._replace(parts=(f"{before}{turn.parts[0]}{after}",), calls=())
    parts = ((before,) if before else ()) + turn.parts + ((after,) if after else ())
    return turn._replace(parts=parts, calls=())


def _both(first: Turn, second: Turn) -> Turn:
    if first.is_string and second.is_string:
        return first._replace(parts=(f"{first.parts[0]}{second.parts[0]}",))
    return first._replace(parts=first.parts + second.parts, is_string=False)
