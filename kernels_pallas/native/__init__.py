"""Kernels for CPUs, compiled by numba and called by XLA; nothing is imported before it is used."""

import importlib
import logging
import platform
import re
import threading
from pathlib import Path

import jax

MAX_ROWS = 16
"""That `few_rows` takes."""
VECTOR = 16
"""Numbers that the kernels take at once; depths and channels are multiples of it."""
INTERFACE_VERSION = 0, 3
"""The one whose structs `ffi` reads: XLA_FFI_API_MAJOR and _MINOR."""

FEW_ROWS, MANY_ROWS, GATED_ROWS, PAGES, PATCHES, SLOTS = range(6)
"""Numbers of the kernels; executables hold them."""

_registering = threading.Lock()
_registered: list[bool] = []

logger = logging.getLogger(__name__)


def is_available() -> bool:
    """Whether they can be used: numba can, and jaxlib's interface is the one that they know."""
    if platform.machine() != "x86_64":
        return False
    if _interface_version() != INTERFACE_VERSION:
        logger.warning(
            "native=false reason=jaxlib's interface for calls is not %s", INTERFACE_VERSION
        )
        return False
    try:
        numba = importlib.import_module("numba")
    except ImportError as e:  # not installed, or it refuses this numpy
        logger.info("native=false reason=%s", e)
        return False
    if numba.config.DISABLE_JIT:
        logger.warning("native=false reason=NUMBA_DISABLE_JIT is set")
        return False
    features = importlib.import_module("llvmlite.binding").get_host_cpu_features()
    return bool(features.get("fma", False))


def register(cache_dir: str = "") -> None:
    """Compile the kernels, or read what was compiled, and make them known to XLA.

    For any thread; an executable that calls them can be made or loaded only afterwards. Once in a
    process: fifteen seconds, or less than one.

    Args:
        cache_dir: Where machine code is kept between processes; empty: nowhere. What cannot be
            written or read there is compiled anew.
    """
    with _registering:
        if not _registered:
            _register(cache_dir)
            _registered.append(True)


def _register(cache_dir: str) -> None:
    from kernels_pallas.native import few_rows, ffi, many_rows, pages, patches, slots

    modules = few_rows, many_rows, pages, patches, slots
    ffi.register({n: pair for m in modules for n, pair in m.KERNELS.items()}, cache_dir)


def _interface_version() -> tuple[int, ...]:
    """Of the structs that XLA hands to a call; (): unknown."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return ()
    return tuple(map(int, re.findall(r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", text)))
