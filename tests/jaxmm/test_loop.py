"""Which replica the loop gives a request to; nothing is planned here."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxmm.host.scoring import Scoring
from jaxmm.loop import Loop
from tests.jaxmm.host.prompts import steps_of
from tests.jaxmm.host.test_scheduler import build, sequence_of


@pytest.fixture
def loop() -> Loop:
    return Loop([SimpleNamespace(scheduler=build()[0].scheduler) for _ in range(2)])  # type: ignore[misc]


def scoring(names: str) -> Scoring:
    return Scoring([steps_of(names, 4)], "", lambda _: None, num_tokens=20)


def start(loop: Loop, name: str, home: int | None) -> None:
    answer: Any = SimpleNamespace(
        home=home,
        sequences=[sequence_of([1] * 20, name=name)],
        request=SimpleNamespace(id=name, keep=None),
    )
    loop.enter(answer)
    loop.start(answer)


def waiting(loop: Loop) -> list[int]:
    return [replica.scheduler.num_waiting for replica in loop._replicas]


def test_videos_that_are_scored_are_spread_over_the_replicas(loop: Loop) -> None:
    assert [loop.score(scoring(names)) for names in ("abcdef", "uv", "xy")] == [0, 1, 1]


def test_requests_go_where_fewer_videos_are_scored(loop: Loop) -> None:
    loop.score(scoring("abcd"))
    for name in "pq":
        start(loop, name, None)
    assert waiting(loop) == [0, 2]


def test_a_request_is_served_where_its_videos_were_scored_whatever_has_come_since(
    loop: Loop,
) -> None:
    home = loop.score(scoring("ab"))
    for name in "pqr":
        start(loop, name, home)
    assert waiting(loop)[home] == 3
    start(loop, "scored", home)
    assert waiting(loop)[home] == 4
    start(loop, "other", None)
    assert waiting(loop)[1 - home] == 1
