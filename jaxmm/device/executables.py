"""Compiles each step for each bucket, ahead of time, and keeps the executables. Host only.

An executable is stored in the compile cache directory under a digest of all that went into it:
the traced source and what it imports, the shapes, the settings, JAX's own among them, the versions
and the machine. A warm start reads it back without tracing anything.
"""

import functools
import hashlib
import io
import logging
import os
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import xla_client
from tqdm import tqdm

import jaxmm.models
from jaxmm.device.ledger import CompileLedger, CompileRecord
from jaxmm.device.mappings import check_mappings

logger = logging.getLogger(__name__)

_LINKING = threading.Lock()
"""One executable is loaded at a time: two threads at it take five times as long (LLVM's linker)."""

Executable = Callable[..., Any]
Lower = Callable[[], jax.stages.Lowered]
Key = tuple[str, int]
"""Step and size."""

_DIGEST_BYTES = 32
_CHECK_EVERY = 16
"""Executables compiled between two looks at the mappings: counting them takes milliseconds."""
_TRACED = (
    "jaxmm/device",
    "jaxmm/config.py",
    "jaxmm/encoder_memory.py",
    "jaxmm/errors.py",
    "jaxmm/host/arena.py",
    "jaxmm/host/batch.py",
    "jaxmm/host/buckets.py",
    "jaxmm/host/grammar.py",
    "jaxmm/host/item.py",
    "jaxmm/host/lanes.py",
    "jaxmm/host/limits.py",
    "jaxmm/host/page_pool.py",
    "jaxmm/host/plan.py",
    "jaxmm/host/prefix_cache.py",
    "jaxmm/host/prefix_key.py",
    "jaxmm/host/scoring.py",
    "jaxmm/host/sequence.py",
    "jaxmm/host/staging.py",
    "jaxmm/host/tiles.py",
    "jaxmm/request.py",
    "jaxmm/sizes.py",
    "kernels_pallas",
)
"""Traced code, and all that it imports, directly or not (tested): shapes and constants come from
there. The model families are added to it."""

_NOT_COMPILED = (
    "jax_compilation_cache",
    "jax_log",
    "jax_num_cpu_devices",  # which devices there are is told beside it
    "jax_persistent_cache",
    "jax_platform",
    "jax_traceback",
)
"""Beginnings of names of JAX's settings."""


