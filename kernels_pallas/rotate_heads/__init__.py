"""Rotary positions for the heads of a fused projection, and its split into what attention reads.

For TPUs alone: elsewhere XLA joins the rotation to the operations around it.
"""

from kernels_pallas.rotate_heads.grouped import Norms, rotate_grouped
from kernels_pallas.rotate_heads.packed import rotate_packed, takes_packed

__all__ = ["Norms", "rotate_grouped", "rotate_packed", "takes_packed"]
