"""Kernels for CPUs, compiled by numba and called by XLA; nothing is imported before it is used."""

import functools
import importlib.util
import logging
import platform
import re
from pathlib import Path

import jax

MAX_ROWS = 16
"""That `few_rows` takes."""

INTERFACE_VERSION = 0, 3
"""The one whose structs `ffi` reads: XLA_FFI_API_MAJOR and _MINOR."""

logger = logging.getLogger(__name__)


def there() -> bool:
    """Whether they can be used: numba is installed, and jaxlib's interface is the one they know."""
    if importlib.util.find_spec("numba") is None or platform.machine() != "x86_64":
        return False
    if _interface_version() != INTERFACE_VERSION:
        logger.warning(
            "native=false reason=jaxlib's interface for calls is not %s", INTERFACE_VERSION
        )
        return False
    return True


@functools.cache
def register() -> None:
    """Compile the kernels and make them known to XLA, once in a process: three seconds."""
    from kernels_pallas.native import decode, few_rows

    few_rows.register()
    decode.register()


def _interface_version() -> tuple[int, ...]:
    """Of the structs that XLA hands to a call; (): unknown."""
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return ()
    return tuple(map(int, re.findall(r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", text)))
