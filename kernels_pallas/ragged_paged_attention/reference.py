"""Ragged paged attention with every token's keys laid out beside it. Traced."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

if TYPE_CHECKING:
    from kernels_pallas.ragged_paged_attention.api import Latent, Ragged


def paged_attention_reference(
    q_THC: Float[Array, "T H C"],
    pages_PJSC: Float[Array, "P J S C"],
    ragged: "Ragged",
    latent: "Latent | None" = None,
    window: int | None = None,
) -> Float[Array, "T H V"]:
    """See `ragged_paged_attention`; rows of no sequence are zeros. Z counts the keys of a table."""
    num_tokens, num_heads, channels = q_THC.shape
    scale = channels**-0.5
    if latent is not None:  # each row stands for a key and, with zeros behind, for a value
        scale, value_channels = latent.scale, latent.value_channels
        values = pages_PJSC.at[..., value_channels:].set(0)
        pages_PJSC = jnp.concatenate([pages_PJSC, values], axis=1)
    num_kv = pages_PJSC.shape[1] // 2
    token_T = jnp.arange(num_tokens)
    offset_TB = token_T[:, None] - ragged.starts_B
    live_B = jnp.arange(ragged.starts_B.shape[0]) < ragged.num_sequences
    owns_TB = (offset_TB >= 0) & (offset_TB < ragged.counts_B) & live_B
    owner_T = owns_TB.argmax(1)
    position_T = (ragged.lengths_B - ragged.counts_B + offset_TB)[token_T, owner_T]

    kv_TQJSC = pages_PJSC[ragged.tables_BQ[owner_T]].astype(jnp.float32)
    kv_TJZC = kv_TQJSC.swapaxes(1, 2).reshape(num_tokens, 2 * num_kv, -1, channels)
    kv_TJZC = jnp.repeat(kv_TJZC, num_heads // num_kv, axis=1)
    k_THZC, v_THZC = kv_TJZC[:, :num_heads], kv_TJZC[:, num_heads:]
    scores_THZ = jnp.einsum("THC,THZC->THZ", q_THC.astype(jnp.float32), k_THZC) * scale
    key_Z = jnp.arange(scores_THZ.shape[2])
    last_T = position_T if ragged.seen_T is None else ragged.seen_T
    visible_TZ = key_Z <= last_T[:, None]
    if window is not None:
        visible_TZ &= key_Z > position_T[:, None] - window
    weights_THZ = jax.nn.softmax(jnp.where(visible_TZ[:, None], scores_THZ, -jnp.inf), axis=-1)
    out_THC = jnp.einsum("THZ,THZC->THC", weights_THZ, v_THZC)
    out_THC = out_THC[:, :, : latent.value_channels if latent else channels]
    return jnp.where(owns_TB.any(1)[:, None, None], out_THC, 0.0).astype(q_THC.dtype)
