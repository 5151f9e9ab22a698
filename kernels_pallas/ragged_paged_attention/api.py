"""Ragged paged attention: the op and its choice of implementation. Traced."""

from typing import Literal, NamedTuple

from jax import Array
from jaxtyping import Float, Int32

from kernels_pallas.ragged_paged_attention.portable import paged_attention_portable
from kernels_pallas.ragged_paged_attention.reference import paged_attention_reference

Implementation = Literal["portable", "reference"]


class Ragged(NamedTuple):
    """Which tokens of a step belong to which sequence, and where their keys and values are.

    Sequences 0 .. num_decodes-1 have one token each, at token b; sequences num_decodes ..
    num_sequences-1 are extend chunks, in order and without gaps behind the decodes. Entries of
    sequences from num_sequences on are not read.
    """

    num_decodes: Int32[Array, ""]
    num_sequences: Int32[Array, ""]
    starts_B: Int32[Array, " B"]
    """First token of each sequence in the step."""
    counts_B: Int32[Array, " B"]
    """Tokens of each sequence in the step."""
    lengths_B: Int32[Array, " B"]
    """Keys of each sequence, those of this step included."""
    tables_BQ: Int32[Array, "B Q"]
    """Pages of each sequence, in order."""


def ragged_paged_attention(
    q_THC: Float[Array, "T H C"],
    pages_PJSC: Float[Array, "P J S C"],
    ragged: Ragged,
    *,
    implementation: Implementation = "portable",
) -> Float[Array, "T H C"]:
    """Causal attention of every token over its own sequence.

    Args:
        q_THC: Queries, rotated; any float dtype. Query head h reads KV head h // (H / K).
        pages_PJSC: One layer's pages; rows 0 .. K-1 of J are keys, K .. 2K-1 values. Keys and
            values of this step's tokens are already in their pages.
        ragged: The step's sequences.
        implementation: "portable" for CPU and GPU, "reference" for tests.

    Returns:
        Attended values in q's dtype; rows of no sequence hold finite filler.
    """
    if implementation == "reference":
        return paged_attention_reference(q_THC, pages_PJSC, ragged)
    return paged_attention_portable(q_THC, pages_PJSC, ragged)
