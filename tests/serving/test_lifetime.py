"""The server ends when it is told to or its engine has, with the cause, and never hangs."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serving import lifetime
from serving.config import ServerConfig
from serving.lifetime import Server
from serving.main import uvicorn_config
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, listening, post

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 30
PROGRAM = """
import sys, threading, time
from pathlib import Path
from jaxmm.host.chat import ChatTokenizer
from serving.cli import main
from tests.chat_checkpoints import write_checkpoint
from tests.fakes import FakeEngine

engine = FakeEngine(ChatTokenizer.from_checkpoint(write_checkpoint(Path(sys.argv[1]))),
                    seconds_before_answer=1.0, seconds_per_token=0.01)

def fail():
    engine.failure, engine.healthy = ValueError("step 7 failed"), False

def command():
    for line in sys.stdin:
        {"fail": fail, "hang": lambda: setattr(engine, "turn_seconds", 1e9)}[line.strip()]()

threading.Thread(target=command, daemon=True).start()
sys.exit(main(["serve", "--port", "0", "--log-format", "json", *sys.argv[2:]], lambda _: engine))
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, folder, *flags):
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        lines = [self._process.stdout.readline() for _ in range(2)]
        self.url = re.search(r"http://[\d.:]+", lines[1])[0]
        self._errors = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        self._errors += self._process.stderr

    def tell(self, command):
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def signal(self, number):
        self._process.send_signal(number)

    def wait(self):
        """Exit status, and what was written to standard error."""
        try:
            status = self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._reader.join(PATIENCE_SECONDS)
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                stream.close()
        return status, "".join(self._errors)


pytestmark = pytest.mark.slow


def wait_until(met):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_lets_requests_end_and_takes_new_ones_for_a_while(tmp_path):
    server = Process(tmp_path, "--drain-delay-seconds", "1.5")
    assert httpx.get(f"{server.url}/ready").status_code == 200
    with ThreadPoolExecutor(2) as threads:
        before = threads.submit(post, server.url, {"messages": ASK})
        time.sleep(0.3)
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        late = threads.submit(post, server.url, {"messages": ASK, "stream": True})
        assert before.result(PATIENCE_SECONDS).status_code == 200
        assert late.result(PATIENCE_SECONDS).text.endswith("data: [DONE]\n\n")
    status, errors = server.wait()
    assert status == 0 and '"event": "draining"' in errors


def test_requests_that_do_not_end_are_told_so_when_the_time_is_over(tokenizer):
    engine = FakeEngine(tokenizer, seconds_per_token=0.01)
    server = served_by(engine, drain_seconds=1.0)
    body = {"messages": ASK, "ignore_eos": True, "max_tokens": 100_000}
    with ThreadPoolExecutor(2) as threads, listening(server) as url:
        whole = threads.submit(post, url, body)
        streamed = threads.submit(post, url, {**body, "stream": True})
        wait_until(lambda: engine.num_tokens > 10 and len(engine.running) == 2)
        server.handle_exit(signal.SIGTERM, None)
        assert whole.result(PATIENCE_SECONDS).status_code == 503
        assert "shutting down" in whole.result().json()["error"]["message"]
        last = streamed.result(PATIENCE_SECONDS).text.strip().split("\n\n")[-1]
        assert "shutting down" in last and "error" in last


@pytest.mark.parametrize(
    ("command", "flags", "cause"),
    [("fail", (), "ValueError: step 7 failed"),
     ("hang", ("--step-timeout-seconds", "1"), "a step takes more than 1 s")],
)  # fmt: skip
def test_an_engine_that_fails_or_hangs_ends_the_process_with_its_cause(
    tmp_path, command, flags, cause
):
    server = Process(tmp_path, *flags)
    assert post(server.url, {"messages": ASK}).status_code == 200
    start = time.monotonic()
    server.tell(command)
    status, errors = server.wait()
    assert status == 1
    assert errors.count(cause) >= 2  # in the log, and as the last word
    assert time.monotonic() - start < PATIENCE_SECONDS


def takes_connections(url):
    try:
        return httpx.get(f"{url}/ready").status_code > 0
    except httpx.TransportError:  # refused, or closed while it was being taken
        return False


def served_by(engine, **settings):
    """A server of the kind that `jaxmm serve` runs, for this process."""
    config = ServerConfig(**settings)
    return Server(uvicorn_config(engine, config), engine, config)


def test_a_step_that_hangs_while_requests_drain_ends_them(tokenizer):
    engine = FakeEngine(tokenizer, seconds_per_token=0.01)
    server = served_by(engine, step_timeout_seconds=1.0, drain_seconds=PATIENCE_SECONDS)
    body = {"messages": ASK, "ignore_eos": True, "max_tokens": 100_000}
    with ThreadPoolExecutor(1) as threads, listening(server) as url:
        asked = threads.submit(post, url, body)
        wait_until(lambda: engine.running)
        server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: not takes_connections(url))
        engine.turn_seconds = 1e9
        answer = asked.result(PATIENCE_SECONDS / 2)
    assert answer.status_code == 503 and "a step takes more than 1 s" in answer.text
    assert "a step takes more than 1 s" in str(engine.failure)


def test_a_step_that_hangs_when_all_requests_have_ended_is_given_up(tokenizer, monkeypatch):
    """It has five minutes where requests wait for it, and seconds where none do."""
    monkeypatch.setattr(lifetime, "LAST_STEP_SECONDS", 0.3)
    engine = FakeEngine(tokenizer)
    server = served_by(engine)
    with listening(server) as url:
        assert post(url, {"messages": ASK}).status_code == 200
        engine.turn_seconds = 1e2
        server.handle_exit(signal.SIGTERM, None)
    assert "its last step takes more than 0.3 s" in str(engine.failure)
