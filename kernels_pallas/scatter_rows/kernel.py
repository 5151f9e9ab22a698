"""Moves vision rows from the arena into the embeddings of a step, touching no other tile. Traced.

A tile is up to 64 tokens; only tiles with vision rows are visited, four in flight:

    arena[R,Z,4,J] ──8 rows in one DMA where they follow each other, else one──▶ VMEM rows
    x[T,D] ──unless every token of the tile gets a row, and nothing is added──▶ VMEM tiles
       ▲                                                                      │ select or add
       └──────────────────────────────────────────────────────────────────────┘

A tile that gets a row for every token is a plain copy: half of the work.

VMEM: 4 · 2 · 64 rows, 3.6 MiB at D = 3584 in bfloat16.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from kernels_pallas.scatter_rows.layout import SUBLANES, row_lanes

TILE = 64
"""Tokens of a tile: at D = 3584 a DMA of 450 KiB, twice what covers its latency."""
RUN = 8
"""Rows of one DMA, where they follow each other in the arena."""
DEPTH = 4
"""Tiles in flight: two being read, one in use, one being written."""
VMEM_LIMIT_BYTES = 48 << 20

_EMPTY, _SINGLE = -2, -1
"""Runs without any row, and with rows that do not follow each other."""


class RowPlan(NamedTuple):
    """Where the vision rows of a step go; the same for all levels."""

    tile_N: Int32[Array, " N"]
    """Tiles with rows first, in order."""
    num_tiles: Int32[Array, " 1"]
    count_N: Int32[Array, " N"]
    """Rows of each tile, by tile."""
    bits_W: Int32[Array, " W"]
    """Bit t % 32 of word t // 32: token t gets a row."""
    run_G: Int32[Array, " G"]
    """Of each 8 tokens: the first row if all follow each other, -1 if not, -2 for no row at all."""
    row_T: Int32[Array, " T"]


def plan_rows(row_T: Int32[Array, " T"]) -> RowPlan:
    """Sort out which tiles and runs of a step have vision rows; do it once a step.

    Args:
        row_T: Arena row of each token, -1 for text.

    Raises:
        ValueError: T is not a multiple of 32.
    """
    tile = token_tile(row_T.shape[0])
    has_T = row_T >= 0
    count_N = has_T.reshape(-1, tile).sum(axis=1)
    tile_N = jnp.argsort(count_N == 0, stable=True)
    has_GR, row_GR = has_T.reshape(-1, RUN), row_T.reshape(-1, RUN)
    follows_G = jnp.all(row_GR == row_GR[:, :1] + jnp.arange(RUN), axis=1) & has_GR[:, 0]
    run_G = jnp.where(has_GR.any(axis=1), jnp.where(follows_G, row_GR[:, 0], _SINGLE), _EMPTY)
    word_W = (has_T.reshape(-1, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)).sum(
        axis=1, dtype=jnp.uint32
    )
    bits_W = lax.bitcast_convert_type(word_W, jnp.int32)
    num_tiles = (count_N > 0).sum()[None]
    plan = (x.astype(jnp.int32) for x in (tile_N, num_tiles, count_N, bits_W, run_G, row_T))
    return RowPlan(*plan)


def token_tile(num_tokens: int) -> int:
    """Tokens of a tile in a step of this size.

    Raises:
        ValueError: The size is not a multiple of 32.
    """
    if num_tokens % 32:
        raise ValueError(f"a step of {num_tokens} tokens is not a multiple of 32; pad it")
    return min(TILE, num_tokens & -num_tokens)


