"""A connection between process 0 and a follower: frames with a number and a digest. Host only.

    length u32 | kind u8 | number u64 | payload | BLAKE2b-128 of all before, keyed

The key is made for each start and told to the pod through JAX's own coordination, so that a
connection from elsewhere can neither pass the greeting nor put a frame between two others, and a
frame that is lost, repeated or damaged is found out at once. Nothing is encrypted.
"""

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Sequence

from jaxmm.errors import PeerLost
from jaxmm.pod.messages import Kind

Buffers = Sequence[bytes | memoryview]

KEY_BYTES = 32
_HEAD = struct.Struct("<IBQ")
_DIGEST_BYTES = 16
_NONCE_BYTES = 16
_MAGIC = b"jaxmm pod 1\n"
_MOST_BYTES = 1 << 30
_GREETING_SECONDS = 5.0


class Channel:
    """One end of a connection that has been greeted. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, key: bytes, name: str) -> None:
        """Take a connection.

        Args:
            connection: Closed with the channel.
            key: The same at both ends.
            name: Of the process at the other end, for messages.
        """
        self.name = name
        self._socket = connection
        self._key = key
        self._sent = self._received = 0
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: Kind, payload: Buffers = ()) -> None:
        """Send one frame.

        Raises:
            PeerLost: The connection is gone, or nothing was taken for the time of `set_timeout`.
        """
        with self._sending:
            length = sum(len(part) for part in payload)
            frame = [_HEAD.pack(length, kind, self._sent), *payload]
            self._sent += 1
            frame.append(_digest(self._key, frame))
            try:
                _send_all(self._socket, frame)
            except OSError as e:
                raise PeerLost(f"{self.name} was lost: {_reason(e)}") from None

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for the next frame.

        Raises:
            PeerLost: The connection is gone, nothing came for the time of `set_timeout`, or what
                came is not the next frame.
        """
        try:
            head = _take(self._socket, _HEAD.size)
            length, kind, number = _HEAD.unpack(head)
            if length > _MOST_BYTES:
                raise PeerLost(f"{self.name} sent a frame of {length} bytes, which none has")
            payload = _take(self._socket, length)
            digest = _take(self._socket, _DIGEST_BYTES)
        except OSError as e:
            raise PeerLost(f"{self.name} was lost: {_reason(e)}") from None
        if not hmac.compare_digest(digest, _digest(self._key, (head, payload))):
            raise PeerLost(f"a frame from {self.name} is damaged, or not from it")
        if number != self._received:
            raise PeerLost(f"{self.name} sent frame {number} where {self._received} was due")
        self._received += 1
        return Kind(kind), payload

    def set_timeout(self, seconds: float) -> None:
        """Time in which the other end must take what is sent, and send what is waited for."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def close(self) -> None:
        """Close the connection; the other end finds out."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def greet_leader(
    address: tuple[str, int], key: bytes, process_id: int, about: bytes, timeout_seconds: float
) -> Channel:
    """Connect to process 0, and prove each to the other that it has the key.

    Args:
        address: Where process 0 listens.
        key: Of this start of the pod.
        process_id: Of this process.
        about: What process 0 shall know of this process.
        timeout_seconds: For all of it.

    Raises:
        PeerLost: Nobody answers there, or not with the key.
    """
    name = "process 0"
    try:
        connection = socket.create_connection(address, timeout_seconds)
        nonce = os.urandom(_NONCE_BYTES)
        hello = _MAGIC + struct.pack("<I", process_id) + nonce
        connection.sendall(hello)
        answer = _take(connection, _NONCE_BYTES + _DIGEST_BYTES)
        both = hello + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _digest(key, (b"lead", both))):
            raise PeerLost(f"what listens at {address[0]} port {address[1]} is not {name}")
        proof = _digest(key, (b"follow", both, about))
        connection.sendall(struct.pack("<I", len(about)) + about + proof)
        connection.settimeout(None)
    except OSError as e:
        raise PeerLost(
            f"{name} cannot be reached at {address[0]} port {address[1]}: {_reason(e)}"
        ) from None
    return Channel(connection, key, f"{name} ({address[0]})")


def greet_follower(connection: socket.socket, key: bytes) -> tuple[int, bytes] | None:
    """Find out who has connected.

    Returns:
        Its process id and what it tells about itself; None: it has not got the key.
    """
    connection.settimeout(_GREETING_SECONDS)
    try:
        hello = _take(connection, len(_MAGIC) + 4 + _NONCE_BYTES)
        if not hello.startswith(_MAGIC):
            return None
        nonce = os.urandom(_NONCE_BYTES)
        both = hello + nonce
        connection.sendall(nonce + _digest(key, (b"lead", both)))
        (length,) = struct.unpack("<I", _take(connection, 4))
        about = _take(connection, min(length, 1 << 16))
        proof = _take(connection, _DIGEST_BYTES)
        if not hmac.compare_digest(proof, _digest(key, (b"follow", both, about))):
            return None
        connection.settimeout(None)
    except OSError:
        return None
    (process_id,) = struct.unpack_from("<I", hello, len(_MAGIC))
    return process_id, about


def _digest(key: bytes, parts: Buffers) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _send_all(connection: socket.socket, parts: Buffers) -> None:
    """Send buffers one after the other, in one call where the system takes them all."""
    sent = connection.sendmsg(parts)
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
            continue
        connection.sendall(memoryview(part)[sent:])
        sent = 0


def _take(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes."""
    taken = bytearray(count)
    view = memoryview(taken)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the connection was closed")
        view = view[got:]
    return bytes(taken)


def _reason(error: OSError) -> str:
    if isinstance(error, BlockingIOError | TimeoutError):
        return "no word from it in time"
    return error.strerror or str(error)
