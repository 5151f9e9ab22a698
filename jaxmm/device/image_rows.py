"""The arena as a decoder reads it: rows in the place of embeddings, and levels added. Traced."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxmm.device.backend import Backend
from jaxmm.device.sharding import WHOLE
from kernels_pallas.scatter_rows import scatter_rows

SMALLEST_NORM = 1e-8
"""Rows shorter than this count as so long, so that the cosine of nothing is 0."""


class ImageRows(NamedTuple):
    """Which arena row belongs to which token of a step."""

    arena: Float[Array, "R ..."]
    """Rows of `row_shape`: the embedding, then each deepstack level."""
    row_T: Int32[Array, " T"]
    """-1 for text."""
    backend: Backend

    def into(self, text_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Put the rows in the place of the placeholders' embeddings."""
        return self._scatter(text_TD, level=0, add=False)

    def add(self, hidden_TD: Float[Array, "T D"], level: int) -> Float[Array, "T D"]:
        """Add a deepstack level (arXiv:2406.04334), from 1 up; a step of text alone skips it."""
        with jax.named_scope("deepstack"):
            return lax.cond(
                jnp.any(self.row_T >= 0),
                lambda x_TD: self._scatter(x_TD, level=level, add=True),
                lambda x_TD: x_TD,
                hidden_TD,
            )

    def _scatter(self, x_TD: Array, *, level: int, add: bool) -> Array:
        """Every chip has the whole of both."""
        move = partial(scatter_rows, level=level, add=add, implementation=self.backend.kernels)
        return self.backend.per_chip(move, WHOLE, WHOLE)(x_TD, self.arena, self.row_T)


def change_of_rows(
    arena: Float[Array, "R ..."],
    before_M: Int32[Array, " M"],
    after_M: Int32[Array, " M"],
    width: int,
    backend: Backend,
) -> Float[Array, " M"]:
    """How much rows differ: 1 minus their cosine similarity, float32 (arXiv:2510.14624, section 3).

    Args:
        arena: Rows of `row_shape`; of deepstack rows the embedding alone is compared.
        before_M: Arena row; -1: a row of zeros, which differs from any by 1.
        after_M: The row that it is compared with.
        width: D.
        backend: Implementation of the ops.
    """
    zeros_MD = jnp.zeros((len(before_M), width), arena.dtype)
    before_MD, after_MD = (
        ImageRows(arena, row_M, backend).into(zeros_MD).astype(jnp.float32)
        for row_M in (before_M, after_M)
    )
    length_2M = jnp.sqrt(jnp.stack([jnp.sum(x * x, axis=-1) for x in (before_MD, after_MD)]))
    product_M = jnp.prod(jnp.maximum(length_2M, SMALLEST_NORM), axis=0)
    return 1.0 - jnp.sum(before_MD * after_MD, axis=-1) / product_M
