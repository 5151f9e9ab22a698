"""A server on a loopback port, in this process, around a fake engine."""

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import openai
import pytest
import uvicorn

from jaxmm.host.chat import ChatTokenizer
from serving.config import ServerConfig
from serving.main import uvicorn_config
from tests import chat_checkpoints as checkpoints
from tests.fakes import FakeEngine

ASK = [{"role": "user", "content": "What is it?"}]


def post_to(url, path, body, **headers):
    """Send a body as it stands, bytes or a value for JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url + path, content=data, headers=headers, timeout=20)


def post(url, body, **headers):
    """Send a chat request."""
    return post_to(url, "/v1/chat/completions", body, **headers)


def client(url):
    """The official client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    directory = checkpoints.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return ChatTokenizer.from_checkpoint(directory)


@contextlib.contextmanager
def running(engine, config=None):
    """Serve on a free port; give the base URL."""
    server = uvicorn.Server(uvicorn_config(engine, config or ServerConfig()))
    with listening(server) as url:
        yield url


@contextlib.contextmanager
def listening(server):
    """Run a server on a free port; give the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="session")
def served(tokenizer):
    engine = FakeEngine(tokenizer)
    with running(engine) as base:
        yield engine, base


@pytest.fixture
def engine(served):
    """The engine behind `url`, as new."""
    engine = served[0]
    engine.requests.clear()
    engine.healthy = True
    return engine


@pytest.fixture
def url(served, engine):
    return served[1]
