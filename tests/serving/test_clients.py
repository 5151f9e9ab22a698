"""Clients that go away, read slowly or are many."""

import asyncio
import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serving.config import ServerConfig
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post, running


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in 20 s"
        time.sleep(0.01)


def endless(**fields):
    return {"messages": ASK, "max_tokens": 100_000, "ignore_eos": True, **fields}


@contextlib.contextmanager
def raw_request(url, body):
    """Send a request over a plain socket; give the socket."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n\r\n"
    with contextlib.closing(socket.create_connection((host, int(port)))) as connection:
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(tokenizer, stream):
    engine = FakeEngine(tokenizer, seconds_per_token=0.01)
    with running(engine) as url:
        with raw_request(url, endless(stream=stream)) as connection:
            if stream:
                assert b"200 OK" in connection.recv(100)
            wait_until(lambda: engine.num_tokens > 3)
        wait_until(lambda: engine.aborted)
        assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_before_the_first_token_aborts_too(tokenizer, stream):
    engine = FakeEngine(tokenizer, seconds_before_answer=60)
    with running(engine) as url:
        with raw_request(url, endless(stream=stream)):
            wait_until(lambda: engine.running)
        wait_until(lambda: engine.aborted)


def test_a_reader_that_stalls_is_aborted_at_the_deadline(tokenizer):
    engine = FakeEngine(tokenizer)
    with running(engine, ServerConfig(deadline_seconds=0.5)) as url:
        with raw_request(url, endless(stream=True)):
            wait_until(lambda: engine.aborted)
        assert not engine.running


def test_a_slow_reader_gets_fewer_events_and_the_whole_text(tokenizer):
    engine = FakeEngine(tokenizer)
    body = endless(stream=True, return_token_ids=True) | {"max_tokens": 4_000}
    ids, num_events = [], 0
    with (
        running(engine) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
                num_events += 1
                time.sleep(0.01 if num_events < 20 else 0)
    answer = engine.tokenizer.encode_text("A red square. 図 😀").tolist()
    assert ids == [answer[k % len(answer)] for k in range(4_000)]
    assert num_events < 4_000


def test_many_clients_at_once_are_all_answered_and_health_stays_quick(tokenizer):
    engine = FakeEngine(tokenizer, seconds_per_token=0.01)

    async def run(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as client:
            send = [client.post("/v1/chat/completions", json={"messages": ASK}) for _ in range(50)]
            answers = asyncio.gather(*send)
            await asyncio.sleep(0.05)
            start = time.perf_counter()
            health = await client.get("/health")
            return await answers, health, time.perf_counter() - start

    with running(engine) as url:
        answers, health, seconds = asyncio.run(run(url))
    texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
    assert texts == {"A red square. 図 😀"}
    assert health.status_code == 200 and seconds < 10
    assert not engine.running and not engine.aborted


def test_a_server_that_ends_lets_running_requests_finish(tokenizer):
    engine = FakeEngine(tokenizer, seconds_per_token=0.05)
    with ThreadPoolExecutor() as pool:
        with running(engine) as url:
            answer = pool.submit(post, url, {"messages": ASK})
            wait_until(lambda: engine.running)
        assert answer.result().json()["choices"][0]["finish_reason"] == "stop"


def test_requests_that_outlast_the_drain_are_aborted_and_told(tokenizer):
    engine = FakeEngine(tokenizer, seconds_per_token=0.01)
    with ThreadPoolExecutor() as pool:
        with running(engine, ServerConfig(drain_seconds=1)) as url:
            streamed = pool.submit(post, url, endless(stream=True))
            whole = pool.submit(post, url, endless())
            wait_until(lambda: len(engine.running) == 2)
        events = streamed.result().text.strip().split("\n\n")
        assert json.loads(events[0].removeprefix("data: "))["choices"]
        last = json.loads(events[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_stopped"
        assert "shutting down" in last["error"]["message"]
        assert whole.result().status_code == 503
        assert "shutting down" in whole.result().json()["error"]["message"]
    wait_until(lambda: len(engine.aborted) == 2)
    assert not engine.running
