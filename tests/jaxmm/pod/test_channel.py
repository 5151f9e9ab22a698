"""Channels: both ends prove that they have the key, and no frame is lost, changed or added."""

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxmm.errors import PeerLost
from jaxmm.pod.channel import Channel, greet_follower, greet_leader
from jaxmm.pod.messages import Kind

KEY = bytes(range(32))
FRAME = struct.Struct("<IBQ")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            yield one, other


@pytest.fixture
def channels(ends: Any) -> tuple[Channel, Channel]:
    return Channel(ends[0], KEY, "the leader"), Channel(ends[1], KEY, "process 1")


def greet(key: bytes, *, about: bytes = b"about", other_key: bytes = KEY) -> tuple[Any, Any]:
    """Let both ends greet each other; what each of them gives, or the error."""
    given: list[Any] = [None, None]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def follow() -> None:
            try:
                given[1] = greet_leader(address, other_key, 3, about, 5)
            except PeerLost as error:
                given[1] = error

        thread = threading.Thread(target=follow)
        thread.start()
        connection, _ = listener.accept()
        with connection:
            given[0] = greet_follower(connection, key)
        thread.join(10)
    return given[0], given[1]


def test_frames_arrive_in_order_with_their_parts_joined(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    one.send(Kind.BEAT)
    one.send(Kind.STEP, [b"ab", memoryview(b"cd")])
    other.send(Kind.DONE, [b"x"])
    assert other.receive() == (Kind.BEAT, b"")
    assert other.receive() == (Kind.STEP, b"abcd")
    assert one.receive() == (Kind.DONE, b"x")


def test_a_frame_larger_than_what_the_system_takes_at_once_arrives(
    channels: tuple[Channel, Channel],
) -> None:
    one, other = channels
    parts = [bytes([i]) * 3_000_001 for i in range(4)]
    thread = threading.Thread(target=one.send, args=(Kind.ENCODE, parts))
    thread.start()
    assert other.receive() == (Kind.ENCODE, b"".join(parts))
    thread.join(10)


def test_who_closes_is_named(channels: tuple[Channel, Channel]) -> None:
    one, other = channels
    one.close()
    with pytest.raises(PeerLost, match="process 1 was lost: the connection was closed"):
        other.receive()


def test_who_says_nothing_is_named_in_time(channels: tuple[Channel, Channel]) -> None:
    other = channels[1]
    other.set_timeout(0.05)
    with pytest.raises(PeerLost, match="process 1 was lost: no word from it in time"):
        other.receive()


def test_who_takes_nothing_is_named_in_time(channels: tuple[Channel, Channel]) -> None:
    one = channels[0]
    one.set_timeout(0.05)
    with pytest.raises(PeerLost, match="the leader was lost"):
        for _ in range(100):
            one.send(Kind.STEP, [bytes(1 << 20)])


def test_a_frame_with_another_key_is_refused(ends: Any) -> None:
    Channel(ends[0], bytes(32), "a stranger").send(Kind.STEP, [b"plan"])
    with pytest.raises(PeerLost, match="damaged, or not from it"):
        Channel(ends[1], KEY, "process 0").receive()


def test_a_frame_that_was_changed_is_refused(ends: Any) -> None:
    ends[0].sendall(FRAME.pack(4, Kind.STEP, 0) + b"plan" + bytes(16))
    with pytest.raises(PeerLost, match="damaged"):
        Channel(ends[1], KEY, "process 0").receive()


def test_a_frame_that_is_repeated_is_refused(ends: Any) -> None:
    recorded, replay = socket.socketpair()
    with recorded, replay:
        Channel(ends[0], KEY, "process 0").send(Kind.STEP, [b"plan"])
        frame = ends[1].recv(1000)
        ends[0].sendall(frame + frame)
        channel = Channel(ends[1], KEY, "process 0")
        assert channel.receive() == (Kind.STEP, b"plan")
        with pytest.raises(PeerLost, match="frame 0 where 1 was due"):
            channel.receive()


def test_a_length_that_no_frame_has_is_refused_before_memory_is_taken(ends: Any) -> None:
    ends[0].sendall(FRAME.pack(2**32 - 1, Kind.STEP, 0))
    with pytest.raises(PeerLost, match="which none has"):
        Channel(ends[1], KEY, "process 0").receive()


def test_both_ends_with_the_key_know_each_other() -> None:
    greeted, channel = greet(KEY)
    assert greeted == (3, b"about")
    assert isinstance(channel, Channel)
    channel.close()


def test_a_follower_without_the_key_is_not_let_in_and_believes_nobody() -> None:
    greeted, error = greet(KEY, other_key=bytes(32))
    assert greeted is None
    assert isinstance(error, PeerLost) and "is not process 0" in str(error)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(1000)])
def test_who_speaks_otherwise_is_not_let_in(ends: Any, said: bytes) -> None:
    ends[0].sendall(said)
    ends[0].shutdown(socket.SHUT_WR)
    assert greet_follower(ends[1], KEY) is None


def test_nobody_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(PeerLost, match=r"process 0 cannot be reached at 127\.0\.0\.1"):
        greet_leader(address, KEY, 1, b"", 1)
