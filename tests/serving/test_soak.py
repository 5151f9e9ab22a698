"""A crowd gets right answers alone, and leaves nothing behind; the server ends when it is told."""

import asyncio

import pytest

from tests.held import now_or_soon
from tests.serving.soak import Crowd, SoakServer

NUM_REQUESTS = 250
NUM_CLIENTS = 16
MAX_WAITING = 24
FLOOD = 120
"""Requests sent together: more than run, wait and are being prepared."""


async def crowd(url: str, seed: int, num_requests: int, num_clients: int) -> Crowd:
    """Send requests and close all connections."""
    made = Crowd(url, seed)
    try:
        await made.run(num_requests, num_clients)
    finally:
        await made.aclose()
    return made


@pytest.mark.slow
def test_a_crowd_gets_right_answers_and_leaves_nothing_behind() -> None:
    server = SoakServer(max_waiting=MAX_WAITING, log_format="json")
    try:
        asyncio.run(crowd(server.url, 1, 20, 4))  # what is made once, is made
        before = server.tell("held")
        many = asyncio.run(crowd(server.url, 2, NUM_REQUESTS, NUM_CLIENTS))
        flood = asyncio.run(crowd(server.url, 3, FLOOD, FLOOD))
        assert many.wrong == [] and flood.wrong == []
        assert many.outcomes["answered"] > NUM_REQUESTS / 2
        assert min(many.outcomes[k] for k in ("given up", "corrupt", "malformed", "intruders")) > 0
        assert flood.outcomes["refused"] > 0 and flood.outcomes["answered"] >= MAX_WAITING // 2
        assert now_or_soon(lambda: server.tell("held"), before) == before
        server.tell("kill")  # an idle decoding process: nobody notices
        after = asyncio.run(crowd(server.url, 4, 20, 4))
        assert after.wrong == []
        assert now_or_soon(lambda: server.tell("held"), before) == before
        assert server.end() == 0
    finally:
        server.kill()
    log = "".join(server.errors)
    assert '"level": "error"' not in log and "Traceback" not in log
    assert '"status": 5' not in log
    assert "event loop held" not in log  # by more than 50 ms of processor time
    assert not any(key in log for key in ("first-soak-key", "data:image"))
