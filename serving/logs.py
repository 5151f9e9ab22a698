"""Log lines for people, or as JSON for machines; never what a request contained. Host only.

Messages are constant text with `key=value` fields (`"answer status=%d"`): in JSON each field
stands alone, under its own name and with its own type.
"""

import copy
import json
import logging
import re
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

from jaxmm.errors import JaxmmError

_FIELD = re.compile(r"(\w+)=%[-+ #0-9.]*[a-zA-Z]")
_TELLING = (JaxmmError, OSError, RuntimeError, MemoryError)
"""Errors whose text is of ours, the system's or the device's. That of the others (KeyError,
UnicodeError, the validation of a body) quotes the value at fault, which may be a prompt."""


def configure_logs(level: str, form: Literal["text", "json"]) -> None:
    """Send the process's log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """One line: time, level, place, message; an error's frames below it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Write a record; what another handler wrote of its error is not used again."""
        record = copy.copy(record)
        record.exc_text = None
        return super().format(record)

    def formatException(self, ei: Any) -> str:
        """Kinds and frames of an error and of those behind it, without what they quote."""
        return "\n".join(describe(ei[1]))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, the message's fields, error."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        names = _FIELD.findall(str(record.msg))
        if isinstance(record.args, tuple) and names and len(names) == len(record.args):
            entry["event"] = _FIELD.sub("", str(record.msg)).strip()
            for name, value in zip(names, record.args, strict=True):
                entry[name if name not in entry else f"{name}_"] = _plain(value)
        else:
            entry["event"] = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            entry["error"] = describe(record.exc_info[1])
        return json.dumps(entry, ensure_ascii=False)


def describe(error: BaseException) -> list[str]:
    """Lines about an error, outermost last: kind, text where it quotes nothing, frames."""
    lines: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        frames = traceback.extract_tb(at.__traceback__)
        places = [f"  {f.filename}:{f.lineno} in {f.name}" for f in frames]
        text = f": {at}" if isinstance(at, _TELLING) else ""
        lines = [f"{type(at).__name__}{text}", *places, *lines]
        if isinstance(at, BaseExceptionGroup):
            lines += [f"  | {line}" for inner in at.exceptions for line in describe(inner)]
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return lines


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
