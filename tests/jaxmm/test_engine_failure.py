"""A step that hangs is seen, and ends every request when the engine is given up."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxmm import engine
from jaxmm.dispatch import Dispatcher, Pending
from jaxmm.engine import Engine
from jaxmm.errors import EngineStopped, JaxmmError
from jaxmm.request import Delta
from tests.engines import ask, make_engine, on_loop, request, turn
from tests.engines import engine as shared

PATIENCE_SECONDS = 20


class Listener:
    """Hears one request."""

    def __init__(self, on: Engine) -> None:
        self.events: list[Delta | JaxmmError] = []
        self.also: Callable[[JaxmmError], None] = lambda _: None
        self.ended = threading.Event()
        on.submit(request(turn("hello"), max_tokens=500), self._hear)

    def _hear(self, event: Delta | JaxmmError) -> None:
        self.events.append(event)
        if isinstance(event, JaxmmError):
            self.also(event)
            self.ended.set()

    def wait_for_tokens(self) -> None:
        wait_until(lambda: bool(self.events))


class Hung:
    """In place of what works on the device: the next step waits until it is let go, those before it
    are read as ever."""

    def __init__(self, real: Dispatcher) -> None:
        self._real = real
        self.let_go = threading.Event()
        self.returns = False

    def dispatch(self, _: Any) -> None:
        self.let_go.wait(60)
        if not self.returns:
            raise RuntimeError("let go")

    def fetch(self, pending: Pending | None) -> Any:
        return None if pending is None else self._real.fetch(pending)

    def scored(self, pending: Pending | None, fetched: Any) -> Iterator[Any]:
        return iter(()) if pending is None else self._real.scored(pending, fetched)

    def sampled(self, pending: Pending | None, fetched: Any) -> Iterator[Any]:
        return iter(()) if pending is None else self._real.sampled(pending, fetched)


@contextlib.contextmanager
def hanging() -> Iterator[tuple[Engine, list[Listener], Hung]]:
    """An engine in a step that hangs, with three requests in it."""
    on = make_engine("qwen2_vl")
    [replica] = on._loop._replicas
    hung = Hung(replica._dispatcher)
    try:
        listeners = [Listener(on) for _ in range(3)]
        for listener in listeners:
            listener.wait_for_tokens()
        on_loop(on, lambda: setattr(replica, "_dispatcher", hung))
        wait_until(lambda: on.turn_seconds >= 0.3)
        yield on, listeners, hung
    finally:
        hung.let_go.set()
        on.close()


def wait_until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert met()


def test_a_step_that_hangs_is_given_up_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hanging() as (on, listeners, hung):
        assert on.healthy
        on.give_up("a step takes more than 0.3 s")
        for listener in listeners:
            assert listener.ended.wait(PATIENCE_SECONDS)
            assert "a step takes more than 0.3 s" in str(listener.events[-1])
        assert not on.healthy
        with pytest.raises(EngineStopped, match="a step takes more"):
            Listener(on)
        monkeypatch.setattr(engine, "_HUNG_SECONDS", 0.1)
        on.close()
        assert "closed in a step that hangs" in caplog.text and on._thread.is_alive()
        hung.let_go.set()
        on._thread.join(PATIENCE_SECONDS)
        assert not on._thread.is_alive()


def test_a_step_that_comes_back_while_it_is_given_up_ends_each_request_once() -> None:
    """The loop's thread ends all requests while another one is in the middle of that."""
    with hanging() as (on, listeners, hung):
        hung.returns = True
        listeners += [Listener(on) for _ in range(2)]  # prepared, and not in the loop yet
        wait_until(lambda: on._loop._inbox.qsize() == 2)

        def meet(_: JaxmmError) -> None:
            hung.let_go.set()
            on._thread.join(PATIENCE_SECONDS)

        listeners[2].also = meet
        on.give_up("a step takes more than 0.3 s")
        assert not on._thread.is_alive()
        for one in listeners:
            assert one.ended.wait(PATIENCE_SECONDS)
            errors = [e for e in one.events if isinstance(e, JaxmmError)]
            assert errors == one.events[-1:]
        assert not on._loop._answers and str(on.failure) == "a step takes more than 0.3 s"


def test_a_close_waits_for_a_step_until_the_engine_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_HUNG_SECONDS", 0.1)
    with hanging() as (on, _, hung):
        closing = threading.Thread(target=on.close, daemon=True)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        on.give_up("a step takes more than 0.3 s")
        closing.join(PATIENCE_SECONDS)
        assert not closing.is_alive() and on._thread.is_alive()
        hung.let_go.set()
        on._thread.join(PATIENCE_SECONDS)


def test_what_the_loop_does_between_steps_is_seen_to_hang_too() -> None:
    on, let_go = shared("qwen2_vl"), threading.Event()
    assert on.turn_seconds == 0
    on._loop.post(lambda: let_go.wait(PATIENCE_SECONDS))
    wait_until(lambda: on.turn_seconds >= 0.2)
    let_go.set()
    wait_until(lambda: on.turn_seconds == 0)


def test_a_listener_cannot_close_the_engine_whose_thread_it_is_on() -> None:
    on = shared("qwen2_vl")

    def close() -> None:
        with pytest.raises(RuntimeError, match="its own thread"):
            on.close()

    on_loop(on, close)
    assert on.healthy
    [answer] = ask(on, request(turn("hello"), max_tokens=2))
    assert len(answer.token_ids) == 2
