"""Bytes of a base64 data URI (RFC 2397, WHATWG forgiving base64). Host only."""

import binascii
import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

import numpy as np

from jaxmm.errors import MediaError, MediaTooLarge

_MAX_HEAD_BYTES = 4096
"""Before the comma."""
_PIECE_BYTES = 1 << 18
"""Decoded at once."""
_WHITE_SPACE = b" \t\n\f\r"
_CUT_ESCAPE = re.compile(rb"%[0-9A-Fa-f]?\Z")
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SIX_BITS = np.full(256, 1 << 12, np.uint32)
_SIX_BITS[np.frombuffer(_LETTERS, np.uint8)] = np.arange(64)
_PAIRS = (_SIX_BITS[:, None] | _SIX_BITS << 6).ravel()
"""Twelve bits for every two letters, read as one number, the first one its lower byte; more than
that where one of them is no letter of base64."""


def decode_data_uri(uri: str | memoryview, max_bytes: int) -> bytes:
    """Decode `data:[type][;name=value…];base64,…`, text or its bytes; its type is not believed.

    Scheme and `base64` may be in any case, the data percent-encoded, broken by white space, or
    without its `=` padding; a fragment is left out.

    Raises:
        MediaTooLarge: More than `max_bytes` bytes.
        MediaError: Not a base64 data URI.
    """
    try:
        view = memoryview(uri.encode("ascii")) if isinstance(uri, str) else uri
        head, comma, _ = bytes(view[:_MAX_HEAD_BYTES]).partition(b",")
        if not comma or b";" not in head or _last_word(head) != b"base64":
            raise MediaError("a data URI must have the form data:image/png;base64,…")
        return _decode(view[len(head) + 1 :], max_bytes)
    except (binascii.Error, UnicodeEncodeError):
        raise MediaError("the data URI is not valid base64") from None


def _last_word(head: bytes) -> bytes:
    return head.rpartition(b";")[2].strip().lower()


def _decode(data: memoryview, max_bytes: int) -> bytes:
    decoded, num_bytes = [], 0
    for piece in _quads(data):
        decoded.append(_from_quads(piece))
        num_bytes += len(decoded[-1])
        if num_bytes > max_bytes:
            raise MediaTooLarge(
                f"the data URI holds too many bytes; the limit is {max_bytes}. Send a smaller one."
            )
    return b"".join(decoded)


def _from_quads(text: bytes) -> bytes:
    """Decode groups of four letters.

    numpy lets other threads run meanwhile. binascii would keep Python's lock for 2 ms a megabyte,
    and takes longer; it decodes the last group, which may be padded.
    """
    if len(text) <= 4:
        return binascii.a2b_base64(text, strict_mode=True)
    pairs = np.take(_PAIRS, np.frombuffer(text, "<u2")).reshape(-1, 2)
    if pairs.max() >> 12:
        raise binascii.Error("not a letter of base64")
    words = pairs[:, 0] << 12 | pairs[:, 1]
    octets = np.empty((len(words), 3), np.uint8)
    octets[:, 0], octets[:, 1], octets[:, 2] = words >> 16, words >> 8, words
    return octets.tobytes()


def _quads(data: memoryview) -> Iterator[bytes]:
    """Pieces of whole groups of four characters, escapes undone, white space and `=` left out."""
    rest, padded = b"", False
    for piece in _pieces(data):
        plain = unquote_to_bytes(piece) if b"%" in piece else piece
        if any(space in plain for space in _WHITE_SPACE):
            plain = plain.translate(None, _WHITE_SPACE)
        bare = plain.rstrip(b"=")
        if padded and bare:
            raise binascii.Error("data after the padding")
        padded = padded or len(bare) < len(plain)
        rest += bare
        whole = len(rest) // 4 * 4
        yield _unpadded(rest[:whole])
        rest = rest[whole:]
    yield _unpadded(rest) + b"=" * (-len(rest) % 4)


def _pieces(data: memoryview) -> Iterator[bytes]:
    """Cut where no escape is cut, up to a fragment."""
    start = 0
    while start < len(data):
        piece = bytes(data[start : start + _PIECE_BYTES])
        if cut := _CUT_ESCAPE.search(piece, len(piece) - 2):
            piece = piece[: cut.start()] or piece
        start += len(piece)
        bare, fragment, _ = piece.partition(b"#")
        yield bare
        if fragment:
            return


def _unpadded(piece: bytes) -> bytes:
    if b"=" in piece:
        raise binascii.Error("padding inside the data")
    return piece
