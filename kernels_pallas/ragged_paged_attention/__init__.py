"""Attention of a step's queries over paged keys and values."""

from kernels_pallas.ragged_paged_attention.api import (
    Latent,
    Ragged,
    StepPlan,
    attend_rows,
    latent_row_lanes,
    page_shape,
    plan_step,
    ragged_paged_attention,
    write_and_attend,
    write_and_attend_latent,
)

__all__ = [
    "Latent",
    "Ragged",
    "StepPlan",
    "attend_rows",
    "latent_row_lanes",
    "page_shape",
    "plan_step",
    "ragged_paged_attention",
    "write_and_attend",
    "write_and_attend_latent",
]
