"""Pictures seen before: what they became, so that a repeat is not processed. Host only."""

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.host.decode import ClipTask
from jaxmm.host.video import Timing


class Known(NamedTuple):
    """What the engine must know of an item before it needs its features."""

    identity: bytes
    grid_thw: tuple[int, int, int]
    num_rows: int


class KnownClip(NamedTuple):
    """The same of a video: of each of its time steps, and when they are shown."""

    identities: tuple[bytes, ...]
    grid_thw: tuple[int, int, int]
    num_rows: int
    """Of one step."""
    timing: Timing


def clip_key(
    frames: Sequence[bytes | npt.NDArray[np.uint8]],
    is_list: bool,
    fingerprint: bytes,
    task: ClipTask,
    salt: str = "",
) -> bytes:
    """32 bytes: encoded video or its frames, processor, what the request wants, and tenant.

    Args:
        frames: A file's bytes alone, or each frame's bytes or pixels.
        is_list: They are frames: one frame is not a file of the same bytes.
        fingerprint: Of the processor.
        task: Of the request.
        salt: The tenant.
    """
    keys = [media_key(frame, fingerprint, (0, task.max_pixels), salt) for frame in frames]
    wish = repr((is_list, task.sampling.fps, task.sampling.num_frames)).encode()
    return hashlib.sha256(b"jaxmm.clip.1" + b"".join(keys) + wish).digest()


def media_key(
    content: bytes | npt.NDArray[np.uint8],
    fingerprint: bytes,
    pixel_limits: tuple[int, int],
    salt: str = "",
) -> bytes:
    """32 bytes: encoded file or pixels, processor, pixel limits and tenant.

    The tenant is part of it because a hit is fast enough to be noticed: one tenant must not learn
    that another sent the same picture.

    Args:
        content: A file's bytes, or uint8[H, W, 3], contiguous; the two never share a key.
        fingerprint: Of the processor.
        pixel_limits: Of the request.
        salt: The tenant.
    """
    no_size = (0, 0)  # of a file; no picture has it
    height, width = no_size if isinstance(content, bytes) else content.shape[:2]
    digest = hashlib.sha256(b"jaxmm.media.2")
    scope = salt.encode()
    digest.update(struct.pack("<QQ4q", len(fingerprint), len(scope), *pixel_limits, height, width))
    digest.update(fingerprint)
    digest.update(scope)
    digest.update(content if isinstance(content, bytes) else content.reshape(-1).data)
    return digest.digest()


class MediaMap:
    """Least recently used map from media key to what is known; every method is thread-safe."""

    def __init__(self, capacity: int) -> None:
        """Keep at most `capacity` entries; 0 keeps none."""
        self._capacity = capacity
        self._entries: OrderedDict[bytes, Known | KnownClip] = OrderedDict()
        self._lock = threading.Lock()
        self.num_hits = 0
        self.num_misses = 0

    def get(self, key: bytes) -> Known | KnownClip | None:
        """Look a picture up and make it the most recent."""
        with self._lock:
            known = self._entries.get(key)
            if known is None:
                self.num_misses += 1
                return None
            self.num_hits += 1
            self._entries.move_to_end(key)
            return known

    def put(self, key: bytes, known: Known | KnownClip) -> None:
        """Remember a picture, and forget the least recent beyond the capacity."""
        with self._lock:
            self._entries[key] = known
            self._entries.move_to_end(key)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def clear(self) -> None:
        """Forget every picture."""
        with self._lock:
            self._entries.clear()
