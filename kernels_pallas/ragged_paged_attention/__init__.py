"""Attention of a step's queries over paged keys and values."""

from kernels_pallas.ragged_paged_attention.api import (
    Ragged,
    StepPlan,
    attend_rows,
    page_shape,
    plan_step,
    ragged_paged_attention,
    write_and_attend,
)

__all__ = [
    "Ragged",
    "StepPlan",
    "attend_rows",
    "page_shape",
    "plan_step",
    "ragged_paged_attention",
    "write_and_attend",
]
