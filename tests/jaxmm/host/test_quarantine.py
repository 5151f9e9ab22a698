"""A file is refused from its offence until its time is over, and no other with it."""

import pytest

from jaxmm.errors import MediaError
from jaxmm.host.quarantine import Quarantine

TASK = b"image"


class Clock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(where: Quarantine, data: bytes) -> bool:
    try:
        where.check(TASK, data)
    except MediaError:
        return True
    return False


def test_a_file_is_refused_until_its_time_is_over() -> None:
    clock = Clock()
    where = Quarantine(10.0, clock=clock)
    assert not refused(where, b"a")
    where.add(TASK, b"a")
    assert refused(where, b"a") and not refused(where, b"b")
    clock.now += 9.9
    assert refused(where, b"a")
    clock.now += 0.1
    assert not refused(where, b"a")
    assert len(where) == 0


def test_a_second_offence_begins_the_time_anew() -> None:
    clock = Clock()
    where = Quarantine(10.0, clock=clock)
    where.add(TASK, b"a")
    clock.now += 5
    where.add(TASK, b"b")
    where.add(TASK, b"a")
    clock.now += 6
    assert refused(where, b"a") and refused(where, b"b")
    clock.now += 4
    assert not refused(where, b"a") and not refused(where, b"b")


def test_the_message_says_for_how_long_and_nothing_of_the_file() -> None:
    where = Quarantine(10.0, clock=Clock())
    where.add(TASK, b"secret")
    with pytest.raises(MediaError, match="refused for 10 more seconds") as error:
        where.check(TASK, b"secret")
    assert "secret" not in str(error.value)


def test_zero_seconds_refuse_nothing() -> None:
    where = Quarantine(0.0, clock=Clock())
    where.add(TASK, b"a")
    assert not refused(where, b"a")


def test_the_oldest_is_forgotten_beyond_the_capacity() -> None:
    where = Quarantine(10.0, capacity=2, clock=Clock())
    for data in (b"a", b"b", b"c"):
        where.add(TASK, data)
    assert [refused(where, data) for data in (b"a", b"b", b"c")] == [False, True, True]


def test_what_is_asked_of_a_file_is_part_of_the_offence() -> None:
    where = Quarantine(10.0, clock=Clock())
    where.add(b"clip", b"a")
    where.add(b"ab", b"c")
    where.check(b"image", b"a")
    where.check(b"a", b"bc")
    with pytest.raises(MediaError, match="refused"):
        where.check(b"clip", b"a")
