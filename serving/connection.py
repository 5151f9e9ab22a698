"""One connection of a client, and what it may cost before there is a request. Host only."""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
"""Time for the head of a request, from the connection or from the first byte after another."""
MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together."""
LINGER_SECONDS = 5.0
"""Time that a client may go on sending a body whose request has been answered: it may not read
the answer before it has sent everything."""
MAX_CONNECTIONS = 8192


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits of its own: it waits for a head for ever, of any size."""

    _timer: asyncio.TimerHandle | None = None
    _num_heads = 0
    _num_head_bytes = 0
    _in_head = True

    def connection_made(self, transport: Any) -> None:
        """Take a connection, or close it where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            logger.warning("connection refused open=%d", len(self.connections))
            transport.abort()
            return
        self._close_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; a head that grows too large is answered with 400."""
        if self._in_head and self._timer is None:
            self._close_after(HEAD_SECONDS)
        before = self._in_head, self._num_heads
        super().data_received(data)
        if before == (True, self._num_heads) and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._stop_timer()
                self.send_400_response(f"The head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Begin a request."""
        self._in_head = False
        self._num_heads += 1
        self._num_head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is complete; what follows is the head of the next request."""
        self._in_head = True
        if self.cycle.response_complete:
            self._close_after(self.timeout_keep_alive)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is sent; a body that still comes is thrown away, for a while."""
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._close_after(LINGER_SECONDS)

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
