"""Keeps the memory that steps compute in, on a CPU. Host only.

XLA asks the C library for a step's scratch memory anew each time, tens of megabytes. glibc maps
such blocks from the system and gives them back at once, so every step pays for clearing its pages:
ten thousand page faults for a step of 512 tokens.
"""

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST = 2**31 - 1


def keep_scratch_memory() -> bool:
    """Have the C library keep freed blocks for the next step, for the whole process.

    Returns:
        Whether it can be told; only glibc can.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    options = ((_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, _LARGEST), (_M_ARENA_MAX, 1))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in options)
