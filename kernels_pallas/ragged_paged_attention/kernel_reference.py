"""What the paged attention kernels must equal: dense attention, one sequence at a time. Host only.

In NumPy and float32: each shape would compile anew otherwise, operation by operation.
"""

import numpy as np
from jaxtyping import Float, Int32

from kernels_pallas.kv_update import kernel_reference as kv_reference
from kernels_pallas.online_softmax import LOG2_E
from kernels_pallas.ragged_paged_attention.layout import value_lane


def attend_one(
    q_THC: Float[np.ndarray, "T H C"],
    k_LKC: Float[np.ndarray, "L K C"],
    v_LKC: Float[np.ndarray, "L K C"],
    *,
    scale: float,
    seen_T: Int32[np.ndarray, " T"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[np.ndarray, "T H C"]:
    """Attention of the last T tokens of one sequence over its L keys, up to themselves or, with
    `seen_T`, up to the key that each of them names."""
    T, H, C = q_THC.shape
    L, K, _ = k_LKC.shape
    q_TKGC = q_THC.astype(np.float32).reshape(T, K, H // K, C)
    score_KGTL = np.einsum("TKGC,LKC->KGTL", q_TKGC, k_LKC.astype(np.float32)) * scale
    if soft_cap is not None:
        score_KGTL = soft_cap * np.tanh(score_KGTL / soft_cap)
    key_L, position_T1 = np.arange(L), np.arange(L - T, L)[:, None]
    seen_TL = key_L <= (position_T1 if seen_T is None else seen_T[:, None])
    if window is not None:
        seen_TL &= key_L > position_T1 - window
    score_KGTL = np.where(seen_TL, score_KGTL, -np.inf)
    weight_KGTL = np.exp(score_KGTL - score_KGTL.max(axis=-1, keepdims=True))
    weight_KGTL /= weight_KGTL.sum(axis=-1, keepdims=True)
    out_TKGC = np.einsum("KGTL,LKC->TKGC", weight_KGTL, v_LKC.astype(np.float32))
    return out_TKGC.reshape(q_THC.shape)


def ragged_paged_attention(
    q_THC: Float[np.ndarray, "T H C"],
    new_TKJ: Float[np.ndarray, "T K J"],
    pages_PKSJ: Float[np.ndarray, "P K S J"],
    start_B1: Int32[np.ndarray, " B1"],
    length_B: Int32[np.ndarray, " B"],
    page_table_BQ: Int32[np.ndarray, "B Q"],
    num_sequences: int,
    seen_T: Int32[np.ndarray, " T"] | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[np.ndarray, "T H C"], Float[np.ndarray, "P K S J"]]:
    """Write the KV rows of a step into their pages, then attend.

    Args:
        q_THC: Queries, scaled as `layout.query_scale` says, without padding lanes.
        new_TKJ: KV rows of the step's tokens (`layout`).
        pages_PKSJ: The pool before the step.
        start_B1: First token of each sequence in the step, and the end of the last one.
        length_B: KV tokens of each sequence after the step.
        page_table_BQ: The pages of each sequence, in order.
        num_sequences: How many of the B rows are real.
        seen_T: Last key of its sequence that each token sees; None: its own.

    Returns:
        float32 outputs (zero for tokens of no sequence) and the pool after the step.
    """
    (T, _, C), (_, K, J) = q_THC.shape, new_TKJ.shape
    pages_PKSJ = kv_reference.kv_update(
        new_TKJ.reshape(T, K * J), pages_PKSJ, start_B1, length_B, page_table_BQ, 0, num_sequences
    )
    out_THC = np.zeros(q_THC.shape, np.float32)
    for b in range(num_sequences):
        tokens = slice(start_B1[b], start_B1[b + 1])
        rows_LKJ = pages_PKSJ[page_table_BQ[b]].swapaxes(1, 2).reshape(-1, K, J)[: length_B[b]]
        out_THC[tokens] = attend_one(
            q_THC[tokens],
            rows_LKJ[:, :, :C],
            rows_LKJ[:, :, value_lane(C) : value_lane(C) + C],
            scale=1 / LOG2_E,
            seen_T=None if seen_T is None else seen_T[tokens],
            window=window,
            soft_cap=soft_cap,
        )
    return out_THC, pages_PKSJ
