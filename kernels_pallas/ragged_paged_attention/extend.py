"""Attention of runs of new tokens over the pages of their sequences. Traced.

A tile is `tile` consecutive tokens of the step; a visit is one tile together with one sequence that
has tokens in it. The grid walks the visits once for each KV head, or for each part of one that
has many wide query heads:

    grid (KV head and part, visit)
      q[T, K·Z·G·C]    ──▶ block [tile, G·C] of this part; stays while the tile stays
      pages[P,K,S,J]   ──a DMA a page──▶ ring[2, page, 1, S, J]: one block of keys ahead
      per query head g: scores [tile, keys] ─▶ maximum, 2^x, sum ─▶ acc[g, tile, C]
      out[T, K·Z·G·C]  ◀── acc / sum, at the last visit of the tile; rows that were decoded are
                           copied from the block of `decoded` instead

Blocks of keys behind the last that a query sees or before the window are never read; only blocks
that hold the diagonal, the window's edge or a neighbour's rows are masked, and of those that end in
their first half only the half is computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from kernels_pallas import online_softmax as softmax
from kernels_pallas.ragged_paged_attention import key_block
from kernels_pallas.tiling import LANES

TILE = 256
"""Query tokens of one tile."""
BLOCK_KEYS = 512
"""Keys of one block."""
RING = 3
"""Blocks of keys in VMEM."""
MAX_LANES = 2560
"""Of queries that one program takes: 1.3 MB a tile, of which six blocks are in VMEM."""


class Visits(NamedTuple):
    """Which tile meets which sequence, in order of tiles; the same for all layers of a step."""

    tile_V: Int32[Array, " V"]
    sequence_V: Int32[Array, " V"]
    """Index into the sequences; -1 for a tile without any."""
    reach_V: Int32[Array, " V"]
    """Last key that any query of the visit sees."""
    limits: Int32[Array, " 3"]
    """Visits in all, first and end of those with a sequence."""


def plan_visits(
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    num_decode: Int32[Array, ""],
    num_sequences: Int32[Array, ""],
    seen_T: Int32[Array, " T"] | None,
    *,
    num_tokens: int,
    tile: int = TILE,
) -> Visits:
    """List the visits of sequences `num_decode` to `num_sequences`; do it once a step.

    Args:
        start_B1: First token of each sequence in the step, ascending, and the end of the last.
        length_B: KV tokens of each sequence after the step.
        seen_T: Last key that each token sees, as `extend_attention` takes it.
        num_tokens: Tokens T of the step with padding, a multiple of `tile`.
    """
    num_tiles = num_tokens // tile
    b = jnp.arange(start_B1.shape[0] - 1)
    begin_B, end_B = start_B1[:-1], start_B1[1:]
    real_B = (b >= num_decode) & (b < num_sequences) & (begin_B < end_B)
    first_B = begin_B // tile
    count_B = jnp.where(real_B, (end_B - 1) // tile - first_B + 1, 0)
    before = start_B1[num_decode] // tile
    after = jnp.where(jnp.any(real_B), -(-start_B1[num_sequences] // tile), before)
    edge = functools.partial(jnp.concatenate, dtype=jnp.int32)
    first = edge([jnp.zeros((1,)), first_B, after[None]])
    count = edge([before[None], count_B, (num_tiles - after)[None]])
    end = jnp.cumsum(count)
    v = jnp.arange(num_tiles + start_B1.shape[0] - 1)
    part_V = jnp.minimum(jnp.searchsorted(end, v, side="right"), end.shape[0] - 1)
    sequence_V = jnp.where((part_V == 0) | (part_V == end.shape[0] - 1), -1, part_V - 1)
    tile_V = jnp.minimum(first[part_V] + v - (end - count)[part_V], num_tiles - 1)
    limits = jnp.stack([end[-1], before, end[-2]])
    reach_V = _reach(tile_V, jnp.maximum(sequence_V, 0), start_B1, length_B, seen_T, tile)
    return Visits(*(x.astype(jnp.int32) for x in (tile_V, sequence_V, reach_V, limits)))


def _reach(
    tile_V: Int32[Array, " V"],
    sequence_V: Int32[Array, " V"],
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    seen_T: Int32[Array, " T"] | None,
    tile: int,
) -> Int32[Array, " V"]:
    """Last key that the queries of each visit see: of the last one itself, or of any."""
    begin_V, end_V = start_B1[sequence_V], start_B1[sequence_V + 1]
    length_V = length_B[sequence_V]
    last_V = jnp.minimum(end_V, (tile_V + 1) * tile) - 1 - end_V + length_V
    if seen_T is None:
        return last_V
    token_VX = tile_V[:, None] * tile + jnp.arange(tile)
    ours_VX = (token_VX >= begin_V[:, None]) & (token_VX < end_V[:, None])
    seen_V = jnp.where(ours_VX, seen_T[token_VX], 0).max(axis=1)
    return jnp.clip(seen_V, last_V, length_V - 1)


def extend_attention(
    q_TX: Float[Array, "T X"],
    pages_PKSJ: Float[Array, "P K S J"],
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    visits: Visits,
    num_decode: Int32[Array, ""],
    decoded_BX: Float[Array, "B X"] | None,
    seen_T: Int32[Array, " T"] | None = None,
    *,
    channels: int,
    tile: int = TILE,
    window: int | None = None,
    soft_cap: float | None = None,
    block_pages: int | None = None,
) -> Float[Array, "T X"]:
    """Attend from the tokens of extending sequences; the pages hold their keys already.

    Args:
        q_TX: Queries as the projection emits them, `channels` lanes a head, heads of one KV head
            side by side, times `layout.query_scale`.
        pages_PKSJ: The pool, with the rows of this step.
        start_B1: First token of each sequence in the step, ascending, and the end of the last.
        length_B: KV tokens of each sequence after the step.
        page_table_BQ: The pages of each sequence, in order.
        visits: `plan_visits` of the same sequences, seen keys and tile.
        num_decode: Rows of the step that are in `decoded_BX` already, its first ones.
        decoded_BX: Their outputs; None: there are none.
        seen_T: Last key of its sequence that each token sees, at least its own; None: its own.
            Not read of tokens of no sequence.
        channels: Lanes of one query head (`layout.query_lanes`).
        tile: Query tokens of one tile; T is a multiple of it.
        window: Keys that a query sees at most, itself included; None: all.
        soft_cap: Scores s become cap · tanh(s / cap), natural units; None: no cap.
        block_pages: Pages of one block; None: `BLOCK_KEYS` keys.

    Returns:
        Outputs in the order of q, those decoded included; zero for tokens of no sequence.
    """
    X = q_TX.shape[1]
    _, K, S, J = pages_PKSJ.shape
    G = heads_of_program(X // K // channels, channels)
    num_parts = X // (K * G * channels)
    n = block_pages or max(S, BLOCK_KEYS) // S
    if decoded_BX is None:
        num_decode, decoded_BX = jnp.zeros_like(num_decode), jnp.zeros((0, X), q_TX.dtype)
    padding = -decoded_BX.shape[0] % tile if decoded_BX.shape[0] else tile
    decoded_BX = jnp.pad(decoded_BX, ((0, padding), (0, 0)))
    last_decoded = decoded_BX.shape[0] // tile - 1
    block = pl.BlockSpec((tile, G * channels), lambda k, v, tile_V, *_: (tile_V[v], k))
    decoded = pl.BlockSpec(
        (tile, G * channels), lambda k, v, tile_V, *_: (jnp.minimum(tile_V[v], last_decoded), k)
    )
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # a tile's own last two axes: a part of the last axis of [1, T] would have to be 128 lanes
    seen = [] if seen_T is None else [seen_T.reshape(-1, 1, tile)]
    row = pl.BlockSpec((None, 1, tile), lambda k, v, tile_V, *_: (tile_V[v], 0, 0))
    kernel = functools.partial(
        _extend_kernel, num_parts=num_parts, window=window, soft_cap=soft_cap
    )
    out: Array = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(K * num_parts, visits.limits[0]),
            in_specs=[block, decoded, hbm, *([row] * len(seen))],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((RING, n, 1, S, J), pages_PKSJ.dtype),
                pltpu.VMEM((G, tile, LANES), jnp.float32),
                pltpu.VMEM((G, tile, LANES), jnp.float32),
                pltpu.VMEM((G, tile, channels), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((RING,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_TX.shape, q_TX.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=softmax.VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
        ),
        name="extend_attention",
    )(
        *visits,
        num_decode.reshape(1),
        start_B1,
        length_B,
        page_table_BQ.reshape(-1),
        q_TX,
        decoded_BX,
        pages_PKSJ,
        *seen,
    )
    return out


def heads_of_program(group: int, channels: int) -> int:
    """Query heads of a KV head that one program takes: all, or as many as `MAX_LANES` hold."""
    fitting = (n for n in range(group, 1, -1) if group % n == 0 and n * channels <= MAX_LANES)
    return next(fitting, 1)


def _extend_kernel(
    tile_V: Any,
    sequence_V: Any,
    reach_V: Any,
    limits: Any,
    num_decode: Any,
    start_B1: Any,
    length_B: Any,
    table_BQ: Any,
    q_TX: Any,
    decoded_TX: Any,
    pages_hbm: Any,
    *refs: Any,
    num_parts: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    *seen_1T, out_TX, ring, max_GTL, sum_GTL, acc_GTC, cursor, read_done = refs
    depth, n, _, S, J = ring.shape
    G, tile, C = acc_GTC.shape
    block = n * S
    part, visit = pl.program_id(0), pl.program_id(1)
    reader = key_block.Reader(pages_hbm, ring, read_done, table_BQ, length_B)

    def rows_of(v: Any) -> tuple[Any, Any, Any, Any]:
        """Sequence of a visit; positions of the tile's row 0, first and last row of it."""
        b = jnp.maximum(sequence_V[v], 0)
        begin, end = start_B1[b], start_B1[b + 1]
        row = tile_V[v] * tile
        zero = row - end + length_B[b]
        first = jnp.maximum(begin, row) - row + zero
        last = jnp.minimum(end, row + tile) - 1 - row + zero
        return b, zero, first, last

    def blocks_of(v: Any) -> tuple[Any, Any]:
        low = 0 if window is None else jnp.maximum(rows_of(v)[2] - window + 1, 0) // block
        return low, reach_V[v] // block + 1

    def start_ahead(slot: Any) -> None:
        """Start the read at the cursor (part, visit, block) and move it one block on."""
        k, v, j = cursor[1], cursor[2], cursor[3]

        @pl.when(k < pl.num_programs(0))
        def advance() -> None:
            reader.start(sequence_V[v], j, slot, pl.ds(k // num_parts, 1))
            more = j + 1 < blocks_of(v)[1]
            turn = jnp.logical_and(jnp.logical_not(more), v + 1 >= limits[2])
            next_v = jnp.where(more, v, jnp.where(turn, limits[1], v + 1))
            cursor[1] = jnp.where(turn, k + 1, k)
            cursor[2] = next_v
            cursor[3] = jnp.where(more, j + 1, blocks_of(next_v)[0])

    @pl.when((part == 0) & (visit == 0))
    def first_reads() -> None:
        some = limits[1] < limits[2]
        cursor[0] = 0
        cursor[1] = jnp.where(some, 0, pl.num_programs(0))
        cursor[2] = limits[1]
        cursor[3] = blocks_of(limits[1])[0]
        for slot in range(depth - 1):
            start_ahead(slot)

    @pl.when((visit == 0) | (tile_V[visit] != tile_V[jnp.maximum(visit - 1, 0)]))
    def begin_tile() -> None:
        max_GTL[...] = jnp.full_like(max_GTL, softmax.LOWEST)
        sum_GTL[...] = jnp.zeros_like(sum_GTL)
        acc_GTC[...] = jnp.zeros_like(acc_GTC)

    b, zero, first, last = rows_of(visit)
    low, high = blocks_of(visit)
    whole = (last - first + 1) == tile

    def attend(slot: Any, keys: int, seen: Any | None) -> None:
        kv = ring[slot, :, 0].reshape(block, J)[:keys]

        def scores(g: int) -> Any:
            q = q_TX[:, g * C : (g + 1) * C]
            return softmax.scores(q, kv[:, :C], seen=seen, soft_cap=soft_cap)

        ahead = scores(0)
        for g in range(G):
            score, ahead = ahead, scores(g + 1) if g + 1 < G else None
            softmax.absorb(score, kv[:, J - C :], max_GTL.at[g], sum_GTL.at[g], acc_GTC.at[g])

    def last_seen(position: Any) -> Any:
        """Last key that each row sees, `position` or more."""
        if not seen_1T:
            return position
        seen_TL = jnp.broadcast_to(seen_1T[0][...], (LANES, tile)).T
        return jnp.minimum(seen_TL[:, :1], length_B[b] - 1)

    def attend_some(slot: Any, j: Any, keys: int) -> None:
        """Attend to the first keys of a block, each row to those that it may see."""
        key = lax.broadcasted_iota(jnp.int32, (tile, keys), 1) + j * block
        position = lax.broadcasted_iota(jnp.int32, (tile, 1), 0) + zero
        ours = (position >= first) & (position <= last)
        seen = key <= jnp.where(ours, last_seen(position), -1)
        if window is not None:
            seen &= key > position - window
        attend(slot, keys, seen)

    def step(j: Any, carry: Any) -> Any:
        i = cursor[0]
        cursor[0] = i + 1
        start_ahead(lax.rem(i + depth - 1, depth))
        slot = lax.rem(i, depth)
        reader.wait(b, j, slot)
        behind = length_B[b] - j * block
        pl.when(behind < block)(lambda: key_block.clear(ring.at[slot], behind))
        clear_view = whole & ((j + 1) * block - 1 <= first)
        if window is not None:
            clear_view &= j * block > last - window

        pl.when(clear_view)(lambda: attend(slot, block, None))
        half = block // 2 if block % (2 * LANES) == 0 else block
        short = reach_V[visit] - j * block < half
        masked = jnp.logical_not(clear_view)
        pl.when(masked & short)(lambda: attend_some(slot, j, half))
        if half < block:
            pl.when(masked & jnp.logical_not(short))(lambda: attend_some(slot, j, block))
        return carry

    @pl.when(sequence_V[visit] >= 0)
    def visit_sequence() -> None:
        lax.fori_loop(low, high, step, 0)

    end = pl.num_programs(1)

    @pl.when((visit == end - 1) | (tile_V[visit] != tile_V[jnp.minimum(visit + 1, end - 1)]))
    def finish_tile() -> None:
        row = lax.broadcasted_iota(jnp.int32, (tile, C), 0) + tile_V[visit] * tile
        for g in range(G):
            head = slice(g * C, (g + 1) * C)
            out = softmax.normalise(sum_GTL[g], acc_GTC[g])
            old = decoded_TX[:, head].astype(jnp.float32)
            out_TX[:, head] = jnp.where(row < num_decode[0], old, out).astype(out_TX.dtype)
