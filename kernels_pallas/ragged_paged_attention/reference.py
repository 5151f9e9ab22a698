"""Ragged paged attention, as short as can be; a Python loop over concrete sequences. Traced."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

if TYPE_CHECKING:
    from kernels_pallas.ragged_paged_attention.api import Ragged


def paged_attention_reference(
    q_THC: Float[Array, "T H C"], pages_PJSC: Float[Array, "P J S C"], ragged: "Ragged"
) -> Float[Array, "T H C"]:
    """See `ragged_paged_attention`; `ragged` must be concrete."""
    num_kv = pages_PJSC.shape[1] // 2
    group = q_THC.shape[1] // num_kv
    out_THC = jnp.zeros_like(q_THC)
    for b in range(int(ragged.num_sequences)):
        start, count = int(ragged.starts_B[b]), int(ragged.counts_B[b])
        length = int(ragged.lengths_B[b])
        kv_JZC = jnp.concatenate(list(pages_PJSC[ragged.tables_BQ[b]]), axis=1)[:, :length]
        k_HZC, v_HZC = jnp.repeat(kv_JZC[:num_kv], group, 0), jnp.repeat(kv_JZC[num_kv:], group, 0)
        q_XHC = q_THC[start : start + count].astype(jnp.float32) * q_THC.shape[2] ** -0.5
        scores_HXZ = jnp.einsum("XHC,HZC->HXZ", q_XHC, k_HZC.astype(jnp.float32))
        position_X = jnp.arange(length - count, length)
        scores_HXZ = jnp.where(jnp.arange(length) <= position_X[:, None], scores_HXZ, -jnp.inf)
        weights_HXZ = jax.nn.softmax(scores_HXZ, axis=-1)
        part_XHC = jnp.einsum("HXZ,HZC->XHC", weights_HXZ, v_HZC.astype(jnp.float32))
        out_THC = out_THC.at[start : start + count].set(part_XHC.astype(q_THC.dtype))
    return out_THC
