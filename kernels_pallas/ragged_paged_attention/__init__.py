"""Attention of a step's queries over paged keys and values."""

from kernels_pallas.ragged_paged_attention.api import Ragged, ragged_paged_attention

__all__ = ["Ragged", "ragged_paged_attention"]
