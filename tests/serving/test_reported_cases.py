"""Cases of public bug reports about servers that no other file shows, against the real engine."""

import ast
import base64
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxmm.engine import Engine
from serving.config import FetchConfig, ServerConfig
from tests.engines import MEDIA, engine, picture, png
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post, running
from tests.serving.media_host import media_host
from tests.serving.soak_server import resident_bytes

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


def test_sound_is_refused_by_its_name(real: str) -> None:
    data = base64.b64encode(b"RIFF\0\0\0\0WAVE").decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    answer = post(real, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("messages[0].content[0]: the model served here takes no sound (input")


# What is made of bytes

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
