"""Scatter rows: the op and its choice of implementation. Traced."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

Implementation = Literal["portable"]


def scatter_rows(
    text_TD: Float[Array, "T D"],
    arena_RD: Float[Array, "R D"],
    row_T: Int32[Array, " T"],
    *,
    implementation: Implementation = "portable",
) -> Float[Array, "T D"]:
    """Put the arena rows that row_T names into the embeddings; -1 keeps the text row.

    Args:
        text_TD: Embeddings of the step's ids.
        arena_RD: The arena; rows of images that the step needs have been written.
        row_T: Arena row of each token, or -1.
        implementation: "portable" for CPU and GPU.
    """
    del implementation
    picked_TD = arena_RD[jnp.maximum(row_T, 0)]  # -1 reads row 0; the next line discards it
    return jnp.where(row_T[:, None] >= 0, picked_TD.astype(text_TD.dtype), text_TD)
