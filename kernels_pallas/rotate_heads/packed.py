"""Rotary positions for an encoder's fused projection, whose heads need not fill registers. Traced.

    grid (tile of patches, group of heads)
      qkv[N, 3·H·C] ──▶ two blocks [tile, W]: queries and keys of the group's heads
      cos, sin      ──▶ block [tile, C] float32; stays while the tile stays
      x · cos + (x turned by half a head) · sin, all heads of the group side by side
      q[N, H·C]     ◀──
      k[N, H·C]     ◀── or, heads first, k[H, N, C]

A group is the least number of heads that fill whole registers (8 of 80 channels). To turn a head by
half is two lane rotations of the whole group and a choice between them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels_pallas.tiling import LANES

TILE = 256
"""Patches of a grid step."""
ROWS = 16
"""Patches of one turn: what it holds fits the registers."""


def takes_packed(num_heads: int, channels: int) -> bool:
    """Whether the heads divide into groups that fill registers."""
    return num_heads * channels % math.lcm(channels, LANES) == 0 and channels % 2 == 0


def rotate_packed(
    qkv_NO: Float[Array, "N O"],
    cos_NC: Float[Array, "N C"],
    sin_NC: Float[Array, "N C"],
    *,
    scale: float,
    keys_by_head: bool,
) -> tuple[Float[Array, "N X"], Float[Array, "..."]]:
    """Rotate queries and keys.

    Args:
        qkv_NO: Queries, keys, values, each with its heads side by side.
        cos_NC: float32, both halves of a head alike.
        sin_NC: float32, negative in the first half.
        scale: What queries are multiplied by besides.
        keys_by_head: Give the keys heads first.

    Returns:
        Queries [N, H · C], and keys [N, H · C] or [H, N, C].

    Raises:
        ValueError: `takes_packed` says no.
    """
    (N, width), (_, C) = qkv_NO.shape, cos_NC.shape
    lanes, heads = math.lcm(C, LANES), width // 3 // C
    if not takes_packed(heads, C):
        raise ValueError(f"{heads} heads of {C} channels do not fill registers of {LANES}")
    tile, groups = math.gcd(N, TILE), width // 3 // lanes

    def part(p: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, lanes), lambda i, g: (i, p * groups + g))

    table = pl.BlockSpec((tile, C), lambda i, g: (i, 0))
    specs = [part(0)] * 2
    shapes = [jax.ShapeDtypeStruct((N, width // 3), qkv_NO.dtype)] * 2
    if keys_by_head:
        specs[1] = pl.BlockSpec((lanes // C, tile, C), lambda i, g: (g, i, 0))
        shapes[1] = jax.ShapeDtypeStruct((heads, N, C), qkv_NO.dtype)
    q_NX, k = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid=(N // tile, groups),
        in_specs=[table, table, part(0), part(1)],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="rotate_packed",
    )(cos_NC, sin_NC, qkv_NO, qkv_NO)
    return q_NX, k


def _kernel(
    cos: Any, sin: Any, q_TX: Any, k_TX: Any, out_q_TX: Any, out_k: Any, *, scale: float
) -> None:
    (tile, C), lanes = cos.shape, q_TX.shape[1]
    num_rows = math.gcd(tile, ROWS)
    lane = lax.broadcasted_iota(jnp.int32, (num_rows, lanes), 1)
    first = lax.rem(lane, C) < C // 2

    def some_rows(r: Any, carry: Any) -> Any:
        rows = pl.ds(pl.multiple_of(r * num_rows, num_rows), num_rows)
        cos_RX, sin_RX = (
            jnp.concatenate([table[rows, :]] * (lanes // C), axis=1) for table in (cos, sin)
        )

        def rotate(ref: Any) -> Any:
            x = ref[rows, :].astype(jnp.float32)
            ahead, behind = pltpu.roll(x, lanes - C // 2, 1), pltpu.roll(x, C // 2, 1)
            return x * cos_RX + jnp.where(first, ahead, behind) * sin_RX

        out_q_TX[rows, :] = (rotate(q_TX) * scale).astype(out_q_TX.dtype)
        k_RX = rotate(k_TX).astype(out_k.dtype)
        if len(out_k.shape) == 2:
            out_k[rows, :] = k_RX
        else:
            for h in range(lanes // C):
                out_k[h, rows, :] = k_RX[:, h * C : (h + 1) * C]
        return carry

    lax.fori_loop(0, tile // num_rows, some_rows, 0, unroll=2 if tile > num_rows else 1)
