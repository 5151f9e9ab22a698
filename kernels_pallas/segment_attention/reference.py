"""Segment and window attention, as short as can be: the full score matrix. Traced."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def segment_attention(
    q_NHC: Float[Array, "N H C"],
    k_NHC: Float[Array, "N H C"],
    v_NHC: Float[Array, "N H C"],
    segment_N: Int32[Array, " N"],
) -> Float[Array, "N H C"]:
    """Softmax attention over the keys of the query's own segment; zeros for padding (-1)."""
    same_NN = (segment_N[:, None] == segment_N[None, :]) & (segment_N >= 0)[:, None]
    score_HNN = jnp.einsum("nhc,mhc->hnm", q_NHC, k_NHC, preferred_element_type=jnp.float32)
    score_HNN = jnp.where(same_NN, score_HNN * q_NHC.shape[-1] ** -0.5, -jnp.inf)
    weight_HNN = jnp.where(same_NN, jax.nn.softmax(score_HNN, axis=-1), 0.0)
    return jnp.einsum("hnm,mhc->nhc", weight_HNN, v_NHC.astype(jnp.float32)).astype(q_NHC.dtype)


def window_attention(
    q_NHC: Float[Array, "N H C"],
    k_NHC: Float[Array, "N H C"],
    v_NHC: Float[Array, "N H C"],
    window_N: Int32[Array, " N"],
    block: int,
) -> Float[Array, "N H C"]:
    """Attention over the keys of the query's own window, which lies in one block."""
    num = window_N.shape[0]
    block_N = jnp.arange(num, dtype=jnp.int32) // block
    segment_N = jnp.where(window_N >= 0, block_N * num + window_N, -1)
    return segment_attention(q_NHC, k_NHC, v_NHC, segment_N)
