"""One connection of a client, and what it may cost before there is a request. Host only."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.descriptors import limit_connections

logger = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
"""Time for the head of a request, from the connection or from the first byte after another."""
MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together."""
LINGER_SECONDS = 5.0
"""Time that a client may go on sending a body whose request has been answered: it may not read
the answer before it has sent everything. Also for what is unsent when an idle connection closes:
the client had its time to read."""
STALL_SECONDS = 60.0
"""Time that a client may take to read when what it has been sent has filled all buffers, and for
what is unsent when its connection closes in any other way, as after a last answer."""
LAST_LOOK_SECONDS = 0.1
"""From the end of a time, or of the server, to the close: after a pause of the whole process, in
which times have ended and requests have come, the requests are read first."""
MAX_CONNECTIONS = 8192
"""Fewer where the process may not have so many descriptors."""

_idle: WeakKeyDictionary[Any, dict["Connection", None]] = WeakKeyDictionary()
"""Of each server, by uvicorn's state of it: idle connections, the one that waits longest first."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits of its own: it waits for a head for ever, of any size."""

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _ending: asyncio.TimerHandle | None = None
    _num_heads = 0
    _num_head_bytes = 0
    _in_head = True
    _is_leaving = False

    def connection_made(self, transport: Any) -> None:
        """Take a connection, or close it where there are too many that are not idle."""
        watched: Any = _Watched(transport, lambda: self._end_within(STALL_SECONDS))
        super().connection_made(watched)
        most = limit_connections(MAX_CONNECTIONS)
        if len(self.connections) > most and not self._make_room():
            logger.warning("connection refused open=%d", len(self.connections))
            self.transport.abort()
            return
        self._close_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._others.pop(self, None)
        self._stop_timer()
        self._stop_stalled()
        if self._ending is not None:
            self._ending.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client sends nothing more; the transport closes of itself."""
        self._end_within(STALL_SECONDS)
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        """Take what came; a head that grows too large is answered with 400."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.is_idle or (self._in_head and self._timer is None and not answering):
            self._close_after(HEAD_SECONDS)
        before = self._in_head, self._num_heads
        super().data_received(data)
        if before == (True, self._num_heads) and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._stop_timer()
                self.send_400_response(f"The head is larger than {MAX_HEAD_BYTES} bytes.")
        if not self.is_idle:
            self._others.pop(self, None)

    def on_headers_complete(self) -> None:
        """Begin a request."""
        self._in_head = False
        self._num_heads += 1
        self._num_head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self._is_leaving:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The body is complete; what follows is the head of the next request."""
        self._in_head = True
        if self.cycle.response_complete:
            self._others[self] = None
            self._close_after(self.timeout_keep_alive)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is sent; a body that still comes is thrown away, for a while."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.is_idle:
            self._others[self] = None
        if not self._in_head:
            self._close_after(LINGER_SECONDS)
        elif self._num_head_bytes and self.cycle.response_complete:
            self._close_after(HEAD_SECONDS)  # of the next request, which has begun

    @property
    def is_idle(self) -> bool:
        """A request has been answered, and nothing of another one has come."""
        answered = self.cycle is not None and self.cycle.response_complete
        waits = answered and self._in_head and self._num_head_bytes == 0
        return waits and not self.transport.is_closing()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered, or not at all."""
        super().pause_writing()
        self._stop_stalled()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_stalled()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server ends: answer what is being asked or has been sent already, then close."""
        self._is_leaving = True
        if self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()
        elif self._in_head and self._num_head_bytes == 0:
            self._look_again()  # otherwise the time of the head or the body is running

    def timeout_keep_alive_handler(self) -> None:
        """No request has followed."""
        self._look_again()

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(LAST_LOOK_SECONDS, self._close)

    @property
    def _others(self) -> dict["Connection", None]:
        """Connections of this server that are idle, this one among them if it is."""
        return _idle.setdefault(self.server_state, {})

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for another request; False: none waits."""
        for oldest in self._others:
            oldest._close()
            return True
        return False

    def _close(self) -> None:
        """Close after what is still to be sent, but do not wait for a client that reads nothing."""
        self._stop_timer()
        self._others.pop(self, None)
        self._end_within(LINGER_SECONDS)
        self.transport.close()

    def _end_within(self, seconds: float) -> None:
        """Give what is unsent some seconds to go; who begins to close says how many."""
        if self._ending is None:
            self._ending = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _Watched:
    """A transport that tells when it begins to close: uvicorn closes it in many places."""

    def __init__(self, transport: Any, on_close: Callable[[], None]) -> None:
        self._transport = transport
        self._on_close = on_close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if not self._transport.is_closing():
            self._on_close()
        self._transport.close()
