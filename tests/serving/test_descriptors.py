"""A server with few descriptors takes as many connections as it has room for, and goes on."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 10
PROGRAM = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
from jaxmm.host.chat import ChatTokenizer
from serving.cli import main
from tests.chat_checkpoints import write_checkpoint
from tests.fakes import FakeEngine

engine = FakeEngine(ChatTokenizer.from_checkpoint(write_checkpoint(Path(sys.argv[1]))))
sys.exit(main(["serve", "--port", "0"], lambda _: engine))
"""


def is_open(client):
    """The server has not closed its end; what it sent before is thrown away."""
    client.setblocking(False)
    try:
        while client.recv(1000):
            pass
    except BlockingIOError:
        return True
    return False


@pytest.mark.slow
def test_connections_are_held_to_the_descriptors_that_the_server_may_have(tmp_path):
    """Half of the hard limit, which is above the soft one; and a warning says so."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    clients = []
    try:
        process.stdout.readline()
        port = int(re.search(r":(\d+)", process.stdout.readline())[1])
        for _ in range(150):
            client = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
            clients.append(client)
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert sum(map(is_open, clients)) == 64
    finally:
        for client in clients:
            client.close()
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert "few descriptors limit=128 connections=64" in errors
