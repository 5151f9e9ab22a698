"""Scatter rows: the op and its choice of implementation. Traced."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

Implementation = Literal["portable"]


def scatter_rows(
    x_TD: Float[Array, "T D"],
    arena_RX: Float[Array, "R X"],
    row_T: Int32[Array, " T"],
    *,
    level: int = 0,
    add: bool = False,
    implementation: Implementation = "portable",
) -> Float[Array, "T D"]:
    """Put the arena rows that row_T names into the embeddings, or add them to hidden states.

    Args:
        x_TD: Embeddings of the step's ids, or hidden states.
        arena_RX: The arena, X = Z * D: one level after the other; rows of images that the step
            needs have been written.
        row_T: Arena row of each token, or -1: that token is left as it is.
        level: Which D values of a row.
        add: Add them instead of putting them.
        implementation: "portable" for CPU and GPU.
    """
    del implementation
    arena_RZD = arena_RX.reshape(arena_RX.shape[0], -1, x_TD.shape[1])
    picked_TD = arena_RZD[jnp.maximum(row_T, 0), level]  # -1 reads row 0; discarded below
    picked_TD = picked_TD.astype(x_TD.dtype)
    return jnp.where(row_T[:, None] >= 0, x_TD + picked_TD if add else picked_TD, x_TD)
