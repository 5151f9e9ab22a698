"""Attention of the patches of each image over that image, many images in one lane. Traced.

A visit is one tile of queries together with one block of keys that may share a segment with it; the
visits are listed once and serve all layers. The grid walks them for each group of heads:

    grid (head group, visit)
      q[H,N,C] ──▶ block [heads, tile, C]   stays while the tile stays
      k, v     ──▶ block [heads, keys, C]   fetched ahead by the pipeline
      per head: scores [tile, keys] ─▶ maximum, 2^x, sum ─▶ acc[head, tile, C]
      out      ◀── acc / sum, at the last visit of the tile; heads first, or side by side

A tile whose only visit is to half a block (a small picture) keeps no running maximum, sum or acc:
for sixteen pictures of 256 patches they cost as much as the attention.

So the cost follows the images, not N x N. Heads come first: to cut a head of 80 channels out of
lanes that it shares with its neighbours, at each visit, makes the kernel 1.7 times slower on v6e,
and the rotary application writes q and k anyhow. Windows have a kernel of their own.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int32

from kernels_pallas import online_softmax as softmax
from kernels_pallas.tiling import LANES

TILE = 256
"""Queries of a tile."""
BLOCK_KEYS = 512
"""Keys of a block."""
MAX_HEADS = 8
"""Heads of a group: enough that one head's scores run beside another's softmax."""

_NO_SEGMENT = (1 << 31) - 1
"""Above every segment."""
_NOTHING, _SOME, _ALL, _FIRST_HALF, _SECOND_HALF, _FIRST_ALONE, _SECOND_ALONE = range(7)
"""What the queries of a visit see of its keys: the halves, and some, are masked by segments; alone,
a half is all that they see in any visit."""


class SegmentPlan(NamedTuple):
    """Which queries meet which keys; the same for all layers of an encoder."""

    tile_V: Int32[Array, " V"]
    block_V: Int32[Array, " V"]
    seen_V: Int32[Array, " V"]
    """0: nothing (a tile of padding); 1: some of the keys; 2: all; 3, 4: some of one half; 5, 6: of
    one half, and the tile has no other visit."""
    num_visits: Int32[Array, ""]
    query_1N: Int32[Array, "1 N"]
    """Segment of each query, -2 for padding."""
    key_1N: Int32[Array, "1 N"]
    """Segment of each key, -1 for padding."""


def segment_sizes(num_patches: int) -> tuple[int, int]:
    """Queries of a tile and keys of a block for full attention over a lane of this size."""
    return math.gcd(TILE, num_patches), math.gcd(BLOCK_KEYS, num_patches)


def plan_segments(segment_N: Int32[Array, " N"], *, tile: int, block: int) -> SegmentPlan:
    """List the visits of a lane; do it once for all layers that share the segments.

    Args:
        segment_N: Segment of each patch, -1 for padding. Any numbers are right; numbers that never
            fall make the fewest visits.
        tile: Queries of a tile, a divisor of N.
        block: Keys of a block, a divisor of N and a multiple of 128.

    Raises:
        ValueError: The sizes do not fit N.
    """
    N = segment_N.shape[0]
    if N % tile or N % block or block % LANES:
        raise ValueError(f"tile {tile} and block {block} do not cut {N} patches; pad to 128s")
    query_low, query_high = _range(segment_N.reshape(-1, tile))
    meets = _meets(query_low, query_high, segment_N.reshape(-1, block))
    none = ~meets.any(axis=1, keepdims=True)
    visited = meets | (none & (jnp.arange(N // block) == 0))
    whole_query = (segment_N.reshape(-1, tile) == query_high[:, None]).all(axis=1)
    key_KB = segment_N.reshape(-1, block)
    same = whole_query[:, None] & (key_KB == query_high[:, None, None]).all(axis=2)
    seen = jnp.where(meets, jnp.where(same, _ALL, _SOME), _NOTHING)
    if block % (2 * LANES) == 0:
        first = _meets(query_low, query_high, key_KB[:, : block // 2])
        second = _meets(query_low, query_high, key_KB[:, block // 2 :])
        seen = jnp.where(first & ~second, _FIRST_HALF, seen)
        seen = jnp.where(second & ~first, _SECOND_HALF, seen)
        alone = visited.sum(axis=1, keepdims=True) == 1
        seen = jnp.where(alone & (seen >= _FIRST_HALF), seen + 2, seen)
    order_V = jnp.argsort(~visited.reshape(-1), stable=True)
    num_visits = visited.sum()
    order_V = jnp.where(jnp.arange(order_V.shape[0]) < num_visits, order_V, order_V[num_visits - 1])
    visits = (order_V // (N // block), order_V % (N // block), seen.reshape(-1)[order_V])
    query_1N = jnp.where(segment_N < 0, -2, segment_N)[None]
    plan = (*visits, num_visits, query_1N, segment_N[None])
    return SegmentPlan(*(x.astype(jnp.int32) for x in plan))


def _meets(
    query_low: Int32[Array, " I"], query_high: Int32[Array, " I"], segment_JB: Int32[Array, "J B"]
) -> Bool[Array, "I J"]:
    """Which ranges of query segments may share one with which keys."""
    key_low, key_high = _range(segment_JB)
    return (query_low[:, None] <= key_high) & (query_high[:, None] >= key_low)


def _range(segment_JB: Int32[Array, "J B"]) -> tuple[Int32[Array, " J"], Int32[Array, " J"]]:
    """Lowest and highest segment of each block; of padding alone, a range that meets no other."""
    return jnp.where(segment_JB < 0, _NO_SEGMENT, segment_JB).min(axis=1), segment_JB.max(axis=1)


def segment_attention(
    q_HNC: Float[Array, "H N C"],
    k_HNC: Float[Array, "H N C"],
    v_HNC: Float[Array, "H N C"],
    plan: SegmentPlan,
    *,
    tile: int,
    block: int,
    side_by_side: bool = False,
) -> Float[Array, "..."]:
    """Softmax attention of each patch over the patches of its segment.

    Args:
        q_HNC: Queries, times `query_scale`.
        k_HNC: Keys.
        v_HNC: Values.
        plan: `plan_segments` of the lane with the same `tile` and `block`.
        side_by_side: Give [N, H · C] instead.

    Returns:
        [H, N, C] in the dtype of the values, zeros for padding.
    """
    H, N, C = q_HNC.shape
    heads = heads_of_group(H, C, side_by_side=side_by_side)
    query = pl.BlockSpec((heads, tile, C), lambda h, v, tile_V, *_: (h, tile_V[v], 0))
    key = pl.BlockSpec((heads, block, C), lambda h, v, tile_V, block_V, *_: (h, block_V[v], 0))
    query_id = pl.BlockSpec((1, tile), lambda h, v, tile_V, *_: (0, tile_V[v]))
    key_id = pl.BlockSpec((1, block), lambda h, v, tile_V, block_V, *_: (0, block_V[v]))
    out_spec, out_shape = query, jax.ShapeDtypeStruct((H, N, C), v_HNC.dtype)
    if side_by_side:
        out_spec = pl.BlockSpec((tile, heads * C), lambda h, v, tile_V, *_: (tile_V[v], h))
        out_shape = jax.ShapeDtypeStruct((N, H * C), v_HNC.dtype)
    out: Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(H // heads, plan.num_visits),
            in_specs=[query_id, key_id, query, key, key],
            out_specs=out_spec,
            scratch_shapes=[
                pltpu.VMEM((heads, tile, LANES), jnp.float32),
                pltpu.VMEM((heads, tile, LANES), jnp.float32),
                pltpu.VMEM((heads, tile, C), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=softmax.VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
        ),
        name="segment_attention",
    )(plan.tile_V, plan.block_V, plan.seen_V, plan.query_1N, plan.key_1N, q_HNC, k_HNC, v_HNC)
    return out


def heads_of_group(num_heads: int, channels: int, *, side_by_side: bool) -> int:
    """Heads that one program takes: side by side they must fill whole registers, or be all.

    Sixteen heads of 72 channels (Qwen3-VL) only do so together.
    """
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    whole = [n for n in divisors if n == num_heads or n * channels % LANES == 0]
    fitting = whole if side_by_side else divisors
    return max((n for n in fitting if n <= MAX_HEADS), default=fitting[0])


def query_scale(channels: int) -> float:
    """What queries must be multiplied by before: C^-0.5 · log2(e), best in the rotary tables."""
    return softmax.LOG2_E / math.sqrt(channels)


def _kernel(
    tile_V: Any,
    _: Any,  # blocks, used by the pipeline only
    seen_V: Any,
    query_1T: Any,
    key_1B: Any,
    q_HTC: Any,
    k_HBC: Any,
    v_HBC: Any,
    out: Any,
    max_HTL: Any,
    sum_HTL: Any,
    acc_HTC: Any,
) -> None:
    heads, tile, _ = acc_HTC.shape
    visit, end = pl.program_id(1), pl.num_programs(1)
    block, seen = key_1B.shape[1], seen_V[visit]
    first = (visit == 0) | (tile_V[visit] != tile_V[jnp.maximum(visit - 1, 0)])
    last = (visit == end - 1) | (tile_V[visit] != tile_V[jnp.minimum(visit + 1, end - 1)])

    @pl.when(first & (seen < _FIRST_ALONE))
    def begin_tile() -> None:
        max_HTL[...] = jnp.full_like(max_HTL, softmax.LOWEST)
        sum_HTL[...] = jnp.zeros_like(sum_HTL)
        acc_HTC[...] = jnp.zeros_like(acc_HTC)

    def scores(keys: Any, seen: Any | None) -> Iterator[Any]:
        """Each head's scores, made while the head before is at its softmax."""
        ahead = softmax.scores(q_HTC[0], k_HBC[0, keys], seen=seen)
        for h in range(heads):
            score = ahead
            if h + 1 < heads:
                ahead = softmax.scores(q_HTC[h + 1], k_HBC[h + 1, keys], seen=seen)
            yield score

    def attend(keys: Any, seen: Any | None) -> None:
        for h, score in enumerate(scores(keys, seen)):
            state = (max_HTL.at[h], sum_HTL.at[h], acc_HTC.at[h])
            softmax.absorb(score, v_HBC[h, keys], *state)

    def own(keys: Any) -> Any:
        """Which of some keys are of the segment of each query."""
        query_TL = jnp.broadcast_to(query_1T[...], (LANES, tile)).T
        query_TB = jnp.concatenate([query_TL] * (keys.size // LANES), axis=1)
        return query_TB == key_1B[:, keys]

    def attend_alone(keys: Any) -> None:
        """The whole attention of a tile."""
        write(
            [softmax.attend_once(s, v_HBC[h, keys]) for h, s in enumerate(scores(keys, own(keys)))]
        )

    def write(outputs: list[Any]) -> None:
        done = [x.astype(out.dtype) for x in outputs]
        if len(out.shape) == 2:
            out[...] = jnp.concatenate(done, axis=1)
        else:
            for h in range(heads):
                out[h] = done[h]

    whole = pl.ds(0, block)
    pl.when(seen == _ALL)(lambda: attend(whole, None))
    pl.when(seen == _SOME)(lambda: attend(whole, own(whole)))
    if block % (2 * LANES) == 0:
        on_first = (seen == _FIRST_HALF) | (seen == _FIRST_ALONE)
        half = pl.ds(pl.multiple_of(jnp.where(on_first, 0, block // 2), block // 2), block // 2)
        pl.when((seen == _FIRST_HALF) | (seen == _SECOND_HALF))(lambda: attend(half, own(half)))
        pl.when(seen >= _FIRST_ALONE)(lambda: attend_alone(half))

    @pl.when(last & (seen < _FIRST_ALONE))
    def finish_tile() -> None:
        write([softmax.normalise(sum_HTL[h], acc_HTC[h]) for h in range(heads)])
