"""A connection that sends no request, or no end of one, does not live for ever."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest
import uvicorn

from serving import connection
from serving.config import ServerConfig
from serving.main import uvicorn_config
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, listening, post, running

PATIENCE_SECONDS = 15
BODY = json.dumps({"messages": ASK}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Seconds as fractions of one."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.5)
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)


@contextlib.contextmanager
def connected(url):
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
        yield client


def read_to_end(client):
    """What the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(65536):
            received += data
    return received


def read_answer(client):
    """One answer of status 200, whole."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += client.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    while len(body) < length:
        body += client.recv(65536)


def drip(client, piece, seconds_between):
    """Send the same again and again until the server closes; give the seconds that took."""
    start = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - start < PATIENCE_SECONDS:
            client.sendall(piece)
            time.sleep(seconds_between)
    return time.monotonic() - start


def test_a_connection_without_a_request_is_closed(url):
    with connected(url) as client:
        assert read_to_end(client) == b""


def test_a_head_that_comes_byte_by_byte_is_given_up(url):
    with connected(url) as client:
        client.sendall(HEAD)
        assert drip(client, b"a", 0.05) < PATIENCE_SECONDS


def test_a_head_without_end_is_refused_by_its_size(url):
    with connected(url) as client:
        client.sendall(HEAD + b"x-long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.sendall(b"a" * 10_000)
                time.sleep(0.002)
        answer = read_to_end(client)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")  # a reset may eat the answer


def test_requests_one_after_the_other_are_answered_however_their_bytes_are_cut(url):
    for size in (7, 100, 10_000):
        with connected(url) as client:
            for _ in range(3):
                for start in range(0, len(WHOLE), size):
                    client.sendall(WHOLE[start : start + size])
                    if size < 10_000:
                        time.sleep(0.001)
                answer = b""
                while b"chat.completion" not in answer:
                    answer += client.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")


def test_requests_sent_together_are_answered_in_turn(url):
    with connected(url) as client:
        client.sendall(WHOLE * 3)
        answers = b""
        while answers.count(b'"chat.completion"') < 3:
            answers += client.recv(65536)
        assert answers.count(b"HTTP/1.1 200") == 3


def test_a_line_end_behind_a_body_does_not_cut_the_answer_short(tokenizer):
    """Some old clients send one; time for the next head begins when the answer is complete."""
    with running(FakeEngine(tokenizer, seconds_before_answer=1.0)) as url, connected(url) as client:
        client.sendall(WHOLE)
        time.sleep(0.1)
        client.sendall(b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_a_body_that_goes_on_after_its_answer_is_cut_off(url):
    with connected(url) as client:
        client.sendall(HEAD + b"content-length: 99999999999\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")
        assert drip(client, b" " * 1000, 0.02) < PATIENCE_SECONDS


def test_a_head_of_many_headers_within_the_limit_is_taken(url):
    headers = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 100) for i in range(400))
    with connected(url) as client:
        client.sendall(HEAD + headers + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert post(url, BODY).status_code == 200


def test_a_client_that_reads_nothing_is_cut_off_and_its_request_aborted(tokenizer):
    """20 logprobs a token fill every buffer between the two."""
    engine = FakeEngine(tokenizer)
    body = {"messages": ASK, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    body = json.dumps(body | {"logprobs": True, "top_logprobs": 20}).encode()
    with running(engine) as url, connected(url) as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not engine.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.aborted and not engine.running
        assert engine.num_tokens < 100_000
        assert post(url, BODY).status_code == 200


class Holding(FakeEngine):
    """Holds up the whole event loop at its first request, as a pause of the process would."""

    async def astream(self, request):
        if not self.requests:
            time.sleep(1.5)
        async for delta in super().astream(request):
            yield delta


def test_a_request_that_came_while_the_server_was_held_up_is_answered(tokenizer):
    """Its time for a head was over before it could be read."""
    with running(Holding(tokenizer)) as url, connected(url) as client:
        threading.Thread(target=post, args=(url, BODY)).start()
        time.sleep(0.3)
        client.sendall(WHOLE)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_where_there_is_no_room_the_connection_that_is_idle_longest_is_closed(url, monkeypatch):
    """And one that is not idle never is."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", PATIENCE_SECONDS)  # the busy one takes longer
    with connected(url) as first, connected(url) as second, connected(url) as busy:
        busy.sendall(WHOLE[:50])
        for client in (first, second):
            client.sendall(WHOLE)
            read_answer(client)  # to its end: it is idle from then on
        time.sleep(0.1)
        monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
        with connected(url) as third:
            third.sendall(WHOLE)
            read_answer(third)
            assert read_to_end(first) == b""
            second.sendall(WHOLE)
            read_answer(second)
            time.sleep(0.1)
            with connected(url) as fourth:
                fourth.sendall(WHOLE)
                read_answer(fourth)
        busy.sendall(WHOLE[50:])
        read_answer(busy)


def test_a_connection_is_kept_for_longer_than_load_balancers_keep_it(tokenizer):
    assert uvicorn_config(FakeEngine(tokenizer), ServerConfig()).timeout_keep_alive > 600
    config = ServerConfig(keep_alive_seconds=1)
    with running(FakeEngine(tokenizer), config) as url, connected(url) as client:
        client.sendall(WHOLE)
        start = time.monotonic()
        assert read_to_end(client).startswith(b"HTTP/1.1 200")
        assert 0.5 < time.monotonic() - start < PATIENCE_SECONDS


def test_a_head_that_begins_on_a_kept_connection_has_the_time_of_any_head(url):
    """Also where the answer came before the end of the body, which sets another timer."""
    with connected(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall(b"body")
        time.sleep(0.1)
        client.sendall(b"POST /v1")
        read_to_end(client)  # a server that keeps it lets this time out


def test_a_head_that_begins_before_the_answer_to_another_has_its_time_after_it(tokenizer):
    with running(FakeEngine(tokenizer, seconds_before_answer=1.0)) as url, connected(url) as client:
        client.sendall(WHOLE)
        time.sleep(0.1)
        client.sendall(b"POST /v1")
        assert read_to_end(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("num_answers", [0, 2])
def test_a_request_that_is_unread_when_the_server_ends_is_answered(tokenizer, num_answers):
    server = uvicorn.Server(uvicorn_config(FakeEngine(tokenizer), ServerConfig()))
    with listening(server) as url, connected(url) as client:
        for _ in range(num_answers):
            client.sendall(WHOLE)
            read_answer(client)
        while not server.server_state.connections:
            time.sleep(0.01)
        (taken,) = server.server_state.connections

        def end_with_a_request_in_the_socket():
            client.sendall(WHOLE)
            taken.shutdown()

        taken.loop.call_soon_threadsafe(end_with_a_request_in_the_socket)
        head, _, body = read_to_end(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head
        assert json.loads(body)["choices"]
