"""Blocks of KV pages on their way from HBM into a ring of VMEM buffers. Traced.

`table_BQ` is the page table in one row: an array of two axes would be padded in scalar memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tiling import tile_rows

UNROLL = 8
"""Pages of a whole block whose DMAs are started in one turn."""


class Reader(NamedTuple):
    """Reads block j of sequence b, a DMA a page, all waited for at once."""

    pages_PKSJ: Any
    ring: Any
    """[depth, n, K or 1, S, J]; one semaphore a slot."""
    done: Any
    table_BQ: Any
    length_B: Any

    @property
    def keys(self) -> int:
        """Keys of one block."""
        return int(self.ring.shape[1] * self.ring.shape[3])

    def page(self, b: Any, p: Any) -> Any:
        """Page p of sequence b."""
        return self.table_BQ[b * (self.table_BQ.shape[0] // self.length_B.shape[0]) + p]

    def start(self, b: Any, j: Any, slot: Any, heads: Any = slice(None)) -> None:
        n = self.ring.shape[1]

        def one(p: Any, carry: Any) -> Any:
            source = self.pages_PKSJ.at[self.page(b, j * n + p), heads]
            pltpu.make_async_copy(source, self.ring.at[slot, p], self.done.at[slot]).start()
            return carry

        def start_pages(num: Any, unroll: int) -> None:
            lax.fori_loop(0, num, one, 0, unroll=unroll)

        num = self._num_pages(b, j)
        pl.when(num == n)(lambda: start_pages(n, min(n, UNROLL)))
        pl.when(num < n)(lambda: start_pages(num, 1))

    def wait(self, b: Any, j: Any, slot: Any) -> None:
        here = self.ring.at[slot, pl.ds(0, self._num_pages(b, j))]
        pltpu.make_async_copy(here, here, self.done.at[slot]).wait()

    def _num_pages(self, b: Any, j: Any) -> Any:
        left = self.length_B[b] - j * self.keys
        return jnp.minimum(pl.cdiv(left, self.ring.shape[3]), self.ring.shape[1])


def clear(block_nKSJ: Any, row: Any) -> None:
    """Zero the rows of a block from one on: old bits may be NaN, and 0 · NaN is NaN."""
    n, K, S, J = block_nKSJ.shape
    rows = tile_rows(block_nKSJ.dtype)
    page, slot = row // S, lax.rem(row, S)
    tile = slot // rows

    def clear_tile(t: Any, carry: Any) -> Any:
        at = pl.ds(pl.multiple_of(t * rows, rows), rows)
        for k in range(K):
            block_nKSJ[page, k, at] = jnp.zeros((rows, J), block_nKSJ.dtype)
        return carry

    def clear_page(p: Any, carry: Any) -> Any:
        block_nKSJ[p] = jnp.zeros((K, S, J), block_nKSJ.dtype)
        return carry

    at = pl.ds(pl.multiple_of(tile * rows, rows), rows)
    keep = lax.broadcasted_iota(jnp.int32, (rows, J), 0) + tile * rows < slot
    for k in range(K):
        old = block_nKSJ[page, k, at].astype(jnp.float32)
        block_nKSJ[page, k, at] = jnp.where(keep, old, 0.0).astype(block_nKSJ.dtype)
    lax.fori_loop(tile + 1, S // rows, clear_tile, 0)
    lax.fori_loop(page + 1, n, clear_page, 0)
