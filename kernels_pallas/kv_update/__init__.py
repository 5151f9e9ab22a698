"""Keys and values of a step into their pages."""

from kernels_pallas.kv_update.api import kv_update

__all__ = ["kv_update"]
