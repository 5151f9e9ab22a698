"""Attention of one new token for each running sequence, which also writes its KV row. Traced.

One grid step. The blocks of keys of all sequences form one list, and a ring of buffers keeps
`ring - 1` of them on their way from HBM while one is used:

    HBM pages[P,K,S,J] ──a DMA a page──▶ VMEM ring[n, page, K, S, J] ──▶ scores, softmax, values
          ▲                                       │ last block: the new row joins its page
          └── one tile of rows [K, R, J] ◀────────┘

VMEM: ring · block bytes (1 MiB each, see `block_pages_of`), queries and outputs of all sequences.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from kernels_pallas import online_softmax as softmax
from kernels_pallas.ragged_paged_attention import key_block
from kernels_pallas.tiling import LANES, round_up, tile_rows

RING = 4
"""Blocks of keys in VMEM: one in use, three on their way."""
WRITES = 4
"""KV tiles on their way back to HBM at most."""
BLOCK_BYTES = 1 << 20
"""1.3 us of HBM time on v5e, 0.6 on v6e: three on the way cover the latency of a DMA."""


def decode_attention(
    q_BKGC: Float[Array, "B K G C"],
    new_BKJ: Float[Array, "B K J"],
    pages_PKSJ: Float[Array, "P K S J"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    num_decode: Int32[Array, " 1"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    block_pages: int | None = None,
) -> tuple[Float[Array, "B K G C"], Float[Array, "P K S J"]]:
    """Attend from one query row a sequence, and write that row's key and value into its page.

    Args:
        q_BKGC: Queries in `layout.query_lanes` lanes, times `layout.query_scale`; G a multiple of
            8, padded with anything finite.
        new_BKJ: The new tokens' KV rows.
        pages_PKSJ: The pool; donated, it is updated in place.
        length_B: KV tokens of each sequence with the new one, at least 1.
        page_table_BQ: The pages of each sequence, in order.
        num_decode: How many of the B rows are real; outputs of the others are zero.
        window: Keys that a query sees at most, itself included; None: all.
        soft_cap: Scores s become cap · tanh(s / cap), natural units; None: no cap.
        block_pages: Pages of one block; None: what fits `BLOCK_BYTES`.

    Returns:
        Outputs like q (the value's lanes are those of `layout.value_lane`), and the pool.
    """
    _, K, G, C = q_BKGC.shape
    _, _, S, J = pages_PKSJ.shape
    rows = tile_rows(pages_PKSJ.dtype)
    n = block_pages or block_pages_of(pages_PKSJ, page_table_BQ.shape[1])
    kernel = functools.partial(_decode_kernel, window=window, soft_cap=soft_cap)
    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.HBM))
    out, pages = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            in_specs=[vmem, vmem, hbm],
            out_specs=[vmem, hbm],
            scratch_shapes=[
                pltpu.VMEM((RING, n, K, S, J), pages_PKSJ.dtype),
                pltpu.VMEM((WRITES, K, rows, J), pages_PKSJ.dtype),
                pltpu.VMEM((K, G, LANES), jnp.float32),
                pltpu.VMEM((K, G, LANES), jnp.float32),
                pltpu.VMEM((K, G, C), jnp.float32),
                pltpu.SemaphoreType.DMA((RING,)),
                pltpu.SemaphoreType.DMA((WRITES,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q_BKGC.shape, q_BKGC.dtype),
            jax.ShapeDtypeStruct(pages_PKSJ.shape, pages_PKSJ.dtype),
        ],
        input_output_aliases={5: 1},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=softmax.VMEM_LIMIT_BYTES, disable_bounds_checks=True
        ),
        name="decode_attention",
    )(num_decode, length_B, page_table_BQ.reshape(-1), q_BKGC, new_BKJ, pages_PKSJ)
    return out, pages


def block_pages_of(pages_PKSJ: Any, pages_per_sequence: int) -> int:
    """Pages of one block of keys: about `BLOCK_BYTES`, a multiple of 128 keys, 2048 at most."""
    _, K, S, J = pages_PKSJ.shape
    page_bytes = K * S * J * pages_PKSJ.dtype.itemsize
    keys = min(2048, BLOCK_BYTES // page_bytes * S, pages_per_sequence * S)
    return int(max(S, round_up(keys, LANES)) // S)


def _decode_kernel(
    num_ref: Any,
    length_B: Any,
    table_BQ: Any,
    q_BKGC: Any,
    new_BKJ: Any,
    _: Any,  # the pool as an input: the same memory as the output
    out_BKGC: Any,
    pages_hbm: Any,
    ring: Any,
    tiles: Any,
    max_KGL: Any,
    sum_KGL: Any,
    acc_KGC: Any,
    read_done: Any,
    write_done: Any,
    *,
    window: int | None,
    soft_cap: float | None,
) -> None:
    depth, n, K, S, J = ring.shape
    C = q_BKGC.shape[3]
    block = n * S
    num = num_ref[0]
    reader = key_block.Reader(pages_hbm, ring, read_done, table_BQ, length_B)

    def first_block(b: Any) -> Any:
        return 0 if window is None else jnp.maximum(length_B[b] - window, 0) // block

    def following(b: Any, j: Any) -> tuple[Any, Any]:
        more = (j + 1) * block < length_B[b]
        after = jnp.maximum(jnp.minimum(b + 1, num - 1), 0)
        return jnp.where(more, b, b + 1), jnp.where(more, j + 1, first_block(after))

    def write_of(b: Any, page: Any, row: Any) -> Any:
        w = lax.rem(b, tiles.shape[0])
        target = pages_hbm.at[page, :, pl.ds(row, tiles.shape[2])]
        return pltpu.make_async_copy(tiles.at[w], target, write_done.at[w])

    def add_new_row(b: Any, j: Any, slot: Any) -> None:
        """Join the new row to its page, in VMEM and in HBM; clear what lies behind it."""
        rows = tiles.shape[2]
        w = lax.rem(b, tiles.shape[0])
        last = length_B[b] - 1 - j * block
        p, row = last // S, lax.rem(last, S)
        tile = pl.multiple_of(row // rows * rows, rows)

        @pl.when(b >= tiles.shape[0])
        def await_former_write() -> None:
            write_of(b, 0, 0).wait()  # only its size counts

        index = lax.broadcasted_iota(jnp.int32, (rows, J), 0) + tile
        for k in range(K):
            old = ring[slot, p, k, pl.ds(tile, rows)].astype(jnp.float32)
            new = jnp.broadcast_to(new_BKJ[b, k][None].astype(jnp.float32), (rows, J))
            joined = jnp.where(index == row, new, old)
            tiles[w, k] = joined.astype(tiles.dtype)
            ring[slot, p, k, pl.ds(tile, rows)] = joined.astype(ring.dtype)
        write_of(b, reader.page(b, j * n + p), tile).start()
        pl.when(last + 1 < block)(lambda: key_block.clear(ring.at[slot], last + 1))

    def attend(b: Any, j: Any, slot: Any) -> None:
        """Scores, softmax and values of one block; garbage behind the length is masked."""
        key = lax.broadcasted_iota(jnp.int32, (q_BKGC.shape[2], block), 1) + j * block
        seen = key < length_B[b]
        if window is not None:
            seen &= key >= length_B[b] - window
        first = j == first_block(b)
        for k in range(K):
            kv = ring[slot, :, k].reshape(block, J)
            score = softmax.scores(q_BKGC[b, k], kv[:, :C], seen=seen, soft_cap=soft_cap)
            state = (max_KGL.at[k], sum_KGL.at[k], acc_KGC.at[k])
            softmax.absorb(score, kv[:, J - C :], *state, first=first)

    def finish(b: Any) -> None:
        for k in range(K):
            out_BKGC[b, k] = softmax.normalise(sum_KGL[k], acc_KGC[k]).astype(out_BKGC.dtype)

    def step(carry: Any) -> Any:
        i, b, j, ahead_b, ahead_j = carry

        @pl.when(ahead_b < num)
        def read_ahead() -> None:
            reader.start(ahead_b, ahead_j, lax.rem(i + depth - 1, depth))

        slot = lax.rem(i, depth)
        reader.wait(b, j, slot)
        last = (j + 1) * block >= length_B[b]
        pl.when(last)(functools.partial(add_new_row, b, j, slot))
        attend(b, j, slot)
        pl.when(last)(functools.partial(finish, b))
        next_b, next_j = following(b, j)
        beyond_b, beyond_j = following(jnp.minimum(ahead_b, num - 1), ahead_j)
        return i + 1, next_b, next_j, jnp.where(ahead_b < num, beyond_b, num), beyond_j

    def first_read(slot: Any, carry: Any) -> Any:
        b, j = carry
        pl.when(b < num)(functools.partial(reader.start, b, j, slot))
        beyond_b, beyond_j = following(jnp.minimum(b, jnp.maximum(num - 1, 0)), j)
        return jnp.where(b < num, beyond_b, num), beyond_j

    def clear_output(b: Any, carry: Any) -> Any:
        out_BKGC[b] = jnp.zeros(out_BKGC.shape[1:], out_BKGC.dtype)
        return carry

    first = (jnp.int32(0), jnp.int32(0) + first_block(0))
    start = (jnp.int32(0), *first, *lax.fori_loop(0, depth - 1, first_read, first))
    lax.while_loop(lambda carry: carry[1] < num, step, start)
    lax.fori_loop(num, out_BKGC.shape[0], clear_output, 0)

    def drain(b: Any, carry: Any) -> Any:
        write_of(b, 0, 0).wait()
        return carry

    lax.fori_loop(jnp.maximum(num - tiles.shape[0], 0), num, drain, 0)
