"""Pictures from `file://` URLs, below one folder that the server's owner named. Host only."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from jaxmm.errors import MediaTooLarge
from serving.errors import FetchError

_REFUSED = "no picture that may be read is at this file: URL"
"""One message whatever the reason: it must not tell which files exist."""


def read_file_url(url: str, folder: Path, max_bytes: int) -> bytes:
    """Read the file of a `file:///absolute/path` URL.

    Links, `..` and percent-encoding are resolved first; what matters is where the file is.

    Args:
        url: The URL; a host other than `localhost` is refused.
        folder: What the file must be below.
        max_bytes: Largest file.

    Raises:
        FetchError: Not a regular file below the folder.
        MediaTooLarge: More than `max_bytes` bytes.
    """
    try:
        data = _read_below(folder.resolve(strict=True), _path(url), max_bytes + 1)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle
        raise FetchError(_REFUSED) from None
    if len(data) > max_bytes:
        raise MediaTooLarge(f"the file is larger than {max_bytes} bytes")
    return data


def _path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
        raise ValueError("not a plain file URL")
    return Path(os.fsdecode(unquote_to_bytes(parts.path)))


def _read_below(folder: Path, path: Path, num_bytes: int) -> bytes:
    """The beginning of a regular file."""
    descriptor = _open_below(folder, path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(num_bytes)
    finally:
        os.close(descriptor)


def _open_below(folder: Path, path: Path) -> int:
    """Open a file, one step of its resolved path after the other.

    No step may be a link any more: one that has become a link since `resolve` looked fails.
    """
    if not path.is_absolute():
        raise ValueError("not an absolute path")
    steps = path.resolve(strict=True).relative_to(folder).parts
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
    at = os.open(folder, flags | os.O_DIRECTORY)
    for i, step in enumerate(steps):
        last = i + 1 == len(steps)
        try:
            below = os.open(step, flags | (0 if last else os.O_DIRECTORY), dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at
