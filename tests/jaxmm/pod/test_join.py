"""Process 0 waits for the others; these are played by the test."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxmm.config import PodConfig
from jaxmm.errors import ConfigError, PeerLost
from jaxmm.pod.channel import greet_leader
from jaxmm.pod.join import Meeting
from jaxmm.pod.messages import Kind

KEY, SAME, OTHER = bytes(32), bytes(32) + b"here", bytes([1] * 32) + b"here"


def come(abouts: list[bytes], address: tuple[str, int]) -> list[tuple[Kind, str]]:
    """Connect as followers, one after the other, and hear what process 0 says first."""
    channels = [greet_leader(address, KEY, i, about, 5) for i, about in enumerate(abouts, 1)]
    heard = [channel.receive() for channel in channels]
    for channel in channels:
        channel.close()
    return [(kind, payload.decode()) for kind, payload in heard]


@pytest.mark.parametrize(
    ("abouts", "seconds", "error", "words"),
    [
        ([SAME], 1.0, PeerLost, "process 2 did not connect within 1 s"),
        ([SAME, OTHER], 30.0, ConfigError, "process 2 .* serves another model"),
    ],
)
def test_those_who_came_are_told_why_the_pod_ends_before_it_began(
    abouts: list[bytes], seconds: float, error: type[Exception], words: str
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = ("127.0.0.1", listener.getsockname()[1])
    meeting = Meeting(KEY, address, SAME, listener, num_processes=3, seconds=seconds)
    with ThreadPoolExecutor(1) as threads:
        heard = threads.submit(come, abouts, address)
        with pytest.raises(error, match=words) as raised:
            meeting.to_followers(PodConfig())
    assert heard.result() == [(Kind.END, str(raised.value))] * len(abouts)
