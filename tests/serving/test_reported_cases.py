"""Cases of public bug reports about servers that no other file shows, against the real engine."""

import ast
import base64
import contextlib
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxmm.engine import Engine
from jaxmm.host.chat import ChatTokenizer
from serving.config import FetchConfig, ServerConfig
from tests.chat_checkpoints import NO_IMAGES, write_checkpoint
from tests.engines import MEDIA, engine, on_loop, picture, png
from tests.fakes import FakeEngine
from tests.held import now_or_soon, quiet
from tests.serving.conftest import ASK, post, post_to, running
from tests.serving.media_host import media_host
from tests.serving.soak_server import resident_bytes
from tests.serving.test_clients import wait_until

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 20
UNREADABLE = ("cut.jpg", "cut.png", "empty.png", "page.png", "shape.svg", "zip.png")
LEAKS = ("0x", "object at", "Traceback", "/usr/", "/home/", "site-packages", ".py")


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asking(*urls: str, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    parts.append({"type": "text", "text": "What is it?"})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **fields}


@pytest.fixture(scope="module")
def on() -> Engine:
    return engine("qwen2_vl")


@pytest.fixture(scope="module")
def host() -> Any:
    with media_host() as host:
        yield host


@pytest.fixture(scope="module")
def real(on: Engine, host: Any) -> Any:
    """A server around a real engine, which may ask the media host."""
    fetch = FetchConfig(allowed_hosts=(f"127.0.0.1:{host.server_port}",))
    with running(on, ServerConfig(engine=on.config, fetch=fetch)) as url:
        yield url


# Pictures


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_is_no_picture_is_refused_before_a_stream_begins(
    real: str, host: Any, name: str
) -> None:
    data, at = (MEDIA / name).read_bytes(), f"http://127.0.0.1:{host.server_port}/media/{name}"
    for url in (uri(data), at):
        for stream in (False, True):
            answer = post(real, asking(uri(png(picture(56, 56))), url, stream=stream))
            assert answer.status_code == 400, answer.text
            message = answer.json()["error"]["message"]
            assert "image 2 of 2" in message or "content[1]" in message
            assert not any(leak in answer.text for leak in LEAKS)
    assert post(real, asking(uri(png(picture(56, 56))))).status_code == 200


def test_a_small_file_of_giant_size_costs_neither_time_nor_memory(real: str) -> None:
    """40000 x 40000 pixels in 195 kB; other clients are answered meanwhile."""
    body = asking(uri((MEDIA / "bomb.png").read_bytes()))
    post(real, body)
    before = resident_bytes()
    with ThreadPoolExecutor(5) as threads:
        start = time.monotonic()
        bombs = [threads.submit(post, real, body) for _ in range(4)]
        assert post(real, {"messages": ASK, "max_tokens": 1}).status_code == 200
        answers = [bomb.result() for bomb in bombs]
    assert time.monotonic() - start < PATIENCE_SECONDS
    assert {answer.status_code for answer in answers} == {400}
    assert all("1600000000 pixels" in answer.text or "limit" in answer.text for answer in answers)
    assert resident_bytes() - before < 200 << 20


def test_a_url_whose_content_changes_is_asked_again(tokenizer: Any, host: Any) -> None:
    fetch = FetchConfig(allowed_hosts=(f"127.0.0.1:{host.server_port}",))
    fake = FakeEngine(tokenizer)
    with running(fake, ServerConfig(fetch=fetch)) as url:
        for _ in range(2):
            body = asking(f"http://127.0.0.1:{host.server_port}/flip/camera")
            assert post(url, body).status_code == 200
    first, second = (request.images[0] for request in fake.requests)
    assert first != second


def test_a_template_that_drops_pictures_is_refused_with_both_counts(tmp_path: Path) -> None:
    """Also where two turns of the user follow each other."""
    directory = write_checkpoint(tmp_path, NO_IMAGES)
    fake = FakeEngine(ChatTokenizer.from_checkpoint(directory))
    with running(fake) as url:
        body = asking(uri(MEDIA.joinpath("size_384x384.png").read_bytes()))
        answer = post(url, body | {"messages": body["messages"] * 2})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "2 images and the chat template placed 0" in error["message"]
        assert error["code"] == "media_count_mismatch"
        assert post(url, {"messages": ASK}).status_code == 200


def test_sound_is_refused_by_its_name_and_the_models(on: Engine, real: str) -> None:
    data = base64.b64encode(b"RIFF\0\0\0\0WAVE").decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    answer = post(real, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"messages[0].content[0]: {on.model_name} takes no sound (input_a")


# Clients that leave