def scatter_rows(
    x_TD: Float[Array, "T D"],
    arena_RZ4J: Float[Array, "R Z 4 J"],
    plan: RowPlan,
    *,
    level: int = 0,
    add: bool = False,
) -> Float[Array, "T D"]:
    """Put vision rows in the place of text embeddings, or add them to hidden states, in place.

    Args:
        x_TD: Embeddings or hidden states, D a multiple of 128; donated.
        arena_RZ4J: The arena (`layout`): Z levels a row, 0 the embedding, then deepstack.
        plan: `plan_rows` of the step.
        level: Which level to read.
        add: Add the rows instead of putting them.

    Returns:
        x with the rows; other tokens as they were.

    Raises:
        ValueError: Shapes that the kernel cannot take.
    """
    (T, D), (_, Z, _, J) = x_TD.shape, arena_RZ4J.shape
    if D % 128 or row_lanes(D) != J or not 0 <= level < Z or x_TD.dtype != arena_RZ4J.dtype:
        raise ValueError(
            f"{x_TD.dtype}[{T}, {D}] and level {level} of an arena "
            f"{arena_RZ4J.dtype}{list(arena_RZ4J.shape)} do not fit (see layout)"
        )
    tile = token_tile(T)
    # by name, else XLA may fetch a whole arena into VMEM before the call
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    out: Array = pl.pallas_call(
        functools.partial(_kernel, level=level, add=add),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((DEPTH, tile, SUBLANES, J), x_TD.dtype),
                pltpu.VMEM((DEPTH, tile, D), x_TD.dtype),
                pltpu.SemaphoreType.DMA((DEPTH,)),
                pltpu.SemaphoreType.DMA((DEPTH,)),
                pltpu.SemaphoreType.DMA((DEPTH,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_LIMIT_BYTES, disable_bounds_checks=True
        ),
        name="scatter_rows",
    )(*plan, arena_RZ4J, x_TD)
    return out


def _kernel(
    tile_N: Any,
    num_tiles: Any,
    count_N: Any,
    bits_W: Any,
    run_G: Any,
    row_T: Any,
    arena_hbm: Any,
    _: Any,  # x as an input: the same memory as the output
    x_hbm: Any,
    rows: Any,
    tiles: Any,
    rows_read: Any,
    tile_read: Any,
    tile_written: Any,
    *,
    level: int,
    add: bool,
) -> None:
    depth, tile, D = tiles.shape

    def tile_in_hbm(i: Any) -> Any:
        return x_hbm.at[pl.ds(pl.multiple_of(tile_N[i] * tile, tile), tile)]

    def read_tile(i: Any) -> Any:
        s = lax.rem(i, depth)
        return pltpu.make_async_copy(tile_in_hbm(i), tiles.at[s], tile_read.at[s])

    def write_tile(i: Any) -> Any:
        s = lax.rem(i, depth)
        return pltpu.make_async_copy(tiles.at[s], tile_in_hbm(i), tile_written.at[s])

    def needs_old(i: Any) -> Any:
        return add | (count_N[tile_N[i]] < tile)

    def start_rows(i: Any) -> None:
        s = lax.rem(i, depth)

        def start(row: Any, at: Any, num: int) -> None:
            source = arena_hbm.at[pl.ds(row, num), level]
            pltpu.make_async_copy(source, rows.at[s, pl.ds(at, num)], rows_read.at[s]).start()

        def start_run(g: Any, carry: Any) -> Any:
            first = tile_N[i] * tile + g * RUN
            run = run_G[first // RUN]
            pl.when(run >= 0)(lambda: start(run, g * RUN, RUN))

            def start_each(r: Any, carry: Any) -> Any:
                row = row_T[first + r]
                pl.when(row >= 0)(lambda: start(row, g * RUN + r, 1))
                return carry

            # a loop: eight predicated DMAs would be issued in vain for each run
            return lax.fori_loop(0, jnp.where(run == _SINGLE, RUN, 0), start_each, carry)

        lax.fori_loop(0, tile // RUN, start_run, 0)

    def wait_rows(i: Any) -> None:
        s = lax.rem(i, depth)
        here = rows.at[s, pl.ds(0, count_N[tile_N[i]])]
        pltpu.make_async_copy(here, here, rows_read.at[s]).wait()

    def start_reads(i: Any) -> None:
        start_rows(i)
        pl.when(needs_old(i))(lambda: read_tile(i).start())

    def has_row(i: Any) -> Any:
        token = lax.broadcasted_iota(jnp.int32, (tile, D), 0)
        first = tile_N[i] * tile // 32
        word = bits_W[first]
        for w in range(1, tile // 32):
            word = jnp.where(token >= w * 32, bits_W[first + w], word)
        return ((word >> (token & 31)) & 1) == 1

    def join(i: Any) -> None:
        s = lax.rem(i, depth)

        def take_all() -> None:
            tiles[s] = rows[s].reshape(tile, -1)[:, :D]

        def take_some() -> None:
            read_tile(i).wait()
            new = rows[s].reshape(tile, -1)[:, :D].astype(jnp.float32)
            old = tiles[s].astype(jnp.float32)
            tiles[s] = jnp.where(has_row(i), old + new if add else new, old).astype(tiles.dtype)

        if add:
            return take_some()
        pl.when(needs_old(i))(take_some)
        pl.when(jnp.logical_not(needs_old(i)))(take_all)

    def step(i: Any, carry: Any) -> Any:
        @pl.when(i + 2 < num_tiles[0])
        def read_ahead() -> None:
            pl.when(i + 2 >= depth)(lambda: write_tile(i + 2 - depth).wait())
            start_reads(i + 2)

        wait_rows(i)
        join(i)
        write_tile(i).start()
        return carry

    def drain(i: Any, carry: Any) -> Any:
        write_tile(i).wait()
        return carry

    for i in range(2):
        pl.when(i < num_tiles[0])(functools.partial(start_reads, i))
    lax.fori_loop(0, num_tiles[0], step, 0)
    lax.fori_loop(jnp.maximum(num_tiles[0] - depth, 0), num_tiles[0], drain, 0)
