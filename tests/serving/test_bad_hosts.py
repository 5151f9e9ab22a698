"""Hosts that misbehave cost their own requests alone, each a 400 that names the host."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serving.config import FetchConfig, ServerConfig
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post, running
from tests.serving.media_host import media_host

TIMEOUT_SECONDS = 2.0
PATIENCE_SECONDS = 15  # a busy machine's


@pytest.fixture(scope="module")
def host():
    with media_host() as host:
        yield host


@pytest.fixture(scope="module")
def trusting(tokenizer, host):
    """A server that may ask the host, for two seconds."""
    fetch = FetchConfig(
        allowed_hosts=(f"127.0.0.1:{host.server_port}",), timeout_seconds=TIMEOUT_SECONDS
    )
    with running(FakeEngine(tokenizer), ServerConfig(fetch=fetch)) as url:
        yield url


def about(kind, **fields):
    """A request with one part that is not text."""
    return {"messages": [{"role": "user", "content": [{"type": kind, **fields}]}]}


def picture_at(host, path):
    url = f"http://127.0.0.1:{host.server_port}/{path}"
    return about("image_url", image_url={"url": url})


@pytest.mark.parametrize(
    ("path", "problem"),
    [("status/404?key=secret", "answered 404"), ("status/403", "answered 403"),
     ("status/500", "answered 500"), ("short", "could not be read"),
     ("redirect?to=http://10.0.0.1/secret", "is not among fetch.allowed_hosts")],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_that_cannot_be_had_is_a_bad_request(trusting, host, path, problem, stream):
    response = post(trusting, picture_at(host, path) | {"stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (
        "media_fetch_failed",
        "messages[0].content[0].image_url",
    )
    assert error["message"].startswith("messages[0].content[0].image_url: host ")
    assert problem in error["message"] and "secret" not in response.text


def test_hosts_that_hang_hold_up_nobody_else(trusting, host):
    """Sixteen requests to them, text and health beside."""
    with ThreadPoolExecutor(16) as threads:
        start = time.monotonic()
        paths = ["hang", "trickle"] * 8
        stuck = [
            threads.submit(post, trusting, picture_at(host, f"{path}?{i}"))
            for i, path in enumerate(paths)
        ]
        time.sleep(0.3)
        asked = time.monotonic()
        assert post(trusting, {"messages": ASK}).status_code == 200
        assert httpx.get(f"{trusting}/health").status_code == 200
        answered = time.monotonic()
        assert not any(one.done() for one in stuck) or answered - start > TIMEOUT_SECONDS
        answers = [one.result(PATIENCE_SECONDS) for one in stuck]
        assert time.monotonic() - start < TIMEOUT_SECONDS + PATIENCE_SECONDS
    assert {answer.status_code for answer in answers} == {400}
    assert all("did not answer in 2 s" in answer.text for answer in answers)
    assert answered - asked < PATIENCE_SECONDS


@pytest.mark.parametrize(
    "body",
    [about("video_url", video_url={"url": "http://127.0.0.1:1/a.mp4"}),
     about("video_url", video_url={"url": "data:video/jpeg;base64,AAAA,AAAA"}),
     about("input_audio", input_audio={"data": "AAAA", "format": "flac"}),
     about("audio_url", audio_url={"url": "file:///etc/hostname"}),
     about("file", file={"file_id": "a"})],
    ids=["video", "frames", "audio", "audio url", "file"],
)  # fmt: skip
def test_parts_that_cannot_be_served_are_refused_by_name(trusting, host, body):
    host.hits.clear()
    response = post(trusting, body)
    assert response.status_code == 400
    assert "messages[0].content[0]" in response.json()["error"]["message"]
    assert host.hits == []


def test_a_client_that_leaves_while_its_picture_is_fetched_ends_the_fetch(trusting, host):
    host.hits.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{trusting}/v1/chat/completions", json=picture_at(host, "hang?left"), timeout=0.5
        )
    assert post(trusting, {"messages": ASK}).status_code == 200
