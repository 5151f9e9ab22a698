"""What the paged attention kernels must equal: dense attention, one sequence at a time.

Traced with concrete tables: starts and lengths are read as numbers. In float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.online_softmax import LOG2_E
from kernels_pallas.ragged_paged_attention.layout import value_lane


def attend_one(
    q_THC: Float[Array, "T H C"],
    k_LKC: Float[Array, "L K C"],
    v_LKC: Float[Array, "L K C"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T H C"]:
    """Causal attention of the last T tokens of one sequence over its L keys."""
    T, H, C = q_THC.shape
    L, K, _ = k_LKC.shape
    q_TKGC = q_THC.astype(jnp.float32).reshape(T, K, H // K, C)
    score_KGTL = jnp.einsum("TKGC,LKC->KGTL", q_TKGC, k_LKC.astype(jnp.float32)) * scale
    if soft_cap is not None:
        score_KGTL = soft_cap * jnp.tanh(score_KGTL / soft_cap)
    distance_TL = (jnp.arange(T) + L - T)[:, None] - jnp.arange(L)
    seen_TL = (distance_TL >= 0) & (distance_TL < (L if window is None else window))
    weight_KGTL = jax.nn.softmax(jnp.where(seen_TL, score_KGTL, -jnp.inf), axis=-1)
    out_TKGC = jnp.einsum("KGTL,LKC->TKGC", weight_KGTL, v_LKC.astype(jnp.float32))
    return out_TKGC.reshape(q_THC.shape)


def ragged_paged_attention(
    q_THC: Float[Array, "T H C"],
    new_TKJ: Float[Array, "T K J"],
    pages_PKSJ: Float[Array, "P K S J"],
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    num_sequences: int,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "T H C"], Float[Array, "P K S J"]]:
    """Write the KV rows of a step into their pages, then attend.

    Args:
        q_THC: Queries, scaled as `layout.query_scale` says, without padding lanes.
        new_TKJ: KV rows of the step's tokens (`layout`).
        pages_PKSJ: The pool before the step.
        start_B1: First token of each sequence in the step, and the end of the last one.
        length_B: KV tokens of each sequence after the step.
        page_table_BQ: The pages of each sequence, in order.
        num_sequences: How many of the B rows are real.

    Returns:
        float32 outputs (zero for tokens of no sequence) and the pool after the step.
    """
    C, S = q_THC.shape[2], pages_PKSJ.shape[2]
    out_THC = jnp.zeros(q_THC.shape, jnp.float32)
    for b in range(num_sequences):
        tokens = slice(int(start_B1[b]), int(start_B1[b + 1]))
        length = int(length_B[b])
        slots = jnp.arange(length - (tokens.stop - tokens.start), length)
        page = page_table_BQ[b, slots // S]
        pages_PKSJ = pages_PKSJ.at[page, :, slots % S].set(new_TKJ[tokens])
        rows_LKJ = pages_PKSJ[page_table_BQ[b]].swapaxes(1, 2).reshape(-1, *new_TKJ.shape[1:])
        k_LKC = rows_LKJ[:length, :, :C]
        v_LKC = rows_LKJ[:length, :, value_lane(C) : value_lane(C) + C]
        out_THC = out_THC.at[tokens].set(
            attend_one(
                q_THC[tokens], k_LKC, v_LKC, scale=1 / LOG2_E, window=window, soft_cap=soft_cap
            )
        )
    return out_THC, pages_PKSJ
