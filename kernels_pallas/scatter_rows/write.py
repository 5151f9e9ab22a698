"""Writes finished rows into their slots of the arena, each as one run of memory. Traced.

    rows[M, Z, 4, J] ──a DMA a row, all started, one wait──▶ arena[R, Z, 4, J]

Nothing passes through VMEM: a row of the arena is a whole number of tiles (`layout`).
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32


def write_rows(
    arena_RZ4J: Float[Array, "R Z 4 J"],
    rows_MZ4J: Float[Array, "M Z 4 J"],
    slot_M: Int32[Array, " M"],
) -> Float[Array, "R Z 4 J"]:
    """Put row m into slot slot_M[m], in place.

    Args:
        arena_RZ4J: The arena; donated.
        rows_MZ4J: Packed rows (`layout.pack_rows`).
        slot_M: Slots, each at most once; one that several rows share gets any of them, or a mix.
    """
    either, hbm = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.HBM))
    out: Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[either, hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(arena_RZ4J.shape, arena_RZ4J.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="write_rows",
    )(slot_M, rows_MZ4J, arena_RZ4J)
    return out


def _kernel(slot_M: Any, rows_hbm: Any, _: Any, arena_hbm: Any, done: Any) -> None:
    def start(m: Any, carry: Any) -> Any:
        pltpu.make_async_copy(rows_hbm.at[m], arena_hbm.at[slot_M[m]], done).start()
        return carry

    lax.fori_loop(0, rows_hbm.shape[0], start, 0)
    pltpu.make_async_copy(rows_hbm, rows_hbm, done).wait()  # counts the bytes of all rows
