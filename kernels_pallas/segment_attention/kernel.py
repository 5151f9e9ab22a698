"""Attention of the patches of each image over that image, many images in one lane. Traced.

A visit is one tile of queries together with one block of keys that may share a segment with it; the
visits are listed once and serve all layers. The grid walks them for each group of heads:

    grid (head group, visit)
      q[N, H·C]  ──▶ block [tile, heads·C]   stays while the tile stays; turned to qᵀ at its begin
      k[H, N, C] ──▶ block [heads, keys, C]  fetched ahead by the pipeline, as are
      v[N, H·C]  ──▶ block [keys, heads·C]   turned to vᵀ at each visit
      per head: k qᵀ [keys, tile] ─▶ maximum, 2^x, sum down ─▶ acc[C, tile] += vᵀ · weights
      out[N, H·C] ◀── acc / sum of all heads, turned back, at the last visit of the tile

A tile whose only visit is to half a block (a small picture) keeps no running maximum, sum or acc:
for sixteen pictures of 256 patches they cost a third of the attention.

So the cost follows the images, not N x N. Queries lie along the lanes: maxima and sums then run
down registers, where no lane is crossed and a row of 256 queries is two registers in place of 32,
and heads of 80 channels are rows, which need no shifting to stand side by side. Only keys come
heads first, 1.6 times their bytes, because to cut 80 channels out of lanes at each visit costs
more; the rotary application writes them anyhow. Windows have a kernel of their own.
"""

