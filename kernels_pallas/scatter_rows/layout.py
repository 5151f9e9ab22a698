"""How vision rows lie in the arena. Host only, but `pack_rows`.

A row of D values is `[4, J]`, J lanes being a quarter of D rounded up: four sublanes of bfloat16 or
float32 are a tile of their own, so one row is one run of memory and can be moved alone. In `[R, D]`
rows share tiles: a bfloat16 row alone cannot be moved, and XLA would lay the arena out anew before
each kernel.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.tiling import LANES, round_up

SUBLANES = 4
"""Sublanes of one row."""


def row_lanes(width: int) -> int:
    """Lanes J of a row of D values."""
    return round_up(width, SUBLANES * LANES) // SUBLANES


def pack_rows(rows_MD: Float[Array, "M D"]) -> Float[Array, "M 4 J"]:
    """Rows as the arena holds them, zeros behind D."""
    M, D = rows_MD.shape
    padded = jnp.pad(rows_MD, ((0, 0), (0, SUBLANES * row_lanes(D) - D)))
    return padded.reshape(M, SUBLANES, row_lanes(D))
