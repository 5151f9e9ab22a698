"""Log lines carry their fields, and never what a request contained."""

import json
import logging

import pytest

from jaxmm.errors import PromptTooLong
from serving.config import ServerConfig
from serving.logs import JsonFormatter, TextFormatter
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post, running

SECRET = "the-secret-of-the-prompt"
PIXELS = "c2VjcmV0LXBpeGVscw"


def record(message, *args, error=None):
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("serving.x", logging.INFO, "file.py", 1, message, args, info)


def logged(message, *args, error=None):
    return json.loads(JsonFormatter().format(record(message, *args, error=error)))


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_fields_of_a_message_stand_alone_with_their_types():
    entry = logged("answer method=%s status=%d seconds=%.3f request=%s", "GET", 200, 0.12345, "a")
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "info", "logger": "serving.x", "event": "answer", "method": "GET", "status": 200,
        "seconds": 0.12345, "request": "a",
    }  # fmt: skip


def test_a_field_named_like_one_of_the_line_does_not_replace_it():
    entry = logged("start level=%d logger=%s", 3, "x")
    assert (entry["level"], entry["level_"], entry["logger_"]) == ("info", 3, "x")


@pytest.mark.parametrize(
    ("message", "args", "event"),
    [("plain text", (), "plain text"), ("%s of %s", (1, 2), "1 of 2"),
     ("mixed a=%d and %s", (1, 2), "mixed a=1 and 2"), ("100%% of a=%d", (1,), "100%% of")],
)  # fmt: skip
def test_other_messages_are_written_whole(message, args, event):
    assert logged(message, *args)["event"] == event


def test_a_value_that_is_no_json_is_written_as_text():
    assert logged("x kind=%s", ValueError)["kind"] == "<class 'ValueError'>"
    assert "\n" not in JsonFormatter().format(record("x a=%s", "two\nlines"))


@pytest.mark.parametrize("form", [JsonFormatter, TextFormatter])
def test_an_error_is_told_by_kind_and_place_without_what_it_quotes(form):
    error = raised(KeyError(SECRET))
    error.__cause__ = raised(UnicodeEncodeError("ascii", SECRET, 0, 1, "no"))
    line = form().format(record("internal error", error=error))
    assert SECRET not in line
    for part in ("KeyError", "UnicodeEncodeError", "test_logs.py", "in raised"):
        assert part in line


@pytest.mark.parametrize("error", [OSError(28, "No space"), RuntimeError("RESOURCE_EXHAUSTED"),
                                   PromptTooLong("9 tokens")])  # fmt: skip
def test_what_the_system_and_we_ourselves_say_is_kept(error):
    assert str(error) in logged("x", error=raised(error))["error"][0]


def test_errors_that_lead_to_themselves_end():
    first, second = raised(KeyError(1)), raised(ValueError(2))
    first.__cause__, second.__cause__ = second, first
    assert len(logged("x", error=first)["error"]) == 4


class Clumsy(FakeEngine):
    """Fails with an error that quotes the request."""

    async def astream(self, request):
        raise KeyError(f"{request.messages} {request.images}")
        yield


@pytest.mark.parametrize("form", [JsonFormatter, TextFormatter])
def test_no_log_line_has_a_prompt_or_pixels_in_it(tokenizer, caplog, form):
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}}
    broken = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}*"}}
    remote = {"type": "image_url", "image_url": {"url": f"http://name.invalid/{SECRET}?k={SECRET}"}}
    text = {"type": "text", "text": SECRET}
    bodies = [
        {"messages": [{"role": "user", "content": [picture, text]}], "stream": stream}
        for stream in (False, True)
    ]
    bodies += [{"messages": [{"role": "user", "content": [p, text]}]} for p in (broken, remote)]
    bodies += [{"messages": ASK, SECRET: 1}, {"messages": SECRET}, b'{"' + SECRET.encode()]
    bodies += [{"messages": ASK, "stop": SECRET, "cache_salt": SECRET, "user": SECRET}]
    with caplog.at_level(logging.DEBUG):
        for engine in (FakeEngine(tokenizer), Clumsy(tokenizer)):
            with running(engine, ServerConfig()) as url:
                statuses = [post(url, body).status_code for body in bodies]
        assert 500 in statuses
    lines = [form().format(r) for r in caplog.records if not r.name.startswith(("http", "asyncio"))]
    assert any("internal error" in line for line in lines)
    for line in lines:
        assert SECRET not in line and PIXELS not in line
