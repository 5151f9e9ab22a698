"""How TPU memory is cut: every array lies in tiles of its last two axes. Host only."""

from typing import Any

import jax.numpy as jnp

LANES = 128
"""Lanes of a vector register and of a tile."""


def tile_rows(dtype: Any) -> int:
    """Rows of a register of this type, 8 for 32 bits and 16 for 16: what aligned slices hold."""
    return 32 // int(jnp.dtype(dtype).itemsize)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below a value."""
    return -(-value // multiple) * multiple
