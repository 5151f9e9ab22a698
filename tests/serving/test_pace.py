"""Refused clients are told when those before them will have been answered."""

import threading
import time

from jaxmm.errors import Overloaded
from serving.config import ServerConfig
from serving.pace import Pace
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post, post_to, running


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def paced(num_open: int, num_ends: int, seconds_each: float) -> int:
    """What is told when so many are open and others have ended at this pace."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(num_open + num_ends):
        pace.begin()
    for _ in range(num_ends):
        pace.end(answered=True)
        clock.now += seconds_each
    return pace.retry_seconds


def test_it_is_the_number_that_are_open_times_the_time_of_one() -> None:
    assert paced(20, 10, 0.5) == 10
    assert paced(7, 64, 0.25) == 2  # 1.75 s, rounded up


def test_it_is_bounded_and_known_before_anything_has_ended() -> None:
    assert paced(100, 0, 1.0) == 1
    assert paced(1000, 10, 1.0) == 60
    assert paced(0, 10, 1.0) == 1


def test_only_the_last_ends_count() -> None:
    """Ten slow ones and then 64 fast ones."""
    clock = Clock()
    pace = Pace(clock)
    for seconds in [30.0] * 10 + [0.5] * 64:
        pace.begin()
        clock.now += seconds
        pace.end(answered=True)
    for _ in range(8):
        pace.begin()
    assert pace.retry_seconds == 4


def test_time_in_which_nothing_was_asked_does_not_count() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(10):
        pace.begin()
        clock.now += 0.5
        pace.end(answered=True)
        clock.now += 3600
    for _ in range(20):
        pace.begin()
    assert pace.retry_seconds == 9  # 4.5 s since the first of ten ended, twenty open


def test_an_engine_that_stands_still_is_noticed() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(3):
        pace.begin()
    pace.end(answered=True)
    clock.now += 12
    assert pace.retry_seconds == 24


def test_refusals_do_not_count_as_answers() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(5):
        pace.begin()
    pace.end(answered=True)
    clock.now += 2
    pace.begin()
    pace.end(answered=False)
    assert pace.retry_seconds == 8


def test_a_429_of_server_and_engine_says_when_to_come_again(tokenizer) -> None:
    """One answer has ended, two are being made and one is refused; other paths do not count."""
    engine = FakeEngine(tokenizer, seconds_before_answer=1.0)
    with running(engine, ServerConfig(max_requests=2)) as url:
        assert post(url, {"messages": ASK}).status_code == 200
        for _ in range(5):
            post_to(url, "/tokenize", {"text": "a"})
        engine._seconds_before = 5.0
        threads = [threading.Thread(target=post, args=(url, {"messages": ASK})) for _ in range(2)]
        asked = time.monotonic()
        for thread in threads:
            thread.start()
        while len(engine.running) < 2:
            time.sleep(0.01)
        running_since = time.monotonic()
        time.sleep(1)
        least = 3 * (time.monotonic() - running_since)
        refused = post(url, {"messages": ASK})
        most = 3 * (time.monotonic() - asked) + 1
        assert refused.status_code == 429
        assert min(60, int(least)) <= int(refused.headers["retry-after"]) <= most
        for thread in threads:
            thread.join()
        engine._error = Overloaded("the queue is full")
        engine._seconds_before = 0.0
        refused = post(url, {"messages": ASK})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
