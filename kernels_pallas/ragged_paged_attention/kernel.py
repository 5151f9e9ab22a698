"""Attention of one step over paged KV, decode rows and extend runs mixed. Traced.

Three calls, each doing one thing well, chained through the pool so that it is updated in place:

    kv_update ──▶ decode_attention ──▶ extend_attention
    rows of       one row a sequence,   tiles of the runs,
    the runs      writes its own row    takes over decoded rows

A step without extends is one call; one without decodes, two.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.kv_update.kernel import Updates, kv_update, plan_updates
from kernels_pallas.ragged_paged_attention.decode import decode_attention
from kernels_pallas.ragged_paged_attention.extend import Visits, extend_attention, plan_visits
from kernels_pallas.tiling import LANES, tile_rows

MAX_TILE = 256
"""Query tokens of a tile; 128 is a third slower on v6e, 512 takes twice as long to compile."""
MAX_TABLE_BYTES = 512 << 10
"""Of the 1 MiB of scalar memory, what a page table may take."""


class ExtendPlan(NamedTuple):
    """What the extends of a step share over all layers."""

    visits: Visits
    updates: Updates


def plan_extends(
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    num_decode: Int32[Array, ""],
    num_sequences: Int32[Array, ""],
    seen_T: Int32[Array, " T"] | None = None,
    *,
    num_tokens: int,
    page_size: int,
) -> ExtendPlan:
    """Lay out the extends of a step, sequences `num_decode` to `num_sequences`; do it once a step.

    Args:
        start_B1: First token of each sequence in the step, ascending, and the end of the last; the
            decode rows come first, so `start_B1[b] == b` for them.
        length_B: KV tokens of each sequence after the step.
        page_table_BQ: The pages of each sequence, in order.
        seen_T: As `ragged_paged_attention` takes it.
        num_tokens: Tokens T of the step with padding.
    """
    visits = plan_visits(
        start_B1,
        length_B,
        num_decode,
        num_sequences,
        seen_T,
        num_tokens=num_tokens,
        tile=query_tile(num_tokens),
    )
    updates = plan_updates(
        start_B1,
        length_B,
        page_table_BQ,
        num_decode,
        num_sequences,
        num_tokens=num_tokens,
        page_size=page_size,
    )
    return ExtendPlan(visits, updates)


def query_tile(num_tokens: int) -> int:
    """Query tokens of a tile in a step of this size.

    Raises:
        ValueError: The size is not a multiple of 16.
    """
    tile = min(MAX_TILE, num_tokens & -num_tokens)
    if tile < 16:
        raise ValueError(f"a step of {num_tokens} tokens is not a multiple of 16; pad it")
    return tile


def ragged_paged_attention(
    q_TX: Float[Array, "T X"],
    new_TY: Float[Array, "T Y"],
    pages_PKSJ: Float[Array, "P K S J"],
    start_B1: Int32[Array, " B1"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    num_decode: Int32[Array, ""],
    extends: ExtendPlan | None,
    seen_T: Int32[Array, " T"] | None = None,
    *,
    channels: int,
    max_decode: int,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "T X"], Float[Array, "P K S J"]]:
    """Write the KV rows of a step into their pages and attend from its tokens.

    Args:
        q_TX: Queries as the projection emits them: `channels` lanes a head, the heads of one KV
            head side by side; times `layout.query_scale`, positions applied.
        new_TY: KV rows as the projection emits them: J lanes a KV head, key then value (`layout`).
        pages_PKSJ: The pool; donated.
        start_B1: First token of each sequence in the step, ascending, and the end of the last.
        length_B: KV tokens of each sequence after the step.
        page_table_BQ: The pages of each sequence, in order; no page of a sequence that is written
            belongs to another one.
        num_decode: Sequences with one token each, which are the first tokens of the step.
        extends: `plan_extends` of the step; None: it has decodes only.
        seen_T: Last key of its sequence that each token of an extend sees, at least its own; None:
            its own. Decodes see their own; not read of them, nor of tokens of no sequence.
        channels: Lanes of a query head (`layout.query_lanes`).
        max_decode: Decode rows at most (static); 0: the step has extends only.
        window: Keys up to its own that a query sees at most, whatever it sees behind; None: all.
        soft_cap: Scores s become cap · tanh(s / cap), natural units; None: no cap.

    Returns:
        Outputs in the order of q, in its dtype, zero for padding; and the pool.

    Raises:
        ValueError: Shapes that the kernels cannot take.
    """
    _check(q_TX, new_TY, pages_PKSJ, page_table_BQ, channels, max_decode, extends)
    decoded_BX = None
    if extends is not None:
        pages_PKSJ = kv_update(new_TY, pages_PKSJ, extends.updates)
    if max_decode:
        decoded_BX, pages_PKSJ = _decode(
            q_TX[:max_decode],
            new_TY[:max_decode],
            pages_PKSJ,
            length_B[:max_decode],
            page_table_BQ[:max_decode],
            num_decode,
            channels=channels,
            window=window,
            soft_cap=soft_cap,
        )
    if extends is None:
        assert decoded_BX is not None, "checked above"
        return jnp.pad(decoded_BX, ((0, q_TX.shape[0] - max_decode), (0, 0))), pages_PKSJ
    out_TX = extend_attention(
        q_TX,
        pages_PKSJ,
        start_B1,
        length_B,
        page_table_BQ,
        extends.visits,
        num_decode,
        decoded_BX,
        seen_T,
        channels=channels,
        tile=query_tile(q_TX.shape[0]),
        window=window,
        soft_cap=soft_cap,
    )
    return out_TX, pages_PKSJ


def _decode(
    q_BX: Float[Array, "B X"],
    new_BY: Float[Array, "B Y"],
    pages_PKSJ: Float[Array, "P K S J"],
    length_B: Int32[Array, " B"],
    page_table_BQ: Int32[Array, "B Q"],
    num_decode: Int32[Array, ""],
    *,
    channels: int,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Float[Array, "B X"], Float[Array, "P K S J"]]:
    """Decode with the heads of a KV head as the rows of one matrix, eight or a multiple."""
    (B, X), K = q_BX.shape, pages_PKSJ.shape[1]
    q_BKGC = q_BX.reshape(B, K, -1, channels)
    groups = q_BKGC.shape[2]
    q_BKGC = jnp.pad(q_BKGC, ((0, 0), (0, 0), (0, -groups % 8), (0, 0)))
    out_BKGC, pages_PKSJ = decode_attention(
        q_BKGC,
        new_BY.reshape(B, K, -1),
        pages_PKSJ,
        length_B,
        page_table_BQ,
        num_decode.reshape(1),
        window=window,
        soft_cap=soft_cap,
    )
    return out_BKGC[:, :, :groups].reshape(B, X), pages_PKSJ


def _check(
    q_TX: Float[Array, "T X"],
    new_TY: Float[Array, "T Y"],
    pages_PKSJ: Float[Array, "P K S J"],
    page_table_BQ: Int32[Array, "B Q"],
    channels: int,
    max_decode: int,
    extends: ExtendPlan | None,
) -> None:
    (T, X), (_, K, S, J) = q_TX.shape, pages_PKSJ.shape
    tile = tile_rows(pages_PKSJ.dtype)
    if channels % LANES or J not in (channels, 2 * channels):
        raise ValueError(f"rows of {J} lanes do not fit query heads of {channels} (see layout)")
    if X % (K * channels) or new_TY.shape[1] != K * J:
        raise ValueError(f"{X} query and {new_TY.shape[1]} KV lanes do not fit {K} KV heads")
    if S % tile or max(S, LANES) % min(S, LANES):
        raise ValueError(f"page size {S}: a power of two from {tile} up is needed")
    if page_table_BQ.size * 4 > MAX_TABLE_BYTES:
        raise ValueError(
            f"a page table of {page_table_BQ.shape} is {page_table_BQ.size * 4} bytes; scalar "
            f"memory has room for {MAX_TABLE_BYTES}. Use larger pages or fewer sequences."
        )
    if not 0 <= max_decode <= T or (extends is None and not max_decode):
        raise ValueError(f"max_decode={max_decode} does not fit a step of {T} tokens")
