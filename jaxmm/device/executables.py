"""Compiles each step for each bucket, ahead of time, and keeps the executables. Host only.

An executable is stored in the compile cache directory under a digest of all that went into it:
the traced source, the shapes, the settings, the versions and the machine. A warm start reads it
back without tracing anything.
"""

import functools
import hashlib
import logging
import os
import pickle
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable
from tqdm import tqdm

from jaxmm.device.ledger import CompileLedger, CompileRecord

logger = logging.getLogger(__name__)

Executable = Callable[..., Any]
Lower = Callable[[], jax.stages.Lowered]

_DIGEST_BYTES = 32
_TRACED = ("jaxmm/device", "jaxmm/models", "jaxmm/host/batch.py", "kernels_pallas")


class Executables:
    """Executables by (step, size). A lookup never compiles."""

    def __init__(self, ledger: CompileLedger, cache_dir: str, fingerprint: str) -> None:
        """Start empty.

        Args:
            ledger: Told of each executable.
            cache_dir: Where they are kept between starts; empty for nowhere.
            fingerprint: What beside step, size, source and machine tells them apart: the model's
                dimensions and the engine's sizes.
        """
        self._ledger = ledger
        self._directory = Path(cache_dir).expanduser() if cache_dir else None
        self._fingerprint = fingerprint
        self._table: dict[tuple[str, int], Executable] = {}

    def __getitem__(self, key: tuple[str, int]) -> Executable:
        return self._table[key]

    def __len__(self) -> int:
        return len(self._table)

    def warm_up(self, lowers: dict[tuple[str, int], Lower], *, progress: bool) -> None:
        """Make every executable, restored where the cache has it, side by side.

        Args:
            lowers: For each (step, size) a function that traces and lowers it.
            progress: Show a bar.
        """
        workers = max(1, min(8, os.cpu_count() or 1))
        with ThreadPoolExecutor(workers, thread_name_prefix="jaxmm-compile") as pool:
            # largest first: the longest compile must not be the last to start
            keys = sorted(lowers, key=lambda key: -key[1])
            made = pool.map(lambda key: self._make(key, lowers[key]), keys)
            bar = tqdm(made, desc="compile", total=len(keys), unit="step", disable=not progress)
            self._table |= dict(zip(keys, bar, strict=True))

    def _make(self, key: tuple[str, int], lower: Lower) -> Executable:
        start = time.perf_counter()
        path = self._path(key)
        executable = _restore(path) if path is not None else None
        restored = executable is not None
        if executable is None:
            compiled = lower().compile()
            if path is not None:
                _store(path, compiled)
            executable = compiled
        self._ledger.add(
            CompileRecord(
                phase="warmup",
                step=key[0],
                size=key[1],
                seconds=time.perf_counter() - start,
                restored=restored,
            )
        )
        return executable

    def _path(self, key: tuple[str, int]) -> Path | None:
        if self._directory is None:
            return None
        text = f"{key}|{self._fingerprint}|{_machine()}|{_source_digest()}"
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.exe"


def _store(path: Path, compiled: jax.stages.Compiled) -> None:
    """Write an executable; a full or read-only disk costs the next start its time, no more."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        blob = pickle.dumps(serialize_executable.serialize(compiled))
        temporary.write_bytes(hashlib.sha256(blob).digest() + blob)
        temporary.replace(path)
    except (OSError, ValueError, NotImplementedError) as e:
        logger.warning("compile cache not written path=%s error=%s", path, e)


def _restore(path: Path) -> Executable | None:
    """Read an executable back; None when there is none or it cannot be used.

    Damage is found before anything is loaded: it could be in the machine code.
    """
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, blob = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if hashlib.sha256(blob).digest() != digest:
        logger.warning("compile cache entry damaged path=%s", path)
        return None
    try:
        executable: Executable = serialize_executable.deserialize_and_load(*pickle.loads(blob))
    except (pickle.UnpicklingError, EOFError, ValueError, jax.errors.JaxRuntimeError) as e:
        logger.warning("compile cache entry unusable path=%s error=%s", path, e)
        return None
    return executable


@functools.cache
def _machine() -> str:
    """Versions, flags, devices and processor."""
    flags = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    devices = ",".join(f"{d.platform}:{d.device_kind}" for d in jax.devices())
    return f"{jax.__version__}|{jaxlib.version.__version__}|{flags}|{devices}|{_processor()}"


def _processor() -> str:
    """What decides which instructions the compiler may use."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return "".join(
        sorted({line for line in info.splitlines() if line.startswith(("flags", "model"))})
    )


@functools.cache
def _source_digest() -> str:
    """Digest of all source that is traced."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for name in _TRACED:
        place = root / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
