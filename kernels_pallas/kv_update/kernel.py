"""Puts runs of new KV rows into their pages: whole aligned blocks, in place. Traced.

An item is one block of `rows` token slots of a page, and the run of new rows that it gets. The list
of items is made once a step. One grid step; four items are in flight:

    new[T, K·J]   ──window of rows+tile, aligned──▶ VMEM windows ─ shift to the block's rows ─┐
    pages[P,K,S,J] ──block [K, rows, J], unless all of it is new──▶ VMEM blocks ◀─────────────┘
          ▲                                                             │
          └─────────────────────────────────────────────────────────────┘

A row alone cannot be moved: memory is tiled by 8 (float32) or 16 (bfloat16) rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from kernels_pallas.tiling import round_up, tile_rows

DEPTH = 4
"""Items in flight: two being read, one in use, one being written."""
BLOCK_ROWS = 128
"""Token slots of a block at most; a decode step, one row a sequence, wants a single tile."""


class Updates(NamedTuple):
    """The items of a step; the same for all layers."""

    page_N: Int32[Array, " N"]
    slot_N: Int32[Array, " N"]
    """First token slot of the block in its page."""
    token_N: Int32[Array, " N"]
    """Token of the step that would stand in the block's first slot; may be negative."""
    begin_N: Int32[Array, " N"]
    end_N: Int32[Array, " N"]
    """Rows of the block, half-open, that are new."""
    num_items: Int32[Array, " 1"]
    """Items that are real."""


