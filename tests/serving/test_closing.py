"""A connection that closes, whoever closes it, does not wait for a client that has stopped reading.

Over a pair of sockets, so that both kinds of event loop are asked and each way to close is its own.
"""

import asyncio
import socket

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from serving import connection

PATIENCE_SECONDS = 20
GET = b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n"
GET_LAST = b"GET /%d HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
BELOW = 50_000
"""Less than a transport holds before it says that the client does not read, 64 KiB."""
ABOVE = 400_000
FEW = 15_000
"""Less than where it says that the client has read, 16 KiB."""


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(connection, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(connection, "STALL_SECONDS", 1.0)


async def answer(scope, receive, send):
    """As many bytes as the path says; a path of a negative number says one more than come."""
    size = int(scope["path"][1:])
    length = b"%d" % (size if size > 0 else 1 - size)
    headers = [(b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"a" * abs(size)})


class Told(connection.Connection):
    """Tells when it is lost."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lost = asyncio.Event()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.lost.set()


async def stop_reading(request, close):
    """Ask, read until few bytes are unsent, close, and wait for the end of the connection.

    Returns:
        Bytes that were unsent when the client had stopped reading.
    """
    config = uvicorn.Config(answer, http=Told, log_config=None, lifespan="off")
    config.load()
    loop = asyncio.get_running_loop()
    client, ours = socket.socketpair()
    with client:
        client.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        told = Told(config, ServerState(), {})
        transport, _ = await loop.connect_accepted_socket(lambda: told, ours)
        await loop.sock_sendall(client, request)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not transport.get_write_buffer_size():
                await asyncio.sleep(0.01)
        while transport.get_write_buffer_size() > FEW:
            await loop.sock_recv(client, 1024)
        close(told, client)
        left = transport.get_write_buffer_size()
        await asyncio.wait_for(told.lost.wait(), PATIENCE_SECONDS)
        return left


def shut_down_twice(told, client):
    told.shutdown()
    told.loop.call_later(2 * connection.LAST_LOOK_SECONDS, told.shutdown)


CLOSES = {
    "answer": (GET_LAST % BELOW, lambda *_: None),
    "answer nearly read": (GET_LAST % ABOVE, lambda *_: None),
    "answer cut short": (GET % -BELOW, lambda *_: None),
    "error": (GET % BELOW, lambda told, client: client.sendall(b"nonsense\r\n\r\n")),
    "client sends no more": (GET % BELOW, lambda told, client: client.shutdown(socket.SHUT_WR)),
    "room": (GET % BELOW, lambda told, client: told._make_room()),
    "shutdown": (GET % BELOW, shut_down_twice),
}


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("way", CLOSES)
def test_what_is_unsent_has_an_end(way, loop_factory):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(stop_reading(*CLOSES[way])) > 0
