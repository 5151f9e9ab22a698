"""Vision rows into the arena, and from it into the embeddings of a step."""

from kernels_pallas.scatter_rows.api import row_shape, scatter_rows, write_rows

__all__ = ["row_shape", "scatter_rows", "write_rows"]
