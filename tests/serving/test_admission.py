"""Floods, large bodies and slow ones are refused before they cost anything."""

import base64
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serving.config import ServerConfig
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post, running

PATIENCE_SECONDS = 15
PICTURE = "data:image/png;base64," + base64.b64encode(bytes(30_000)).decode()


def with_pictures(count, url=PICTURE):
    parts = [{"type": "image_url", "image_url": {"url": url}}] * count
    return {"messages": [{"role": "user", "content": parts}]}


def raw(url, *pieces, seconds_between=0.0):
    """Send bytes as they stand; give the first line of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(seconds_between)
            while b"\r\n\r\n" not in answer and (data := connection.recv(65536)):
                answer += data
        except ConnectionError:
            pass
        return answer.split(b"\r\n", 1)[0]


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


def test_a_body_beyond_the_limit_is_refused_by_what_it_declares(tokenizer):
    with running(FakeEngine(tokenizer), ServerConfig(max_request_bytes=1000)) as url:
        start = time.monotonic()
        status = raw(url, HEAD + b"content-length: 100000000\r\n\r\n")
        assert status == b"HTTP/1.1 413 Request Entity Too Large"
        assert time.monotonic() - start < PATIENCE_SECONDS


def test_a_body_without_a_length_is_refused_as_it_comes(tokenizer):
    chunk = b"800\r\n" + b" " * 0x800 + b"\r\n"
    with running(FakeEngine(tokenizer), ServerConfig(max_request_bytes=10_000)) as url:
        status = raw(url, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 10)
        assert status == b"HTTP/1.1 413 Request Entity Too Large"
        body = json.dumps({"messages": ASK}).encode()
        assert httpx.post(f"{url}/v1/chat/completions", content=iter([body])).status_code == 200


def test_a_body_that_does_not_come_is_given_up(tokenizer):
    with running(FakeEngine(tokenizer), ServerConfig(receive_seconds=0.3)) as url:
        status = raw(url, HEAD + b"content-length: 100\r\n\r\n", b"{", b'"', b"a")
        assert status == b"HTTP/1.1 408 Request Timeout"


def test_requests_beyond_the_limit_get_429_and_the_others_are_answered(tokenizer):
    engine = FakeEngine(tokenizer, seconds_before_answer=1.0)
    with running(engine, ServerConfig(max_requests=3)) as url:
        with ThreadPoolExecutor(10) as threads:
            answers = list(threads.map(lambda _: post(url, {"messages": ASK}), range(10)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 3 + [429] * 7
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert "3 requests are in progress" in refused.json()["error"]["message"]
        assert post(url, {"messages": ASK}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_bytes_of_all_requests_together_are_limited_and_given_back(tokenizer):
    """One body of 40 kB and its 30 kB of picture fit; a second one beside it does not."""
    engine = FakeEngine(tokenizer, seconds_before_answer=1.0)
    with running(engine, ServerConfig(max_held_bytes=100_000)) as url:
        first = threading.Thread(target=post, args=(url, with_pictures(1)))
        first.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not engine.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        second = post(url, with_pictures(1))
        assert (second.status_code, second.json()["error"]["code"]) == (429, "overloaded")
        assert "max_held_bytes" in second.json()["error"]["message"]
        first.join(PATIENCE_SECONDS)
        for _ in range(5):
            assert post(url, with_pictures(1)).status_code == 200
        assert post(url, with_pictures(3)).status_code == 429  # alone, and still too much


def test_too_many_pictures_are_refused_before_any_is_fetched(url, engine):
    limit = ServerConfig().engine.media.max_items
    response = post(url, with_pictures(limit + 1, "http://127.0.0.1:1/never-asked"))
    assert response.status_code == 400
    assert (
        f"{limit + 1} images and videos; the limit is {limit}"
        in response.json()["error"]["message"]
    )
    assert post(url, with_pictures(limit)).status_code == 200


def test_a_body_of_nothing_but_values_is_refused_at_once(url):
    body = b'{"messages": [' + b"{}," * 300_001 + b"{}]}"
    start = time.monotonic()
    response = post(url, body)
    assert response.status_code == 400 and "more than 300000 values" in response.text
    assert time.monotonic() - start < PATIENCE_SECONDS


@pytest.mark.parametrize("declared", [b"-1", b"1e9", b"99999999999999999999999", b"5, 5", b"x"])
def test_a_length_that_is_none_is_a_bad_request(url, declared):
    status = raw(url, HEAD + b"content-length: " + declared + b"\r\n\r\n{}")
    assert status.split()[1] in (b"400", b"413")
    assert post(url, {"messages": ASK}).status_code == 200
