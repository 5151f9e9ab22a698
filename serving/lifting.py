"""Takes data URIs out of a JSON body before it is parsed. Host only.

A body with pictures is nearly all base64. Parsing copies each of those strings, once or twice, and
no other thread runs meanwhile; finding their ends costs a tenth of that.
"""

import secrets
from collections.abc import Mapping
from typing import NamedTuple

_START = b'"data:'
_MIN_BYTES = 1 << 12
"""Shorter ones cost nothing worth the trouble."""

Url = str | memoryview
"""A URL as text; or, of a data URI that was taken out, its ASCII bytes where they arrived."""


class Lifted(NamedTuple):
    """A body in two parts."""

    rest: bytes
    """The body, with a short URL that nobody can guess in place of each large one."""
    uris: dict[str, memoryview]
    """The large ones, by what stands in their places."""

    def put_back(self, urls: Mapping[str, str]) -> dict[str, Url] | None:
        """Give URLs that were read from `rest` with the large ones among them.

        Returns:
            None when one of them stands somewhere else in the body, where it is no URL: then the
            body must be read as it came.
        """
        if not self.uris.keys() <= set(urls.values()):
            return None
        return {where: self.uris.get(url, url) for where, url in urls.items()}


def lift(body: bytes) -> Lifted:
    """Take out strings that begin with `data:`, are long, and have nothing escaped in them but `/`,
    as PHP writes it.

    Args:
        body: JSON, or anything else; not to be changed while the result is in use.
    """
    view, nonce = memoryview(body), secrets.token_hex(16)
    pieces: list[memoryview | bytes] = []
    uris: dict[str, memoryview] = {}
    copied = at = 0
    while (at := body.find(_START, at)) >= 0:
        start, stop = at + 1, body.find(b'"', at + 1)
        if stop < 0:
            break
        at = stop
        uri = _uri(body, start, stop) if stop - start >= _MIN_BYTES else None
        if uri is None:
            continue
        name = f"data:lifted/{nonce}/{len(uris)}"
        uris[name] = uri
        pieces += [view[copied:start], name.encode()]
        copied = stop
    if not uris:
        return Lifted(body, {})
    return Lifted(b"".join([*pieces, view[copied:]]), uris)


def _uri(body: bytes, start: int, stop: int) -> memoryview | None:
    """A string that starts here, if it is one and can be had without parsing.

    A quote behind a backslash is part of a string; so is any after a backslash within.
    """
    if body[start - 2 : start - 1] == b"\\":
        return None
    if body.find(b"\\", start, stop) < 0:
        return memoryview(body)[start:stop]
    if body.count(b"\\", start, stop) != body.count(b"\\/", start, stop):
        return None
    return memoryview(body[start:stop].replace(b"\\/", b"/"))
