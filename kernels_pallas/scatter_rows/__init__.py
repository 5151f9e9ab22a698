"""Vision rows into the embeddings of a step."""

from kernels_pallas.scatter_rows.api import scatter_rows

__all__ = ["scatter_rows"]
