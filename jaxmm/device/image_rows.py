"""The arena as a decoder reads it: rows in the place of embeddings, and levels added. Traced."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kernels_pallas.scatter_rows import scatter_rows


class ImageRows(NamedTuple):
    """Which arena row belongs to which token of a step."""

    arena_RX: Float[Array, "R X"]
    """X = Z * D: the embedding, then each deepstack level."""
    row_T: Int32[Array, " T"]
    """-1 for text."""

    def into(self, text_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Put the rows in the place of the placeholders' embeddings."""
        return scatter_rows(text_TD, self.arena_RX, self.row_T)

    def add(self, hidden_TD: Float[Array, "T D"], level: int) -> Float[Array, "T D"]:
        """Add a deepstack level (arXiv:2406.04334), from 1 up; a step of text alone skips it."""
        with jax.named_scope("deepstack"):
            return lax.cond(
                jnp.any(self.row_T >= 0),
                lambda x_TD: scatter_rows(x_TD, self.arena_RX, self.row_T, level=level, add=True),
                lambda x_TD: x_TD,
                hidden_TD,
            )
