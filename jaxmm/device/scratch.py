"""Keeps the memory that steps compute in, on a CPU. Host only.

XLA asks the C library for a step's scratch memory anew each time, tens to hundreds of megabytes.
glibc maps such blocks from the system and gives them back at once, so every step pays for clearing
its pages: 44,000 page faults for a step of 448 tokens.
"""

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST = 2**31 - 1


def share_heap() -> bool:
    """Have all threads that start from now on take their memory from one heap.

    A thread with a heap of its own maps every block above 64 MiB anew, whatever
    `keep_scratch_memory` says. JAX starts the threads that run steps at the first use of a device,
    so this comes before.

    Returns:
        Whether the C library can be told; only glibc can.
    """
    return _tell((_M_ARENA_MAX, 1))


def keep_scratch_memory() -> bool:
    """Have the C library keep freed blocks for the next step, for the whole process.

    Returns:
        Whether the C library can be told; only glibc can.
    """
    return _tell((_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, _LARGEST))


def _tell(*options: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in options)
