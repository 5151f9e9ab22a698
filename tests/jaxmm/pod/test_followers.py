"""Followers as process 0 sees them; the one at the other end is played by the test.

A failure ends the process three seconds later: what fails is run in a process of its own.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmm.pod.channel import Channel
from jaxmm.pod.followers import Followers
from jaxmm.pod.messages import Kind, pack_arrays
from jaxmm.pod.track import DONE, REPLICA

ROOT = Path(__file__).parents[3]
KEY = bytes(32)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


class Played:
    """A follower: answers beats while `alive`, and keeps what else it is told."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.alive, self.leaving = channel, True, False
        self.told: list[tuple[Kind, bytes]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            kind, payload = self.channel.receive()
            if kind is Kind.BEAT:
                if self.alive:
                    self.channel.send(Kind.ALIVE, [bytes([self.leaving])])
                continue
            self.told.append((kind, payload))
            if kind is Kind.END:
                return


@pytest.fixture
def played() -> Iterator[tuple[Followers, list[Played], list[str]]]:
    left: list[str] = []
    channels, others = {}, []
    for process_id in (1, 2):
        one, other = tcp_pair()
        channels[process_id] = Channel(one, KEY, f"process {process_id}")
        others.append(Played(Channel(other, KEY, "process 0")))
    followers = Followers(channels, silence_seconds=2, step_seconds=2, on_leave=left.append)
    yield followers, others, left
    followers.end("")
    followers.close()


def wait_for(true: Any, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def test_all_are_told_the_same_and_one_what_is_for_it_alone(played: Any) -> None:
    followers, others, _ = played
    followers.tell(Kind.STEP, [b"plan"])
    followers.tell_one(2, Kind.ENCODE, [b"pixels"])
    wait_for(lambda: len(others[0].told) == 1 and len(others[1].told) == 2)
    assert others[0].told == [(Kind.STEP, b"plan")]
    assert others[1].told == [(Kind.STEP, b"plan"), (Kind.ENCODE, b"pixels")]


def test_the_pod_is_ready_when_all_are(played: Any) -> None:
    followers, others, _ = played
    waiting = threading.Thread(target=followers.wait_ready)
    waiting.start()
    others[0].channel.send(Kind.READY)
    waiting.join(0.3)
    assert waiting.is_alive()
    others[1].channel.send(Kind.READY)
    waiting.join(5)
    assert not waiting.is_alive()
    wait_for(lambda: all(other.told == [(Kind.READY, b"")] for other in others))


def test_steps_that_all_agree_on_are_forgotten(played: Any) -> None:
    followers, others, _ = played
    track = followers.track(0, (0, 1, 2))
    for step in range(3):
        track.began(step)
        track.finished(step, b"%016d" % step)
        for other in others:
            other.channel.send(Kind.DONE, [DONE.pack(0, step, b"%016d" % step)])
    wait_for(lambda: track.num_open == 0)
    assert followers.failure is None


def test_a_replica_is_told_and_heard_on_its_own_processes_alone(played: Any) -> None:
    followers, others, _ = played
    heard: list[Any] = []
    first, second = followers.track(0, (0, 1)), followers.track(1, (2,), heard.append)
    first.tell(Kind.STEP, [b"a"])
    second.tell(Kind.STEP, [b"b"])
    wait_for(lambda: others[0].told and others[1].told)
    assert others[0].told == [(Kind.STEP, REPLICA.pack(0) + b"a")]
    assert others[1].told == [(Kind.STEP, REPLICA.pack(1) + b"b")]
    tokens = np.arange(3, dtype=np.int32)
    others[1].channel.send(Kind.RESULT, [REPLICA.pack(1), *pack_arrays([tokens])])
    wait_for(lambda: heard)
    np.testing.assert_array_equal(heard[0][0], tokens)


def test_a_follower_that_was_asked_to_end_is_told_of_once(played: Any) -> None:
    _, others, left = played
    others[1].leaving = True
    wait_for(lambda: left)
    time.sleep(0.6)
    assert left == ["process 2"]


FAILING = """
import socket, sys, threading, time
sys.path.insert(0, {root!r})
import logging
logging.basicConfig(level="INFO", stream=sys.stdout)
from tests.jaxmm.pod.test_followers import *

channels, others = {{}}, []
for process_id in (1, 2):
    one, other = tcp_pair()
    channels[process_id] = Channel(one, KEY, f"process {{process_id}}")
    others.append(Played(Channel(other, KEY, "process 0")))
followers = Followers(channels, silence_seconds=1, step_seconds=1, on_leave=print)
heard = []
followers.on_failure(heard.append)
for other in others:
    other.channel.send(Kind.READY)
followers.wait_ready()
track = followers.track(0, (0, 1, 2))
{act}
start = time.monotonic()
wait_for(lambda: heard)
wait_for(lambda: others[0].told and others[0].told[-1][0] is Kind.END)
print("seconds", time.monotonic() - start)
print("told", others[0].told[-1][1].decode())
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("others[1].channel.close()", "process 2 was lost: the connection was closed"),
        ("others[1].alive = False", "process 2 was lost: no word from it for 1 s"),
        (
            "track.began(0); track.finished(0, bytes(16)); "
            "others[0].channel.send(Kind.DONE, [DONE.pack(0, 0, bytes(16))])",
            "process 2 did not finish step 0 in 1 s",
        ),
        (
            "track.began(0); track.finished(0, bytes(16)); "
            "others[1].channel.send(Kind.DONE, [DONE.pack(0, 0, b'1' * 16)])",
            "process 2 came to other tokens than process 0 by step 0",
        ),
    ],
    ids=["closed", "silent", "slow", "diverged"],
)
def test_who_is_at_fault_is_named_to_all_and_the_process_ends(act: str, problem: str) -> None:
    program = FAILING.format(root=str(ROOT), act=act)
    start = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert f"the pod ends: {problem}" in ran.stdout
    assert f"told {problem}" in ran.stdout
    assert time.monotonic() - start < 20
