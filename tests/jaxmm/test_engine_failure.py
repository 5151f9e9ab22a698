"""A step that hangs is seen, and ends every request when the engine is given up."""

import threading
import time
from typing import Any

import pytest

from jaxmm.engine import Engine
from jaxmm.errors import EngineStopped, JaxmmError
from jaxmm.request import Delta
from tests.engines import make_engine, request, turn

PATIENCE_SECONDS = 20


class Listener:
    """Hears one request."""

    def __init__(self, on: Engine) -> None:
        self.events: list[Delta | JaxmmError] = []
        self.ended = threading.Event()
        on.submit(request(turn("hello"), max_tokens=500), self._hear)

    def _hear(self, event: Delta | JaxmmError) -> None:
        self.events.append(event)
        if isinstance(event, JaxmmError):
            self.ended.set()

    def wait_for_tokens(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.events and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.events


class Hung:
    """In place of what works on the device: waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def dispatch(self, _: Any) -> Any:
        self.let_go.wait(60)
        raise RuntimeError("let go")

    read = dispatch


def test_a_step_that_hangs_is_seen_and_given_up_by_another_thread() -> None:
    with make_engine("qwen2_vl") as on:
        assert on.turn_seconds == 0.0
        listener, hung = Listener(on), Hung()
        listener.wait_for_tokens()
        on._loop._dispatcher = hung  # type: ignore[assignment]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while on.turn_seconds < 0.3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert on.turn_seconds >= 0.3 and on.healthy
        on.give_up("a step takes more than 0.3 s")
        assert listener.ended.wait(PATIENCE_SECONDS)
        assert "a step takes more than 0.3 s" in str(listener.events[-1])
        assert not on.healthy
        with pytest.raises(EngineStopped, match="a step takes more"):
            Listener(on)
        hung.let_go.set()  # for the test's process, which goes on
