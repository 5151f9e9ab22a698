"""Rotary positions for a decoder's fused projection, read once and written once. Traced.

    grid (tile of tokens, KV head)
      qkv[T, O]  ──▶ block [tile, (G+2)·C]: G query heads, key, value
      cos, sin   ──▶ block [tile, C] float32; stays while the tile stays
      per head: x · cos + (x turned by half a head) · sin
      q[T, K·G·C] ◀── scaled queries          kv[T, K·2C] ◀── key, value

A head of 128 channels is a register wide, so to turn it by half is one lane rotation. Bound by
memory; XLA's own schedule lays [T, H, C] out anew and pads heads of 7 to 8 in float32 on the way.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.tiling import LANES, tile_rows

TILE = 256
"""Tokens of a grid step."""


class Norms(NamedTuple):
    """RMS norms of queries and keys before their rotation (arXiv:1910.07467)."""

    q_C: Float[Array, " C"]
    k_C: Float[Array, " C"]


def rotate_grouped(
    qkv_TO: Float[Array, "T O"],
    cos_TC: Float[Array, "T C"],
    sin_TC: Float[Array, "T C"],
    *,
    num_kv_heads: int,
    scale: float,
    norms: Norms | None = None,
    eps: float = 0.0,
) -> tuple[Float[Array, "T X"], Float[Array, "T Y"]]:
    """Rotate queries and keys, and part them as the paged attention kernels read them.

    Args:
        qkv_TO: Per KV head its query heads, its key, its value, C channels each.
        cos_TC: float32, both halves of a head alike.
        sin_TC: float32, negative in the first half.
        num_kv_heads: K.
        scale: What queries are multiplied by besides.
        norms: Of queries and keys; None: none.
        eps: Added to their mean squares.

    Returns:
        Queries side by side (X = H · C), and rows of key and value (Y = K · 2C), in qkv's dtype.

    Raises:
        ValueError: C is no multiple of 128, or T not of the dtype's tile.
    """
    (T, width), (_, C) = qkv_TO.shape, cos_TC.shape
    group = width // num_kv_heads
    tile = math.gcd(T, TILE)
    if C % LANES or group % C or tile % tile_rows(qkv_TO.dtype):
        raise ValueError(f"{qkv_TO.dtype}[{T}, {width}] in heads of {C} channels")
    queries = group - 2 * C
    table = pl.BlockSpec((tile, C), lambda i, k: (i, 0))
    scales = () if norms is None else (norms.q_C[None], norms.k_C[None])
    q_TX, new_TY = pl.pallas_call(
        functools.partial(_kernel, scale=scale, eps=eps),
        grid=(T // tile, num_kv_heads),
        in_specs=[
            pl.BlockSpec((tile, group), lambda i, k: (i, k)),
            table,
            table,
            *(pl.BlockSpec((1, C), lambda i, k: (0, 0)) for _ in scales),
        ],
        out_specs=[
            pl.BlockSpec((tile, queries), lambda i, k: (i, k)),
            pl.BlockSpec((tile, 2 * C), lambda i, k: (i, k)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((T, num_kv_heads * queries), qkv_TO.dtype),
            jax.ShapeDtypeStruct((T, num_kv_heads * 2 * C), qkv_TO.dtype),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="rotate_grouped",
    )(qkv_TO, cos_TC, sin_TC, *scales)
    return q_TX, new_TY


def _kernel(qkv: Any, cos: Any, sin: Any, *refs: Any, scale: float, eps: float) -> None:
    *norms, q_out, kv_out = refs
    C = cos.shape[1]
    num_queries = q_out.shape[1] // C
    cos_TC, sin_TC = cos[...], sin[...]
    q_cos, q_sin = cos_TC * scale, sin_TC * scale

    def head(h: int, norm: Any) -> Any:
        x = qkv[:, h * C : (h + 1) * C].astype(jnp.float32)
        if norm is None:
            return x
        mean = jnp.mean(x * x, axis=1, keepdims=True)
        return x * lax.rsqrt(mean + eps) * norm[...].astype(jnp.float32)

    def turned(x: Any) -> Any:
        return pltpu.roll(x, C // 2, 1)

    q_norm, k_norm = norms or (None, None)
    for h in range(num_queries):
        x = head(h, q_norm)
        y = x * q_cos + turned(x) * q_sin
        q_out[:, h * C : (h + 1) * C] = y.astype(q_out.dtype)
    x = head(num_queries, k_norm)
    kv_out[:, :C] = (x * cos_TC + turned(x) * sin_TC).astype(kv_out.dtype)
    kv_out[:, C:] = qkv[:, (num_queries + 1) * C :]
