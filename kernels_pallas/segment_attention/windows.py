"""Attention inside the windows of a lane, none of which crosses a multiple of 64 patches. Traced.

Windows are packed two to a square of 128 patches; a square is all that its patches can see:

    grid (head group, tile)
      q, k, v[N, H·C] ──▶ block [tile, heads·C]
      per square of 128: qᵀ, vᵀ; per head: k qᵀ [keys, queries] ─▶ softmax down ─▶ vᵀ · weights
      out[N, H·C]     ◀── all heads, turned back

Queries lie along the lanes: maxima and sums then run down the registers, where no lane is crossed,
and heads of 80 channels are rows, which need no shifting.

The arrays are those of the projections, heads side by side: the call is bound by memory, and with
heads first every head of 80 channels would fill 128 lanes, 1.6 times the bytes. A group is as many
heads as fill whole registers (8 of 80 channels, 2 of 64).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from kernels_pallas import online_softmax as softmax
from kernels_pallas.tiling import LANES

WINDOW = 64
"""Patches of a window at most, and what no window crosses."""
SQUARE = 128
"""Queries and keys of one score matrix."""
TILE = 512
"""Patches of a grid step."""
AHEAD = 3
"""Heads whose scores are on their way while one's weights are made."""


def window_attention(
    q_NX: Float[Array, "N X"],
    k_NX: Float[Array, "N X"],
    v_NX: Float[Array, "N X"],
    window_N: Int32[Array, " N"],
    *,
    channels: int,
    first_value_lane: int = 0,
) -> Float[Array, "N X"]:
    """Softmax attention of each patch over the patches of its window.

    Args:
        q_NX: Queries as the projection emits them, heads side by side, times `query_scale`.
        k_NX: Keys.
        v_NX: Values.
        window_N: Window of each patch, at most N - 1, or -1 for padding; a number means one window
            only within a run of 64 patches, and no window crosses such a run.
        channels: C, of one head.
        first_value_lane: Where the values begin in the lanes of v, which may hold more; a multiple
            of X.

    Returns:
        In the order of q and the dtype of v; finite numbers for padding.

    Raises:
        ValueError: N is no multiple of 128, or the heads do not divide the lanes.
    """
    N, X = q_NX.shape
    if N % SQUARE or X % channels:
        raise ValueError(f"{N} patches of {X} lanes: multiples of {SQUARE} and {channels} needed")
    heads = group_of(X // channels, channels)
    tile = math.gcd(N, TILE)
    run_N = jnp.arange(N, dtype=jnp.int32) // WINDOW
    id_1N = jnp.where(window_N < 0, -1, run_N * N + window_N)[None]
    block = pl.BlockSpec((tile, heads * channels), lambda h, i: (i, h))
    first = first_value_lane // (heads * channels)
    value = pl.BlockSpec((tile, heads * channels), lambda h, i: (i, first + h))
    out: Array = pl.pallas_call(
        functools.partial(_kernel, channels=channels),
        grid=(X // channels // heads, N // tile),
        in_specs=[pl.BlockSpec((1, tile), lambda h, i: (0, i)), block, block, value],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((N, X), v_NX.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=softmax.VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
        ),
        name="window_attention",
    )(id_1N, q_NX, k_NX, v_NX)
    return out


def group_of(num_heads: int, channels: int) -> int:
    """Heads whose lanes fill whole registers; all of them if no fewer do."""
    sizes = (n for n in range(1, num_heads) if num_heads % n == 0 and n * channels % LANES == 0)
    return next(sizes, num_heads)


def _kernel(id_1T: Any, q_TX: Any, k_TX: Any, v_TX: Any, out_TX: Any, *, channels: int) -> None:
    tile, width = q_TX.shape

    def attend_square(s: Any, carry: Any) -> Any:
        rows = pl.ds(pl.multiple_of(s * SQUARE, SQUARE), SQUARE)
        key_1S = id_1T[:, rows]
        seen_SS = key_1S == jnp.broadcast_to(key_1S, (SQUARE, SQUARE)).T
        q_XS, v_XS = q_TX[rows, :].T, v_TX[rows, :].T

        def score(h: int) -> Any:
            head = slice(h * channels, (h + 1) * channels)
            score_SS = softmax.dot(k_TX[rows, head], q_XS[head])
            return jnp.where(seen_SS, score_SS, softmax.MASKED)

        def value(h: int, weight_SS: Any) -> Any:
            total_1S = jnp.sum(weight_SS, axis=0, keepdims=True)
            v_CS = v_XS[h * channels : (h + 1) * channels]
            return softmax.dot(v_CS, weight_SS.astype(v_CS.dtype)) / total_1S

        num_heads = width // channels
        scores = [score(h) for h in range(min(AHEAD, num_heads))]
        out: list[Any] = []
        for h in range(num_heads):
            if h + AHEAD < num_heads:
                scores.append(score(h + AHEAD))
            weight_SS = jnp.exp2(scores[h] - jnp.max(scores[h], axis=0, keepdims=True))
            out.append(value(h, weight_SS).astype(out_TX.dtype))
        out_TX[rows, :] = jnp.concatenate(out, axis=0).T
        return carry

    lax.fori_loop(0, tile // SQUARE, attend_square, 0, unroll=2)
