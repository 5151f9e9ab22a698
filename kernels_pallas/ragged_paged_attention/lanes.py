"""Heads to the lanes that the paged attention kernels read, and back (`layout`). Traced.

With heads of 128 channels nothing is padded, and no axis changes its place.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.ragged_paged_attention import layout


def query_rows(q_THC: Float[Array, "T H C"], dtype: Any, *, scale: float) -> Float[Array, "T X"]:
    """Queries side by side, times a scale: one rounding, if XLA fuses the rotation."""
    T, H, C = q_THC.shape
    lanes = layout.query_lanes(C)
    scaled_THC = (q_THC.astype(jnp.float32) * scale).astype(dtype)
    return jnp.pad(scaled_THC, ((0, 0), (0, 0), (0, lanes - C))).reshape(T, H * lanes)


def kv_rows(
    k_TKC: Float[Array, "T K C"], v_TKC: Float[Array, "T K C"], dtype: Any
) -> Float[Array, "T Y"]:
    """A row for each KV head, key and then value, heads side by side."""
    T, K, C = k_TKC.shape
    half = layout.value_lane(C)
    padding = ((0, 0), (0, 0), (0, half - C))
    padded = (jnp.pad(x_TKC.astype(dtype), padding) for x_TKC in (k_TKC, v_TKC))
    return jnp.concatenate(list(padded), axis=2).reshape(T, K * 2 * half)


def outputs(out_TX: Float[Array, "T X"], channels: int) -> Float[Array, "T H C"]:
    """The value's lanes of each head."""
    T, X = out_TX.shape
    lanes = layout.query_lanes(channels)
    at = layout.value_lane(channels) % lanes
    return out_TX.reshape(T, X // lanes, lanes)[:, :, at : at + channels]
