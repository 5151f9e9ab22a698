"""Pictures and videos processed in processes of their own, back by shared memory. Host only.

A decoder reads what strangers send; a process of its own keeps its crashes, its memory and its
GIL away from the engine. Each worker shares one anonymous segment with the parent for its whole
life. It has no name and goes with the two processes, so nothing is left behind however they end.
Workers are started as a module, not through `multiprocessing`: that would run the user's script
again in each of them.
"""

import contextlib
import json
import logging
import math
import mmap
import os
import pickle
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from jaxmm import errors
from jaxmm.errors import EngineStopped, MediaError, Overloaded
from jaxmm.host.decode import (
    ClipTask,
    Frames,
    Processed,
    ProcessedClip,
    Processor,
    process_clip,
    process_image,
)
from jaxmm.host.decode_worker import NO_MEMORY, STATM, Setup
from jaxmm.host.media import Limits, read_source
from jaxmm.host.quarantine import Quarantine
from jaxmm.host.video import Timing, VideoProcessor
from jaxmm.host.wire import Wire

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_EXIT_TIMEOUT_SECONDS = 5.0
_GRACE_SECONDS = 1.0
"""For a picture that nobody waits for any more."""
_GLANCE_SECONDS = 0.1
"""How often a wait looks whether it is still wanted."""
_ERRORS = {kind.__name__: kind for kind in (errors.RequestError, MediaError, errors.MediaTooLarge)}