class Gate:
    """In place of what works on the device: lets steps through one by one when it is shut."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self._open = threading.Semaphore(0)
        self.is_shut = False
        self.num_steps = 0
        self.num_waiting = 0

    def dispatch(self, plan: Any) -> Any:
        if self.is_shut:
            self.num_waiting += 1
            assert self._open.acquire(timeout=PATIENCE_SECONDS)
            self.num_waiting -= 1
        self.num_steps += 1
        return self._dispatcher.dispatch(plan)

    def __getattr__(self, name: str) -> Any:  # what reads a step is not held up
        return getattr(self._dispatcher, name)

    def let_one_through(self) -> None:
        self._open.release()


@contextlib.contextmanager
def gate(on: Engine) -> Any:
    [replica] = on._loop._replicas
    dispatcher = replica._dispatcher
    made = Gate(dispatcher)
    on_loop(on, lambda: setattr(replica, "_dispatcher", made))
    try:
        yield made
    finally:
        made.is_shut = False
        made.let_one_through()
        on_loop(on, lambda: setattr(replica, "_dispatcher", dispatcher))


def connected(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent."""
    address, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((address, int(port)), timeout=PATIENCE_SECONDS)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_costs_no_step_but_the_one_in_progress(
    on: Engine, real: str, stream: bool
) -> None:
    before = quiet(on)
    url = uri(png(picture(84, 112)))
    with gate(on) as steps:
        connection = connected(
            real, asking(url, stream=stream, ignore_eos=True, max_tokens=900, temperature=0)
        )
        wait_until(lambda: steps.num_steps > 5)
        steps.is_shut = True
        wait_until(lambda: steps.num_waiting == 1)
        made = steps.num_steps
        connection.close()
        wait_until(lambda: on._loop._inbox.qsize() > 0)  # the server has noticed
        steps.let_one_through()
        wait_until(lambda: on.scheduler.num_running == 0)
        assert steps.num_steps == made + 1
        steps.is_shut = False
    assert quiet(on)["free pages"] == before["free pages"]


def test_clients_that_leave_at_all_moments_leave_nothing_behind(on: Engine, real: str) -> None:
    body = asking(uri(png(picture(112, 84))), ignore_eos=True, max_tokens=900)
    assert post(real, body | {"max_tokens": 2}).status_code == 200
    before = quiet(on)

    def leave(index: int) -> None:
        with connected(real, body | {"stream": index % 2 == 0, "n": 1 + index % 3}) as connection:
            if index % 2 == 0:
                connection.recv(100)
            else:
                time.sleep(0.1 * (index % 5))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(leave, range(40)))
    start = time.monotonic()
    wait_until(lambda: on.scheduler.num_running + on.scheduler.num_waiting == 0)
    assert time.monotonic() - start < 5
    own = {"descriptors": None, "threads": None}  # the server's connections, as they are
    assert now_or_soon(lambda: quiet(on) | own, before | own) == before | own


# What listens, and what is made of bytes


def _listening_ports() -> set[tuple[str, int]]:
    """Addresses at which this process listens, as /proc tells."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                address, port = fields[1].rsplit(":", 1)
                found.add((address, int(port, 16)))
    return found


def test_nothing_listens_but_the_server_and_it_on_loopback(on: Engine) -> None:
    before = _listening_ports()
    with running(on, ServerConfig(engine=on.config)) as url:
        [(address, port)] = _listening_ports() - before
    assert url.endswith(f":{port}") and address == "0100007F"  # 127.0.0.1, little-endian
    assert ServerConfig().host == "127.0.0.1"


UNSAFE = {
    *("pickle.loads", "pickle.load", "marshal.loads", "dill.loads", "joblib.load", "torch.load"),
    *("shelve.open", "yaml.load", "yaml.unsafe_load", "eval", "exec", "compile"),
}
ALLOWED = {
    ("jaxmm/host/decode_worker.py", "pickle.loads"),
    ("jaxmm/device/executables.py", "pickle.loads"),
}
"""A decoding process reads its setup from the parent that started it, by an anonymous socket; and
executables are read back from `compile_cache_dir`, the user's own. Neither is a request's."""


def test_no_object_is_made_of_bytes_that_others_send() -> None:
    found = set()
    for folder in ("jaxmm", "serving", "kernels_pallas"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func)
                    risky = name in UNSAFE or name.endswith(".recv_pyobj")
                    pickles = any(
                        k.arg == "allow_pickle" and ast.unparse(k.value) != "False"
                        for k in node.keywords
                    )
                    if risky or pickles:
                        found.add((str(path.relative_to(ROOT)), name))
    assert found == ALLOWED


# Answers to the end


def test_many_completions_and_their_sums(real: str) -> None:
    answer = post(real, asking(uri(png(picture(56, 56))), n=8, seed=3, ignore_eos=True)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert answer["usage"]["completion_tokens"] == 16
    refused = post(real, asking(uri(png(picture(56, 56))), n=100_000))
    assert refused.status_code == 400


def test_logprobs_of_a_stream_are_those_of_the_tokens_whatever_a_stop_string_holds_back(
    real: str,
) -> None:
    """Each token is told once, with its own; the text is what the tokens say, less the stop."""
    common = {"max_tokens": 24, "seed": 11, "logprobs": True, "top_logprobs": 2,
              "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    body = {"messages": ASK, **common}
    free = post(real, body).json()["choices"][0]
    text = free["message"]["content"]
    stop = text[len(text) // 2 :][:3]
    for extra in ({"stop": [stop]}, {"stop": [text + "!"]}):
        whole = post(real, body | extra).json()["choices"][0]
        events = post(real, body | extra | {"stream": True}).text.split("\n\n")
        chunks = [json.loads(e[6:])["choices"][0] for e in events if e.startswith("data: {")]
        assert (
            "".join(c["delta"].get("content") or "" for c in chunks)
            == (whole["message"]["content"])
        )
        assert [i for c in chunks for i in c["token_ids"]] == whole["token_ids"]
        entries = [e for c in chunks for e in (c["logprobs"] or {}).get("content") or ()]
        assert entries == whole["logprobs"]["content"]
        assert len(entries) == len(whole["token_ids"])


def test_health_is_asked_by_get_alone(real: str) -> None:
    assert post_to(real, "/health", b"").status_code == 405
    assert httpx.get(f"{real}/health").status_code == 200
