"""Messages between the decode pool and its processes: their length, then they. Host only."""

import contextlib
import io
import socket
import struct
from collections.abc import Callable
from typing import Self

MAX_BYTES = 1 << 32
"""Of a message that is taken: a length beyond it is none."""
_LENGTH = struct.Struct("!Q")


class Wire:
    """One end of a pair of sockets. Closed by the other end: EOFError or OSError."""

    def __init__(
        self,
        end: socket.socket,
        check: Callable[[], None] = lambda: None,
        glance_seconds: float | None = None,
    ) -> None:
        """Take a socket, to be closed with this.

        Args:
            end: The socket.
            check: Asked whenever a message has not come or gone whole yet; what it raises ends the
                wait, and leaves the other end in the middle of a message.
            glance_seconds: Longest time between two checks; None: however long nothing moves.
        """
        end.settimeout(glance_seconds)
        self._end = end
        self.check = check

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. May be called again."""
        self._end.close()

    def send(self, message: bytes | memoryview) -> None:
        """Send a message."""
        self._move(self._end.send, memoryview(_LENGTH.pack(len(message))))
        self._move(self._end.send, memoryview(message))

    def receive(self) -> bytes:
        """Give the next message, without a copy: one of 3 MB took seven times as long with it."""
        message = io.BytesIO(bytes(self._receive_length()))
        with message.getbuffer() as buffer:
            self._move(self._receive, buffer)
        return message.getvalue()

    def receive_into(self, buffer: memoryview) -> None:
        """Put the next message, which must have the buffer's size, there."""
        length = self._receive_length()
        if length != len(buffer):
            raise OSError(f"a message of {length} bytes in place of {len(buffer)}")
        self._move(self._receive, buffer)

    def _receive_length(self) -> int:
        length = bytearray(_LENGTH.size)
        self._move(self._receive, memoryview(length))
        (value,) = _LENGTH.unpack(length)
        if value > MAX_BYTES:
            raise OSError(f"a message of {value} bytes; the limit is {MAX_BYTES}")
        return int(value)

    def _receive(self, buffer: memoryview) -> int:
        count = self._end.recv_into(buffer)
        if count == 0:
            raise EOFError
        return count

    def _move(self, part: Callable[[memoryview], int], view: memoryview) -> None:
        """Send or receive part by part; what can be moved at once is, however late it is."""
        while view:
            with contextlib.suppress(TimeoutError):
                view = view[part(view) :]
            if view:
                self.check()
