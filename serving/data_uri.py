"""Bytes of a base64 data URI (RFC 2397, WHATWG forgiving base64). Host only."""

import binascii
import re
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from jaxmm.errors import MediaError, MediaTooLarge

_MAX_HEAD_BYTES = 4096
"""Before the comma."""
_PIECE_BYTES = 1 << 18
"""Decoded at once: half a millisecond in which no other thread runs."""
_WHITE_SPACE = b" \t\n\f\r"
_CUT_ESCAPE = re.compile(rb"%[0-9A-Fa-f]?\Z")


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
        decoded.append(binascii.a2b_base64(piece, strict_mode=True))
        num_bytes += len(decoded[-1])
        if num_bytes > max_bytes:
            raise MediaTooLarge(
                f"the data URI holds too many bytes; the limit is {max_bytes}. Send a smaller one."
            )
    return b"".join(decoded)


def _quads(data: memoryview) -> Iterator[bytes]:
    """Pieces of whole groups of four characters, escapes undone, white space and `=` left out."""
    rest, padded = b"", False
    for piece in _pieces(data):
        plain = (unquote_to_bytes(piece) if b"%" in piece else piece).translate(None, _WHITE_SPACE)
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
        if cut := _CUT_ESCAPE.search(piece):
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
