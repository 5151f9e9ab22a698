"""The decoding process: pictures in by its socket, patches out by shared memory. Host only.

Started by `decode_pool` as `python -m jaxmm.host.decode_worker SOCKET_FD MEMORY_FD`. It reads a
pickled setup once, from its parent; what goes back is JSON and plain bytes, so that a picture
which takes over this process cannot make the parent unpickle anything. It ends with its socket.

    parent -> worker   setup; then per picture: JSON {image: {min_pixels, max_pixels}}, encoded
                       bytes; per video: JSON {clip: {fps, num_frames, max_pixels}, sizes}, the
                       encoded bytes of the file, or of its frames (sizes tells each one's)
    worker -> parent   JSON {grid_thw, num_rows, identities, timing, shape, shared} and, unless
                       shared, the patches; or JSON {error, message}; or, for a fault that is
                       not the picture's, JSON {fault, trace}
"""

import itertools
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxmm.errors import RequestError
from jaxmm.host.decode import (
    ClipTask,
    Processed,
    ProcessedClip,
    Processor,
    process_clip,
    process_image,
)
from jaxmm.host.media import Limits, too_much_memory
from jaxmm.host.video import Sampling, VideoProcessor
from jaxmm.host.wire import Wire

STATM = Path("/proc/self/statm")
"""Where Linux tells how many pages of address space a process has; elsewhere it has no limit."""

NO_MEMORY = -1
"""In place of MEMORY_FD where the parent got no shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that a worker must know; the first message on its socket, pickled."""

    processor: Processor
    video: VideoProcessor | None
    limits: Limits
    memory_bytes: int
    """Address space that the worker may take beyond what it has before its first picture."""


class _Memory:
    """The segment that is shared with the parent, filled from its start for every picture."""

    def __init__(self, fd: int) -> None:
        self._map = None if fd == NO_MEMORY else mmap.mmap(fd, 0)

    def allocate(self, num_patches: int, num_values: int) -> npt.NDArray[np.uint8]:
        count = num_patches * num_values
        if self._map is None or count > len(self._map):
            return np.empty((num_patches, num_values), np.uint8)
        return np.frombuffer(self._map, np.uint8, count).reshape(num_patches, num_values)

    def holds(self, array: npt.NDArray[np.uint8]) -> bool:
        return self._map is not None and array.nbytes <= len(self._map)


def main() -> None:
    """Serve until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    memory = _Memory(int(sys.argv[2]))
    try:
        setup: Setup = pickle.loads(wire.receive())
        _limit_memory(setup.memory_bytes)
        while True:
            _answer(wire, memory, setup)
    except (EOFError, ConnectionError):
        return


def _limit_memory(num_bytes: int) -> None:
    """Let an allocation beyond the limit fail, here, before it costs the whole machine."""
    if STATM.exists():
        used = int(STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


def _answer(wire: Wire, memory: _Memory, setup: Setup) -> None:
    task = json.loads(wire.receive())
    source = wire.receive()
    try:
        processed = _process(task, source, setup, memory)
    except RequestError as error:
        _send(wire, _refused(error))
        return
    except MemoryError:
        _send(wire, _refused(too_much_memory()))
        return
    except Exception as error:  # noqa: BLE001  # ours: no reason to end, or to refuse the file
        _send(wire, {"fault": type(error).__name__, "trace": traceback.format_exc()})
        return
    shared = memory.holds(processed.features)
    _send(wire, _header(processed, shared))
    if not shared:
        wire.send(processed.features.data.cast("B"))


def _process(
    task: dict[str, Any], source: bytes, setup: Setup, memory: _Memory
) -> Processed | ProcessedClip:
    if "image" in task:
        return process_image(
            source, setup.processor, setup.limits, **task["image"], allocate=memory.allocate
        )
    clip = task["clip"]
    wish = ClipTask(Sampling(clip["fps"], clip["num_frames"]), clip["max_pixels"])
    content = source if task["sizes"] is None else _parts(source, task["sizes"])
    return process_clip(content, setup.video, setup.limits, wish, allocate=memory.allocate)


def _parts(source: bytes, sizes: list[int]) -> tuple[bytes, ...]:
    """Cut a message into the files that it is made of."""
    stops = list(itertools.accumulate(sizes))
    return tuple(source[stop - size : stop] for stop, size in zip(stops, sizes, strict=True))


def _header(processed: Processed | ProcessedClip, shared: bool) -> dict[str, object]:
    if isinstance(processed, ProcessedClip):
        identities, timing = processed.identities, processed.timing
    else:
        identities, timing = (processed.identity,), None
    return {
        "grid_thw": processed.grid_thw,
        "num_rows": processed.num_rows,
        "identities": [identity.hex() for identity in identities],
        "timing": timing,
        "shape": processed.features.shape,
        "shared": shared,
    }


def _refused(error: RequestError) -> dict[str, object]:
    return {"error": type(error).__name__, "message": str(error)}


def _send(wire: Wire, message: dict[str, object]) -> None:
    wire.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
