"""Starting the server, and telling how to use it. Host only."""

import contextlib
import gc
import json
import os
import shlex
import signal
import socket
import sys
from dataclasses import replace
from typing import NoReturn

import uvicorn

from jaxmm.errors import ConfigError, EngineStopped
from serving.app import create_app
from serving.config import ServerConfig
from serving.connection import MAX_CONNECTIONS, Connection
from serving.descriptors import raise_limit
from serving.engine import LoadEngine, ServedEngine, followed, load_engine, load_or_end
from serving.example import picture_uri
from serving.lifetime import Server, described
from serving.logs import configure_logs
from serving.tenants import Tenants, read_keys
from serving.tracing import check_installed

_BACKLOG = 2048
_SWITCH_SECONDS = 0.001
"""Python's 5 ms is what the event loop would wait for the GIL at each of its system calls, while
other threads decode base64 and build prompts."""


def serve(config: ServerConfig, load: LoadEngine = load_engine) -> None:
    """Load the engine and serve until SIGINT or SIGTERM; then let running requests end.

    On the hosts of a pod but the first, follow that one until it ends.

    Raises:
        ConfigError: The address cannot be had, the keys cannot be read, or a package is missing.
        ModelError: The checkpoint cannot be loaded.
        EngineStopped: The engine failed; what supervises the process should start it again.
    """
    configure_logs(config.log_level, config.log_format)
    signal.signal(signal.SIGTERM, _end)  # nobody is served yet
    settings = config.engine
    if config.log_format == "json":
        settings = replace(settings, progress=False)  # bars are no objects
    if followed(settings):
        return
    # what can be told now is not told after minutes of loading
    tenants = read_keys(config.api_keys, config.api_key_file, config.admin_keys)
    if config.trace_endpoint:
        check_installed()
    raise_limit(MAX_CONNECTIONS)
    with _bind(config.host, config.port) as listener:
        engine = load_or_end(load, settings)
        try:
            signal.signal(signal.SIGTERM, _leave)  # uvicorn raises it again when it has drained
            tune_interpreter()
            listener.listen(_BACKLOG)  # a line pasted at once waits instead of failing
            _print_usage(config, listener, engine.model_name)
            server = Server(uvicorn_config(engine, config, tenants), engine, config)
            server.run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, _end)  # whoever sends another one has waited enough
            if engine.failure is not None and engine.turn_seconds:
                _end_stuck(engine.failure)
            engine.close()
        if engine.failure is not None:
            raise EngineStopped(f"the engine has stopped: {described(engine.failure)}")


def tune_interpreter() -> None:
    """Keep Python's own pauses short, once everything is loaded: those for its GIL, and those for
    collecting garbage, which would look through all of JAX again and again."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def curl_line(url: str, model: str, *, needs_key: bool = False) -> str:
    """One shell command that asks the server about a small picture, which is part of it."""
    content = [
        {"type": "image_url", "image_url": {"url": picture_uri()}},
        {"type": "text", "text": "What is in this picture?"},
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 32,
        "temperature": 0,
    }
    command = ["curl", f"{url}/v1/chat/completions", "-H", "content-type: application/json"]
    if needs_key:
        command += ["-H", "authorization: Bearer KEY"]
    return shlex.join([*command, "-d", json.dumps(body)])


def _end(*_: object) -> None:
    """End at once: an exception would first wait for the compiles that are running."""
    os._exit(128 + signal.SIGTERM)


def _end_stuck(cause: BaseException) -> NoReturn:
    """End a process whose engine hangs on the device: its thread cannot be waited for."""
    sys.stderr.write(f"jaxmm: {described(cause)}\n")
    sys.stderr.flush()
    os._exit(1)


def _leave(*_: object) -> None:
    raise SystemExit(0)


def uvicorn_config(
    engine: ServedEngine, config: ServerConfig, tenants: Tenants | None = None
) -> uvicorn.Config:
    """Settings of the HTTP machinery: no logging of its own, and time to drain."""
    return uvicorn.Config(
        create_app(engine, config, tenants),
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        http=Connection,
        ws="none",
        timeout_keep_alive=round(config.keep_alive_seconds),
        timeout_graceful_shutdown=round(config.drain_seconds),
    )


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            undo.pop_all()
    except OSError as e:
        raise ConfigError(f"cannot listen at {host} port {port}: {e.strerror}") from e
    return listener


def _print_usage(config: ServerConfig, listener: socket.socket, engine_name: str) -> None:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    needs_key = bool(config.api_keys or config.api_key_file)
    line = curl_line(url, config.model_name or engine_name, needs_key=needs_key)
    sys.stdout.write(f"\njaxmm serves at {url}\n\n{line}\n\n")
    sys.stdout.flush()
