"""What `kernel.kv_update` must equal: one indexed write a token. Host only, in NumPy."""

import numpy as np
from jaxtyping import Float, Int32


def kv_update(
    new_TY: Float[np.ndarray, "T Y"],
    pages_PKSJ: Float[np.ndarray, "P K S J"],
    start_B1: Int32[np.ndarray, " B1"],
    length_B: Int32[np.ndarray, " B"],
    page_table_BQ: Int32[np.ndarray, "B Q"],
    first: int,
    end: int,
) -> Float[np.ndarray, "P K S J"]:
    """The pool with the rows of sequences `first` to `end`; see `kernel.kv_update`."""
    _, K, S, J = pages_PKSJ.shape
    new_TKJ, pages_PKSJ = new_TY.reshape(-1, K, J), pages_PKSJ.copy()
    for b in range(first, end):
        for token in range(start_B1[b], start_B1[b + 1]):
            slot = token - start_B1[b + 1] + length_B[b]
            pages_PKSJ[page_table_BQ[b, slot // S], :, slot % S] = new_TKJ[token]
    return pages_PKSJ