import math
from collections.abc import Callable, Iterator
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
"""Heads of a group, where so many fill whole registers."""
AHEAD = 3
"""Heads whose scores are on their way while one's weights are made; with one the kernel takes 1.3
times as long on v6e, with four longer on v5e."""

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
        tile: Queries of a tile, a divisor of N and a multiple of 128.
        block: Keys of a block, a divisor of N and a multiple of 128.

    Raises:
        ValueError: The sizes do not fit N.
    """
    N = segment_N.shape[0]
    if N % tile or N % block or tile % LANES or block % LANES:
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
    q_NX: Float[Array, "N X"],
    k_HNC: Float[Array, "H N C"],
    v_NX: Float[Array, "N Y"],
    plan: SegmentPlan,
    *,
    tile: int,
    block: int,
    first_value_lane: int = 0,
) -> Float[Array, "N X"]:
    """Softmax attention of each patch over the patches of its segment.

    Args:
        q_NX: Queries, heads side by side (X = H · C), times `query_scale`.
        k_HNC: Keys.
        v_NX: Values, heads side by side; the array may hold more lanes.
        plan: `plan_segments` of the lane with the same `tile` and `block`.
        first_value_lane: Where the values begin in the lanes of v; a multiple of X.

    Returns:
        In the order of q and the dtype of v, zeros for padding.
    """
    H, N, C = k_HNC.shape
    heads = heads_of_group(H, C)
    turns = heads // heads_of_turn(heads)
    turned = turns, heads // turns * C
    first = first_value_lane // (heads * C)
    query = pl.BlockSpec((tile, heads * C), lambda h, v, tile_V, *_: (tile_V[v], h))
    key = pl.BlockSpec((heads, block, C), lambda h, v, tile_V, block_V, *_: (h, block_V[v], 0))
    value = pl.BlockSpec((block, heads * C), lambda h, v, _, block_V, *__: (block_V[v], first + h))
    query_id = pl.BlockSpec((1, tile), lambda h, v, tile_V, *_: (0, tile_V[v]))
    key_id = pl.BlockSpec((1, block), lambda h, v, tile_V, block_V, *_: (0, block_V[v]))
    out: Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(H // heads, plan.num_visits),
            in_specs=[query_id, key_id, query, key, value],
            out_specs=query,
            scratch_shapes=[
                pltpu.VMEM((*turned, tile), q_NX.dtype),
                pltpu.VMEM((*turned, block), v_NX.dtype),
                pltpu.VMEM((heads, 1, tile), jnp.float32),
                pltpu.VMEM((heads, 1, tile), jnp.float32),
                pltpu.VMEM((*turned, tile), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((N, H * C), v_NX.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=softmax.VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
        ),
        name="segment_attention",
    )(plan.tile_V, plan.block_V, plan.seen_V, plan.query_1N, plan.key_1N, q_NX, k_HNC, v_NX)
    return out


def heads_of_group(num_heads: int, channels: int) -> int:
    """Heads that one program takes: they must fill whole registers, or be all.

    Sixteen heads of 72 channels (Qwen3-VL) only do so together.
    """
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    fitting = [n for n in divisors if n == num_heads or n * channels % LANES == 0]
    return max((n for n in fitting if n <= MAX_HEADS), default=fitting[0])


def heads_of_turn(heads: int) -> int:
    """Heads of a group that stand in one straight program; a loop makes its turns over them.

    Sixteen in one compile for three times as long, and run no faster.
    """
    return max(n for n in range(1, MAX_HEADS + 1) if heads % n == 0)


def query_scale(channels: int) -> float:
    """What queries must be multiplied by before: C^-0.5 · log2(e), best in the rotary tables."""
    return softmax.LOG2_E / math.sqrt(channels)


def _kernel(
    tile_V: Any,
    _: Any,  # blocks, used by the pipeline only
    seen_V: Any,
    query_1T: Any,
    key_1B: Any,
    q_TX: Any,
    k_HBC: Any,
    v_BX: Any,
    out_TX: Any,
    q_ZXT: Any,
    v_ZXB: Any,
    max_H1T: Any,
    sum_H1T: Any,
    acc_ZXT: Any,
) -> None:
    heads, block, channels = k_HBC.shape
    turns, width, _ = q_ZXT.shape
    per_turn = heads // turns
    visit, end = pl.program_id(1), pl.num_programs(1)
    tile, seen = q_TX.shape[0], seen_V[visit]
    first = (visit == 0) | (tile_V[visit] != tile_V[jnp.maximum(visit - 1, 0)])
    last = (visit == end - 1) | (tile_V[visit] != tile_V[jnp.minimum(visit + 1, end - 1)])
    rows = [pl.ds(h * channels, channels) for h in range(per_turn)]

    def turn_over(x_BX: Any, out_ZXB: Any) -> None:
        x_XB = x_BX.T
        for z in range(turns):
            out_ZXB[z] = x_XB[z * width : (z + 1) * width]

    @pl.when(first & (seen < _FIRST_ALONE))
    def begin_tile() -> None:
        turn_over(q_TX[...], q_ZXT)
        max_H1T[...] = jnp.full_like(max_H1T, softmax.LOWEST)
        sum_H1T[...] = jnp.zeros_like(sum_H1T)
        acc_ZXT[...] = jnp.zeros_like(acc_ZXT)

    def own(keys: Any) -> Any:
        """Which of some keys are of the segment of each query."""
        key_BL = jnp.broadcast_to(key_1B[:, keys], (LANES, keys.size)).T
        return jnp.concatenate([key_BL] * (tile // LANES), axis=1) == query_1T[...]

    def scores(z: Any, keys: Any, seen: Any | None) -> Iterator[Any]:
        """Of each head of a turn, made while those before are at their softmax."""

        def score(h: int) -> Any:
            score_BT = softmax.dot(k_HBC[z * per_turn + h, keys], q_ZXT[z, rows[h], :])
            return score_BT if seen is None else jnp.where(seen, score_BT, softmax.MASKED)

        ahead = [score(h) for h in range(min(AHEAD, per_turn))]
        for h in range(per_turn):
            if h + AHEAD < per_turn:
                ahead.append(score(h + AHEAD))
            yield ahead[h]

    def weigh(z: Any, h: int, weight_BT: Any) -> Any:
        v_CB = v_ZXB[z, rows[h], : weight_BT.shape[0]]
        return softmax.dot(v_CB, weight_BT.astype(v_CB.dtype))

    def divided(out_CT: Any, total_1T: Any) -> Any:
        """Outputs; zeros where a query saw no key."""
        return out_CT / jnp.where(total_1T == 0.0, 1.0, total_1T)

    def attend(keys: Any, *, masked: bool) -> None:
        def take_turn(z: Any) -> None:
            for h, score_BT in enumerate(scores(z, keys, own(keys) if masked else None)):
                head, acc_CT = z * per_turn + h, acc_ZXT.at[z, rows[h]]
                old_max_1T = max_H1T[head]
                max_1T = jnp.maximum(old_max_1T, jnp.max(score_BT, axis=0, keepdims=True))
                fade_1T = jnp.exp2(old_max_1T - max_1T)
                weight_BT = jnp.exp2(score_BT - max_1T)
                max_H1T[head] = max_1T
                sum_H1T[head] = fade_1T * sum_H1T[head] + jnp.sum(weight_BT, axis=0, keepdims=True)
                acc_CT[...] = fade_1T * acc_CT[...] + weigh(z, h, weight_BT)

        turn_over(v_BX[keys, :], v_ZXB.at[:, :, : keys.size])
        _each(turns, take_turn)

    def attend_alone(keys: Any) -> None:
        """The whole attention of a tile."""

        def take_turn(z: Any) -> None:
            for h, score_BT in enumerate(scores(z, keys, own(keys))):
                max_1T = jnp.maximum(jnp.max(score_BT, axis=0, keepdims=True), softmax.LOWEST)
                weight_BT = jnp.exp2(score_BT - max_1T)
                total_1T = jnp.sum(weight_BT, axis=0, keepdims=True)
                acc_ZXT[z, rows[h], :] = divided(weigh(z, h, weight_BT), total_1T)

        turn_over(q_TX[...], q_ZXT)
        turn_over(v_BX[keys, :], v_ZXB.at[:, :, : keys.size])
        _each(turns, take_turn)
        write()

    def write() -> None:
        outputs = [acc_ZXT[z].astype(out_TX.dtype) for z in range(turns)]
        out_TX[...] = jnp.concatenate(outputs, axis=0).T

    whole = pl.ds(0, block)
    pl.when(seen == _ALL)(lambda: attend(whole, masked=False))
    pl.when(seen == _SOME)(lambda: attend(whole, masked=True))
    if block % (2 * LANES) == 0:
        on_first = (seen == _FIRST_HALF) | (seen == _FIRST_ALONE)
        half = pl.ds(pl.multiple_of(jnp.where(on_first, 0, block // 2), block // 2), block // 2)
        shared = (seen == _FIRST_HALF) | (seen == _SECOND_HALF)
        pl.when(shared)(lambda: attend(half, masked=True))
        pl.when(seen >= _FIRST_ALONE)(lambda: attend_alone(half))

    @pl.when(last & (seen < _FIRST_ALONE))
    def finish_tile() -> None:
        def take_turn(z: Any) -> None:
            for h in range(per_turn):
                acc_CT = acc_ZXT.at[z, rows[h]]
                acc_CT[...] = divided(acc_CT[...], sum_H1T[z * per_turn + h])

        _each(turns, take_turn)
        write()


def _each(count: int, body: Callable[[Any], None]) -> None:
    """Call for each number below; one call is no loop, which would end what runs beside it."""
    if count == 1:
        body(0)
    else:
        pl.loop(0, count)(body)