class Executables:
    """Executables by (step, size). A lookup never compiles."""

    def __init__(
        self,
        ledger: CompileLedger,
        cache_dir: str,
        fingerprint: str,
        devices: Sequence[jax.Device],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Start empty.

        Args:
            ledger: Told of each executable.
            cache_dir: Where they are kept between starts; empty for nowhere.
            fingerprint: What beside step, size, source and machine tells them apart: the model's
                dimensions and the engine's sizes.
            devices: Those that the steps run on, in the order of their mesh.
            prepare: What makes it possible to compile or load one; called often, on any thread.
        """
        self._ledger = ledger
        self._directory = Path(cache_dir).expanduser() if cache_dir else None
        self._fingerprint = fingerprint
        self._devices = devices
        self._prepare = prepare or (lambda: None)
        self._table: dict[Key, Future[Executable]] = {}
        self._used: set[Key] = set()
        self._restorer = ThreadPoolExecutor(1, thread_name_prefix="jaxmm-restore")

    def __getitem__(self, key: Key) -> Executable:
        """The executable, to be run; waits where it is still being read from the cache."""
        self._used.add(key)
        return self._table[key].result()

    def was_used(self, key: Key) -> bool:
        """Whether it was ever looked up."""
        return key in self._used

    def is_ready(self, key: Key) -> bool:
        """Whether a lookup would not wait."""
        return self._table[key].done()

    def __len__(self) -> int:
        return len(self._table)

    def warm_up(self, lowers: dict[Key, Lower], *, progress: bool) -> None:
        """Make every executable.

        Those that the cache lacks are compiled side by side, and waited for. Those that it has
        are read back on a thread of their own, smallest first: serving can begin meanwhile.

        Args:
            lowers: For each (step, size) a function that traces and lowers it.
            progress: Show a bar.

        Raises:
            ConfigError: The process has nearly no memory mapping left, before or meanwhile.
        """
        check_mappings()  # fewer than `_CHECK_EVERY` would not be looked at
        workers = max(1, min(8, os.cpu_count() or 1))
        compiling: list[Future[Executable]] = []
        pool = ThreadPoolExecutor(workers, thread_name_prefix="jaxmm-compile")
        try:
            for key in sorted(lowers, key=lambda key: key[1]):
                blob = self._read(key)
                if blob is not None:
                    restored = self._restorer.submit(self._restore, key, blob, lowers[key])
                    self._table[key] = restored
            # largest first: the longest compile must not be the last to start
            for key in sorted(lowers.keys() - self._table.keys(), key=lambda key: -key[1]):
                self._table[key] = pool.submit(self._compile, key, lowers[key])
                compiling.append(self._table[key])
            done = as_completed(compiling)
            total, off = len(compiling), not (progress and compiling)
            for future in tqdm(done, desc="compile", total=total, unit="step", disable=off):
                future.result()
        finally:  # after an error or Ctrl-C, no compile begins any more
            pool.shutdown(cancel_futures=True)

    def settle(self) -> None:
        """Wait until every executable is there."""
        for future in self._table.values():
            future.result()

    def close(self) -> None:
        """Stop reading back what nobody will use."""
        self._restorer.shutdown(wait=True, cancel_futures=True)

    def _read(self, key: Key) -> bytes | None:
        path = self._path(key)
        return None if path is None else _read_entry(path)

    def _restore(self, key: Key, blob: bytes, lower: Lower) -> Executable:
        check_mappings()  # before: what was read back well is no reason to fail
        self._prepare()
        start = time.perf_counter()
        with _LINKING:
            executable = _load(blob, self._devices)
        if executable is None:
            return self._compile(key, lower)
        self._note(key, start, restored=True)
        return executable

    def _compile(self, key: Key, lower: Lower) -> Executable:
        self._prepare()
        start = time.perf_counter()
        compiled = lower().compile()
        path = self._path(key)
        if path is not None:
            _store(path, compiled, self._devices)
        self._note(key, start, restored=False)
        return compiled

    def _note(self, key: Key, start: float, *, restored: bool) -> None:
        seconds = time.perf_counter() - start
        step, size = key
        count = self._ledger.add(
            CompileRecord(phase="warmup", step=step, size=size, seconds=seconds, restored=restored)
        )
        if not restored and count % _CHECK_EVERY == 0:
            check_mappings()

    def _path(self, key: Key) -> Path | None:
        if self._directory is None:
            return None
        text = f"{key}|{self._fingerprint}|{_machine()}|{_jax_config()}|{source_digest()}"
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.exe"


def _store(path: Path, compiled: jax.stages.Compiled, devices: Sequence[jax.Device]) -> None:
    """Write an executable; a full or read-only disk costs the next start its time, no more."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        ids = [device.id for device in devices]
        blob = pickle.dumps((serialize_executable.serialize(compiled), ids))
        temporary.write_bytes(hashlib.sha256(blob).digest() + blob)
        temporary.replace(path)
    except (OSError, ValueError, NotImplementedError) as e:
        logger.warning("compile cache not written path=%s error=%s", path, e)


def _read_entry(path: Path) -> bytes | None:
    """Read an entry; None when there is none, or it is damaged (it could be in machine code)."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, blob = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if hashlib.sha256(blob).digest() != digest:
        logger.warning("compile cache entry damaged path=%s", path)
        return None
    return blob


def _load(blob: bytes, devices: Sequence[jax.Device]) -> Executable | None:
    """Turn an entry into an executable; None when this machine or version cannot."""
    try:
        (serialized, in_tree, out_tree), ids = pickle.loads(blob)
        unpickler = _Unpickler(serialized, dict(zip(ids, devices, strict=True)))
        unloaded, args_info, no_kwargs = unpickler.load()
        return jax.stages.Compiled(
            unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs
        )
    except (pickle.UnpicklingError, EOFError, ValueError, jax.errors.JaxRuntimeError) as e:
        logger.warning("compile cache entry unusable error=%s", e)
        return None


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Reads an executable for other devices than those that it was compiled on.

    Replicas run the same executables, each on chips of its own. JAX's own reader takes the devices
    from the entry, and so does the CPU's client if it is not told otherwise.
    """

    def __init__(self, serialized: bytes, devices: dict[int, jax.Device]) -> None:
        """Take the entry, and for each device in it the one to use in its place."""
        here = list(devices.values())
        super().__init__(io.BytesIO(serialized), here[0].client, here)
        self.devices_by_id = devices

    def persistent_load(self, pid: tuple[str, Any]) -> Any:
        moved = any(device.id != i for i, device in self.devices_by_id.items())
        if pid[0] != "exec" or not moved:
            return super().persistent_load(pid)
        ids = np.array([[device.id for device in self.devices_by_id.values()]])
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = ids.shape
        options.device_assignment = xla_client.DeviceAssignment.create(ids)
        return self.backend.deserialize_executable(pid[1], self.execution_devices, options)


@functools.cache
def _machine() -> str:
    """Versions, flags, devices and processor."""
    flags = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    devices = ",".join(f"{d.platform}:{d.device_kind}" for d in jax.devices())
    versions = f"{jax.__version__}|{jaxlib.version.__version__}|{flax.__version__}"
    versions += f"|{jax.devices()[0].client.platform_version}"  # of libtpu, too
    place = f"{jax.process_index()} of {jax.process_count()}"
    return f"{versions}|{flags}|{devices}|{place}|{_processor()}"


def _jax_config() -> str:
    """JAX's settings, all but those of which it is known that no executable depends on them.

    Not cached: they may change between two engines of a process.
    """
    settings = sorted(jax.config.values.items())
    return str([(name, value) for name, value in settings if not name.startswith(_NOT_COMPILED)])


def _processor() -> str:
    """What decides which instructions the compiler may use."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    telling = ("flags", "model", "Features", "CPU ")  # x86-64, and Arm
    return "".join(sorted({line for line in info.splitlines() if line.startswith(telling)}))


def source_digest() -> str:
    """Digest of all source that is traced, the folders with model families among it."""
    return _digest_of(tuple(jaxmm.models.__path__))


def digested_files(families: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Names and paths of the files of `source_digest`, in order.

    Args:
        families: Folders with model families.
    """
    root = Path(__file__).parents[2]
    for place in [*(root / name for name in _TRACED), *map(Path, families)]:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield path.relative_to(place.parent).as_posix(), path


@functools.cache
def _digest_of(families: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name, path in digested_files(families):
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
