"""Scatter rows: the op, the arena's layouts, and its choice of implementation. Traced."""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from kernels_pallas.scatter_rows import kernel, layout, write

Implementation = Literal["portable", "pallas"]


def row_shape(width: int, *, implementation: Implementation, levels: int = 1) -> tuple[int, ...]:
    """Shape of one arena row: all axes of the arena but the first.

    portable: [Z * D], the levels side by side; pallas: [Z, 4, J], each level a tile of its own
    (`layout`).

    Args:
        width: D.
        levels: Z, the embedding and deepstack's.
    """
    if implementation == "pallas":
        return levels, layout.SUBLANES, layout.row_lanes(width)
    return (levels * width,)


def write_rows(
    arena: Float[Array, "R ..."],
    rows_MX: Float[Array, "M X"],
    slot_M: Int32[Array, " M"],
    *,
    implementation: Implementation,
) -> Float[Array, "R ..."]:
    """Write new rows into the arena, in place where it is donated.

    Args:
        arena: Rows of `row_shape`.
        rows_MX: All levels of a row side by side (X = Z * D).
        slot_M: Where each row goes; no slot twice, but one that nobody reads.
        implementation: "portable" for CPU and GPU, "pallas" for TPU.
    """
    rows_MX = rows_MX.astype(arena.dtype)
    if implementation == "pallas":
        levels = arena.shape[1]
        rows_LD = rows_MX.reshape(rows_MX.shape[0] * levels, -1)
        packed = layout.pack_rows(rows_LD).reshape(-1, *arena.shape[1:])
        return write.write_rows(arena, packed, slot_M)

    def write_one(m: Int32[Array, ""], arena: Array) -> Array:
        return lax.dynamic_update_slice(
            arena, lax.dynamic_slice_in_dim(rows_MX, m, 1), (slot_M[m], 0)
        )

    return lax.fori_loop(0, slot_M.shape[0], write_one, arena)


def scatter_rows(
    x_TD: Float[Array, "T D"],
    arena: Float[Array, "R ..."],
    row_T: Int32[Array, " T"],
    *,
    level: int = 0,
    add: bool = False,
    implementation: Implementation = "portable",
) -> Float[Array, "T D"]:
    """Put the arena rows that row_T names into the embeddings, or add them to hidden states.

    Args:
        x_TD: Embeddings of the step's ids, or hidden states.
        arena: Rows of `row_shape`; rows of images that the step needs have been written.
        row_T: Arena row of each token, or -1: that token is left as it is.
        level: Which of a row's levels.
        add: Add it instead of putting it.
        implementation: "portable" for CPU and GPU, "pallas" for TPU.

    Raises:
        ValueError: "pallas" and shapes that the kernel cannot take.
    """
    if implementation == "pallas":
        return kernel.scatter_rows(x_TD, arena, kernel.plan_rows(row_T), level=level, add=add)
    arena_RZD = arena.reshape(arena.shape[0], -1, x_TD.shape[1])
    picked_TD = arena_RZD[jnp.maximum(row_T, 0), level]  # -1 reads row 0; discarded below
    picked_TD = picked_TD.astype(x_TD.dtype)
    return jnp.where(row_T[:, None] >= 0, x_TD + picked_TD if add else picked_TD, x_TD)
