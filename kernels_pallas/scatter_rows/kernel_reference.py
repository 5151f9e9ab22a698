"""What `kernel.scatter_rows` must equal. Host only, in NumPy."""

import numpy as np
from jaxtyping import Float, Int32


def scatter_rows(
    x_TD: Float[np.ndarray, "T D"],
    arena_RZ4J: Float[np.ndarray, "R Z 4 J"],
    row_T: Int32[np.ndarray, " T"],
    *,
    level: int = 0,
    add: bool = False,
) -> Float[np.ndarray, "T D"]:
    """Put (or add) the arena row that row_T names; -1 leaves the token as it is."""
    T, D = x_TD.shape
    picked_TD = arena_RZ4J[np.maximum(row_T, 0), level].reshape(T, -1)[:, :D]
    changed_TD = x_TD + picked_TD if add else picked_TD
    return np.where(row_T[:, None] >= 0, changed_TD, x_TD)