class DecodePool:
    """Processes pictures in parallel; thread-safe."""

    def __init__(
        self,
        processor: Processor,
        limits: Limits,
        workers: int = 0,
        *,
        video: VideoProcessor | None = None,
        timeout_seconds: float = 30.0,
        memory_bytes: int = 0,
        quarantine_seconds: float = 600.0,
    ) -> None:
        """Start the workers.

        Args:
            processor: The model family's.
            limits: Of bytes and pixels before resizing.
            workers: Processes; 0: one for each two cores, at least one.
            video: The model family's, if it takes videos.
            timeout_seconds: A picture within the limits takes a second or two; a worker that takes
                longer than this is replaced.
            memory_bytes: What one worker may allocate for a picture; 0: room for the largest that
                the limits let through.
            quarantine_seconds: How long a file is refused that a worker ended or hung on.
        """
        memory_bytes = memory_bytes or _enough_memory(processor, video, limits)
        self._setup = Setup(
            processor=processor, video=video, limits=limits, memory_bytes=memory_bytes
        )
        if not STATM.exists():
            logger.warning("decoding processes have no memory limit on this system")
        self._timeout_seconds = timeout_seconds
        self._quarantine = Quarantine(quarantine_seconds)
        self._count = workers or max(1, (os.cpu_count() or 1) // 2)
        self._lock = threading.Lock()
        self._closed = self._warned = False
        self._inline_count = 0
        self._patience: WeakKeyDictionary[Future[Any], _Patience] = WeakKeyDictionary()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        with contextlib.ExitStack() as undo:
            for _ in range(self._count):
                worker = self._start()
                undo.callback(worker.close)
                self._idle.put(worker)
            undo.pop_all()
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="jaxmm-decode")

    @property
    def inline_count(self) -> int:
        """Pictures whose patches came by socket because shared memory was refused."""
        return self._inline_count

    def submit(
        self, source: Any, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Future[Processed]:
        """Process a picture in a worker; one that is decoded already, in a thread.

        Returns:
            A future that raises RequestError for a picture that cannot be used, MediaError when
            its worker died of it or did so lately, Overloaded when no worker can be started, and
            DecodeFault for a fault that is not the picture's.

        Raises:
            EngineStopped: The pool is closed.
        """
        patience = _Patience()
        return self._begin(patience, self._process, source, min_pixels, max_pixels, patience)

    def submit_clip(self, source: bytes | Frames, task: ClipTask) -> Future[ProcessedClip]:
        """Process a video in a worker; one whose frames are decoded already, in a thread.

        Returns, Raises: As `submit`.
        """
        patience = _Patience()
        return self._begin(patience, self._process_clip, source, task, patience)

    def _begin(self, patience: "_Patience", work: Callable[..., _T], *args: Any) -> Future[_T]:
        with self._lock:
            if self._closed:
                raise EngineStopped("the decode pool is closed; make a new engine")
            future = self._threads.submit(work, *args)
            self._patience[future] = patience
            return future

    def abandon(self, future: Future[Any]) -> None:
        """Cancel what has not begun, and give what has begun a second more.

        Most pictures take far less, and a worker that is ended takes longer to start anew.
        """
        if not future.cancel():
            self._patience[future].abandon()

    def close(self) -> None:
        """Cancel what waits, finish what runs, end every worker. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for _ in range(self._count):
            self._idle.get().close()

    def _process(
        self, source: Any, min_pixels: int | None, max_pixels: int | None, patience: "_Patience"
    ) -> Processed:
        setup = self._setup
        data = read_source(source, setup.limits)
        if not isinstance(data, bytes):  # decoded already, and resizing holds no GIL
            return process_image(data, setup.processor, setup.limits, min_pixels, max_pixels)
        task = {"image": {"min_pixels": min_pixels, "max_pixels": max_pixels}}
        answer, features = self._ask(task, data, patience)
        return Processed(
            features=features,
            grid_thw=tuple(answer["grid_thw"]),
            num_rows=answer["num_rows"],
            identity=bytes.fromhex(answer["identities"][0]),
        )

    def _process_clip(
        self, source: bytes | Frames, task: ClipTask, patience: "_Patience"
    ) -> ProcessedClip:
        setup = self._setup
        files = [source] if isinstance(source, bytes) else list(source)
        data = b"".join(file for file in files if isinstance(file, bytes))
        if not all(isinstance(file, bytes) for file in files):  # decoded already
            return process_clip(source, setup.video, setup.limits, task)
        message = {
            "clip": {**task.sampling._asdict(), "max_pixels": task.max_pixels},
            "sizes": None if isinstance(source, bytes) else [len(file) for file in files],
        }
        answer, features = self._ask(message, data, patience)
        seconds, step_seconds = answer["timing"]
        return ProcessedClip(
            features=features,
            grid_thw=tuple(answer["grid_thw"]),
            num_rows=answer["num_rows"],
            identities=tuple(map(bytes.fromhex, answer["identities"])),
            timing=Timing(tuple(seconds), step_seconds),
        )

    def _ask(
        self, task: dict[str, Any], data: bytes, patience: "_Patience"
    ) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        """Have a worker process a file; its answer, and the patches."""
        is_picture = "image" in task
        kind = "picture" if is_picture else "video"
        # the limits of its size change nothing about decoding a picture; frames are another matter
        offence = b"image" if is_picture else json.dumps(task).encode(), data
        self._quarantine.check(*offence)
        worker = self._idle.get()
        try:
            if not worker.is_alive:
                worker = self._replace(worker)
            patience.start(self._timeout_seconds)
            processed = worker.process(task, data, patience)
            if not worker.has_memory:
                with self._lock:
                    self._inline_count += 1
            return processed
        except (errors.JaxmmError, DecodeFault):
            raise  # the worker has said all that it had to
        except _Unwanted:
            worker = self._replace(worker)
            raise MediaError(f"the {kind}'s requests were aborted") from None
        except (EOFError, OSError) as error:
            how = "took too long" if isinstance(error, TimeoutError) else "ended unexpectedly"
            self._quarantine.add(*offence)
            worker = self._replace(worker)
            raise MediaError(f"the {kind} could not be decoded: its process {how}") from None
        except BaseException:  # half an answer is left, which nobody else must read
            worker = self._replace(worker)
            raise
        finally:
            self._idle.put(worker)

    def _replace(self, worker: "_Worker") -> "_Worker":
        logger.warning("decode worker replaced exit_status=%d", worker.kill())
        try:
            return self._start()
        except OSError as error:
            reason = f"no decoding process can be started: {error.strerror}"
            raise Overloaded(f"{reason}. Send the request again later.") from error

    def _start(self) -> "_Worker":
        worker = _Worker(self._setup)
        if not worker.has_memory and not self._warned:
            self._warned = True
            logger.warning("shared memory refused; patches come by socket, which is slower")
        return worker


class DecodeFault(RuntimeError):
    """A fault of jaxmm's own in a decoding process; the file has nothing to do with it."""


class _Unwanted(Exception):
    """Nobody waits for the picture any more."""


class _Patience:
    """How long a picture is waited for: from its start, and from when nobody wants it."""

    def __init__(self) -> None:
        self._end = math.inf
        self._abandoned_end = math.inf

    def start(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def abandon(self) -> None:
        self._abandoned_end = time.monotonic() + _GRACE_SECONDS

    def check(self) -> None:
        """Raise what ends the wait, when it is over."""
        now = time.monotonic()
        if now > self._end:
            raise TimeoutError
        if now > self._abandoned_end:
            raise _Unwanted


class _Worker:
    """The parent's side of one worker: its process, socket and shared segment."""

    def __init__(self, setup: Setup) -> None:
        with contextlib.ExitStack() as lent, contextlib.ExitStack() as undo:
            self._memory, memory_fd = None, _segment(_patch_bytes(setup.processor, setup.video))
            if memory_fd != NO_MEMORY:
                lent.callback(os.close, memory_fd)
                self._memory = undo.enter_context(mmap.mmap(memory_fd, 0))
            parent_end, child_end = socket.socketpair()
            lent.enter_context(child_end)
            self._wire = undo.enter_context(Wire(parent_end, glance_seconds=_GLANCE_SECONDS))
            self._process = _start_process(child_end.fileno(), memory_fd)
            undo.callback(self.kill)
            lent.close()  # or the end of the process would not be seen
            self._wire.send(pickle.dumps(setup))
            undo.pop_all()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def has_memory(self) -> bool:
        return self._memory is not None

    def process(
        self, task: dict[str, Any], data: bytes, patience: _Patience
    ) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        """Have one file processed.

        Raises:
            RequestError, DecodeFault: The worker's answer.
            EOFError, OSError: The worker is lost.
            TimeoutError, _Unwanted: It has taken too long to read, to process or to answer.
        """
        self._wire.check = patience.check
        self._wire.send(json.dumps(task).encode())
        self._wire.send(data)
        answer: dict[str, Any] = json.loads(self._wire.receive())
        if "error" in answer:
            raise _ERRORS[answer["error"]](answer["message"])
        if "fault" in answer:
            logger.error("decoding failed error=%s\n%s", answer["fault"], answer["trace"])
            raise DecodeFault(answer["fault"])
        return answer, self._features(tuple(answer["shape"]), answer["shared"])

    def close(self) -> int:
        """Let the process end and give its resources back; its exit status."""
        self._wire.close()
        try:
            status = self._process.wait(_EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._memory is not None:
            self._memory.close()
        return status

    def kill(self) -> int:
        """`close` a worker that will not end by itself."""
        self._process.kill()
        return self.close()

    def _features(self, shape: tuple[int, int], shared: bool) -> npt.NDArray[np.uint8]:
        """Copy the patches out, so that the segment is free for the next picture."""
        features = np.empty(shape, np.uint8)
        if shared and self._memory is not None:
            features.reshape(-1)[:] = np.frombuffer(self._memory, np.uint8, features.size)
        else:
            self._wire.receive_into(features.data.cast("B"))
        features.flags.writeable = False
        return features


def _patch_bytes(processor: Processor, video: VideoProcessor | None) -> int:
    """Bytes of the patches of anything that is sent."""
    largest = processor.max_patches * processor.num_values
    return largest if video is None else max(largest, video.max_bytes)


def _enough_memory(processor: Processor, video: VideoProcessor | None, limits: Limits) -> int:
    """Bytes for the largest picture allowed, as four copies with transparency, and the patches."""
    return 16 * limits.max_decode_pixels + 4 * _patch_bytes(processor, video) + (256 << 20)


def _segment(num_bytes: int) -> int:
    """Descriptor of an anonymous file of that size; NO_MEMORY where the system refuses one."""
    fd = NO_MEMORY
    try:
        fd = _anonymous_file()
        os.ftruncate(fd, num_bytes)
    except OSError:
        if fd != NO_MEMORY:
            os.close(fd)
        return NO_MEMORY
    return fd


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jaxmm-decode")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _start_process(socket_fd: int, memory_fd: int) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "jaxmm.host.decode_worker", str(socket_fd), str(memory_fd)],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[fd for fd in (socket_fd, memory_fd) if fd != NO_MEMORY],
    )
