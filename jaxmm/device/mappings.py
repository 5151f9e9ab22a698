"""Mappings of memory: Linux gives a process a limited number, and dies of none left. Host only.

XLA maps each executable for the CPU in some two hundred pieces. When the limit is met, whatever
asks for memory next fails: a thread that cannot start, or a segmentation fault.
"""

from pathlib import Path

from jaxmm.errors import ConfigError

_LIMIT = Path("/proc/sys/vm/max_map_count")
_MAPPED = Path("/proc/self/maps")
_MOST = 0.9
"""The rest is for threads, buffers and libraries."""


def share_of_mappings() -> float:
    """Which part of the mappings that this process may have is taken; 0 where nobody counts."""
    try:
        return _MAPPED.read_bytes().count(b"\n") / int(_LIMIT.read_text())
    except (OSError, ValueError):
        return 0.0


def check_mappings() -> None:
    """See that there is room for more executables.

    Raises:
        ConfigError: There is nearly none left.
    """
    share = share_of_mappings()
    if share > _MOST:
        raise ConfigError(
            f"the executables take {share:.0%} of the memory mappings that this system gives a"
            " process: use fewer buckets or replicas, close engines that are not needed, or raise"
            " vm.max_map_count (sysctl)"
        )
