"""What `kernel.scatter_rows` must equal. Traced."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def scatter_rows(
    x_TD: Float[Array, "T D"],
    arena_RZ4J: Float[Array, "R Z 4 J"],
    row_T: Int32[Array, " T"],
    *,
    level: int = 0,
    add: bool = False,
) -> Float[Array, "T D"]:
    """Put (or add) the arena row that row_T names; -1 leaves the token as it is."""
    T, D = x_TD.shape
    picked_TD = arena_RZ4J[jnp.maximum(row_T, 0), level].reshape(T, -1)[:, :D]
    changed_TD = x_TD + picked_TD if add else picked_TD
    return jnp.where(row_T[:, None] >= 0, changed_TD, x_TD)