def plan_updates(
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    first: Int32[Array, ""],
    end: Int32[Array, ""],
    *,
    num_tokens: int,
    page_size: int,
    block_rows: int = BLOCK_ROWS,
) -> Updates:
    """List the blocks that the new tokens of sequences `first` to `end` touch; do it once a step.

    Args:
        start_B1: First token of each sequence in the step, ascending, and the end of the last.
        length_B: KV tokens of each sequence after the step.
        page_table_BQ: The pages of each sequence, in order.
        num_tokens: Tokens T of the step with padding.
        block_rows: Slots of a block, a multiple of the tile; at most a page is taken.
    """
    rows = min(block_rows, page_size)
    num_sequences = length_B.shape[0]
    b = jnp.arange(num_sequences)
    fresh_B = start_B1[1:] - start_B1[:-1]
    low_B = (length_B - fresh_B) // rows
    real_B = (b >= first) & (b < end) & (fresh_B > 0)
    count_B = jnp.where(real_B, -(-length_B // rows) - low_B, 0)
    stop_B = jnp.cumsum(count_B)
    n = jnp.arange(num_tokens // rows + 2 * num_sequences)
    b = jnp.minimum(jnp.searchsorted(stop_B, n, side="right"), num_sequences - 1)
    at = (low_B[b] + n - (stop_B - count_B)[b]) * rows
    page_N = page_table_BQ[b, jnp.minimum(at // page_size, page_table_BQ.shape[1] - 1)]
    zero = length_B[b] - fresh_B[b]
    items = (page_N, at % page_size, start_B1[b] + at - zero)
    bounds = (jnp.maximum(zero - at, 0), jnp.minimum(length_B[b] - at, rows))
    return Updates(*(x.astype(jnp.int32) for x in (*items, *bounds, stop_B[-1:])))


def kv_update(
    new_TY: Float[Array, "T Y"],
    pages_PKSJ: Float[Array, "P K S J"],
    updates: Updates,
    *,
    block_rows: int = BLOCK_ROWS,
) -> Float[Array, "P K S J"]:
    """Write new KV rows into their page slots, in place.

    Args:
        new_TY: Rows of the step's tokens as the projection emits them: per KV head J lanes, key
            and then value, heads side by side (Y = K · J).
        pages_PKSJ: The pool; donated.
        updates: `plan_updates` of the same tokens, page size and `block_rows`.

    Returns:
        The pool; slots of no new token keep what they had.
    """
    _, K, S, J = pages_PKSJ.shape
    rows, tile = min(block_rows, S), tile_rows(pages_PKSJ.dtype)
    T = new_TY.shape[0]
    wanted = max(round_up(T, tile), rows + tile)
    if wanted > T:
        new_TY = jnp.pad(new_TY, ((0, wanted - T), (0, 0)))
    # the pool by name, else XLA may fetch all of a small one into VMEM before the call
    either, hbm = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.HBM))
    pages: Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            in_specs=[either, hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((DEPTH, rows + tile, K * J), pages_PKSJ.dtype),
                pltpu.VMEM((DEPTH, K, rows, J), pages_PKSJ.dtype),
                pltpu.SemaphoreType.DMA((DEPTH,)),
                pltpu.SemaphoreType.DMA((DEPTH,)),
                pltpu.SemaphoreType.DMA((DEPTH,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages_PKSJ.shape, pages_PKSJ.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="kv_update",
    )(*updates, new_TY, pages_PKSJ)
    return pages


def _kernel(
    page_N: Any,
    slot_N: Any,
    token_N: Any,
    begin_N: Any,
    end_N: Any,
    num_items: Any,
    new_hbm: Any,
    _: Any,  # the pool as an input: the same memory as the output
    pages_hbm: Any,
    windows: Any,
    blocks: Any,
    window_read: Any,
    block_read: Any,
    block_written: Any,
) -> None:
    depth, K, rows, J = blocks.shape
    tile = windows.shape[1] - rows
    num_new = new_hbm.shape[0]

    def window_start(i: Any) -> Any:
        aligned = token_N[i] // tile * tile
        return pl.multiple_of(jnp.clip(aligned, 0, num_new - rows - tile) // tile * tile, tile)

    def read_window(i: Any) -> Any:
        s = lax.rem(i, depth)
        source = new_hbm.at[pl.ds(window_start(i), rows + tile)]
        return pltpu.make_async_copy(source, windows.at[s], window_read.at[s])

    def block_in_hbm(i: Any) -> Any:
        return pages_hbm.at[page_N[i], :, pl.ds(pl.multiple_of(slot_N[i], rows), rows)]

    def read_block(i: Any) -> Any:
        s = lax.rem(i, depth)
        return pltpu.make_async_copy(block_in_hbm(i), blocks.at[s], block_read.at[s])

    def write_block(i: Any) -> Any:
        s = lax.rem(i, depth)
        return pltpu.make_async_copy(blocks.at[s], block_in_hbm(i), block_written.at[s])

    def has_old(i: Any) -> Any:
        return (begin_N[i] > 0) | (end_N[i] < rows)

    def start_read(i: Any) -> None:
        read_window(i).start()
        pl.when(has_old(i))(lambda: read_block(i).start())

    def join(i: Any) -> None:
        s = lax.rem(i, depth)
        row = lax.broadcasted_iota(jnp.int32, (rows, J), 0)
        fresh = (row >= begin_N[i]) & (row < end_N[i])
        up = lax.rem(rows + tile + window_start(i) - token_N[i], rows + tile)
        for k in range(K):
            window = windows[s, :, k * J : (k + 1) * J].astype(jnp.float32)
            shifted = pltpu.roll(window, up, 0)[:rows]
            old = blocks[s, k].astype(jnp.float32)
            blocks[s, k] = jnp.where(fresh, shifted, old).astype(blocks.dtype)

    def step(i: Any, carry: Any) -> Any:
        @pl.when(i + 2 < num_items[0])
        def read_ahead() -> None:
            pl.when(i + 2 >= depth)(lambda: write_block(i + 2 - depth).wait())
            start_read(i + 2)

        read_window(i).wait()
        pl.when(has_old(i))(lambda: read_block(i).wait())
        join(i)
        write_block(i).start()
        return carry

    def drain(i: Any, carry: Any) -> Any:
        write_block(i).wait()
        return carry

    for i in range(2):
        pl.when(i < num_items[0])(functools.partial(start_read, i))
    lax.fori_loop(0, num_items[0], step, 0)
    lax.fori_loop(jnp.maximum(num_items[0] - depth, 0), num_items[0], drain, 0)
