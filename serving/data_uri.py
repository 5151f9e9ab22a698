"""Bytes of a base64 data URI (RFC 2397, WHATWG forgiving base64). Host only."""

import binascii
from urllib.parse import unquote_to_bytes

from jaxmm.errors import MediaError, MediaTooLarge


def decode_data_uri(uri: str, max_bytes: int) -> bytes:
    """Decode `data:[type][;name=value…];base64,…`; the declared type is not believed.

    Scheme and `base64` may be in any case, the data percent-encoded, broken by white space, or
    without its `=` padding.

    Raises:
        MediaTooLarge: More than `max_bytes` bytes.
        MediaError: Not a base64 data URI.
    """
    head, comma, data = uri.partition(",")
    if not comma or head.rpartition(";")[2].strip().lower() != "base64" or ";" not in head:
        raise MediaError("a data URI must have the form data:image/png;base64,…")
    _check_size(len(data) * 3 // 4 - 2, max_bytes)
    try:
        raw = unquote_to_bytes(data) if "%" in data else data.encode("ascii")
        decoded = _decode(raw)
    except (binascii.Error, UnicodeEncodeError):
        raise MediaError("the data URI is not valid base64") from None
    _check_size(len(decoded), max_bytes)
    return decoded


def _decode(raw: bytes) -> bytes:
    try:
        return binascii.a2b_base64(raw, strict_mode=True)
    except binascii.Error:
        compact = b"".join(raw.split()).rstrip(b"=")
        return binascii.a2b_base64(compact + b"=" * (-len(compact) % 4), strict_mode=True)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise MediaTooLarge(
            f"the data URI holds {num_bytes} bytes; the limit is {max_bytes}. Send a smaller image."
        )
