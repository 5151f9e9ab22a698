"""What `kernel.kv_update` must equal: one indexed write a token.

Traced with concrete tables: starts and lengths are read as numbers.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def kv_update(
    new_TY: Float[Array, "T Y"],
    pages_PKSJ: Float[Array, "P K S J"],
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    first: int,
    end: int,
) -> Float[Array, "P K S J"]:
    """Write the rows of sequences `first` to `end`; see `kernel.kv_update`."""
    _, K, S, J = pages_PKSJ.shape
    new_TKJ = new_TY.reshape(-1, K, J)
    for b in range(first, end):
        tokens = jnp.arange(int(start_B1[b]), int(start_B1[b + 1]))
        slots = tokens - start_B1[b + 1] + length_B[b]
        page = page_table_BQ[b, slots // S]
        pages_PKSJ = pages_PKSJ.at[page, :, slots % S].set(new_TKJ[tokens])
    return pages_PKSJ
