"""Ragged paged attention: the op, its page layouts, and its choice of implementation. Traced."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kernels_pallas.kv_update import kv_update
from kernels_pallas.online_softmax import LOG2_E
from kernels_pallas.ragged_paged_attention import kernel, lanes, layout
from kernels_pallas.ragged_paged_attention.portable import paged_attention_portable
from kernels_pallas.ragged_paged_attention.reference import paged_attention_reference

Implementation = Literal["portable", "native", "pallas", "reference"]


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
    seen_T: Int32[Array, " T"] | None = None
    """Last key of its sequence that each token sees, at least its own; None: its own. Not read of
    tokens of no sequence; those of one sequence see nothing behind its `lengths_B`."""


class Latent(NamedTuple):
    """How a row that is key and value at once is read."""

    value_channels: int
    """V: the value is the first so many channels of the row, the key is all of it."""
    scale: float
    """Of scores."""


class StepPlan(NamedTuple):
    """What the layers of a step share."""

    ragged: Ragged
    slot_T: Int32[Array, " T"]
    """page * page_size + place in the page, for each token."""
    num_tokens: Int32[Array, ""]
    """Tokens that are real; the rest of T is filler."""
    start_B1: Int32[Array, " B1"]
    """First token of each sequence, and the end of the last; `num_tokens` behind those."""
    extends: kernel.ExtendPlan | None
    """Of "pallas" alone."""


def page_shape(
    page_size: int, num_kv_heads: int, channels: int, *, implementation: Implementation
) -> tuple[int, int, int]:
    """Shape of one page of one layer: the second to last axes of the pool.

    portable: [J, S, C], J holds K keys, then K values; pallas: [K, S, J], a row is a key and then
    its value (`layout`). Both have K, or a multiple, first: that axis splits over chips.
    """
    if implementation == "pallas":
        return num_kv_heads, page_size, layout.row_lanes(channels)
    return 2 * num_kv_heads, page_size, channels


def latent_row_lanes(channels: int, *, implementation: Implementation) -> int:
    """J of pages whose rows of so many channels are key and value at once: [1, S, J]."""
    return layout.query_lanes(channels) if implementation == "pallas" else channels


def plan_step(
    ragged: Ragged,
    slot_T: Int32[Array, " T"],
    num_tokens: Int32[Array, ""],
    *,
    page_size: int,
    implementation: Implementation,
) -> StepPlan:
    """Lay out a step; do it once for all layers.

    Args:
        ragged: The step's sequences.
        slot_T: page * page_size + place in the page, for each token.
        num_tokens: Tokens that are real.
        page_size: S.
        implementation: The one that will attend.
    """
    B = ragged.starts_B.shape[0]
    start_B = jnp.where(jnp.arange(B) < ragged.num_sequences, ragged.starts_B, num_tokens)
    start_B1 = jnp.append(start_B, num_tokens).astype(jnp.int32)
    extends = None
    if implementation == "pallas":
        extends = kernel.plan_extends(
            start_B1,
            ragged.lengths_B,
            ragged.tables_BQ,
            ragged.num_decodes,
            ragged.num_sequences,
            ragged.seen_T,
            num_tokens=slot_T.shape[0],
            page_size=page_size,
        )
    return StepPlan(ragged, slot_T, num_tokens, start_B1, extends)


def write_and_attend(
    q_THC: Float[Array, "T H C"],
    k_TKC: Float[Array, "T K C"],
    v_TKC: Float[Array, "T K C"],
    pages: Float[Array, "P ..."],
    plan: StepPlan,
    *,
    window: int | None = None,
    implementation: Implementation,
) -> tuple[Float[Array, "T H C"], Float[Array, "P ..."]]:
    """Write the keys and values of a step into their pages, and attend from its tokens.

    Args:
        q_THC: Queries, rotated, not scaled. Query head h reads KV head h // (H / K).
        k_TKC: Keys, rotated.
        v_TKC: Values.
        pages: One layer's pool, pages of `page_shape`; donated.
        plan: `plan_step` for the same implementation.
        window: Keys up to its own that a token sees at most; None: all.
        implementation: "portable" for CPU and GPU, "native" for a CPU whose kernels are registered
            (`kernels_pallas.native`; as "portable" of arrays that they do not take), "pallas" for
            TPU, "reference" for tests.

    Returns:
        Attended values in q's dtype, finite for filler; and the pool.

    Raises:
        ValueError: "pallas" and shapes that the kernels cannot take.
    """
    if implementation == "pallas":
        q_TX = lanes.query_rows(q_THC, pages.dtype, scale=layout.query_scale(q_THC.shape[2]))
        new_TY = lanes.kv_rows(k_TKC, v_TKC, pages.dtype)
        channels = q_THC.shape[2]
        out_TX, pages = attend_rows(q_TX, new_TY, pages, plan, channels, window=window)
        return lanes.outputs(out_TX, channels).astype(q_THC.dtype), pages
    kv_TJC = jnp.concatenate([k_TKC, v_TKC], axis=1).astype(pages.dtype)
    update = _update_of(implementation)
    pages = kv_update(pages, kv_TJC, plan.slot_T, plan.num_tokens, implementation=update)
    attended_THC = ragged_paged_attention(
        q_THC, pages, plan.ragged, window=window, implementation=implementation
    )
    return attended_THC, pages


def write_and_attend_latent(
    q_THC: Float[Array, "T H C"],
    new_TC: Float[Array, "T C"],
    pages_P1SJ: Float[Array, "P 1 S J"],
    plan: StepPlan,
    latent: Latent,
    *,
    implementation: Implementation,
) -> tuple[Float[Array, "T H V"], Float[Array, "P 1 S J"]]:
    """`write_and_attend` for pages of one row a token, key and value at once (arXiv:2405.04434).

    Args:
        q_THC: Queries, not scaled.
        new_TC: Rows of the step's tokens; every head reads all of them.
        pages_P1SJ: One layer's pool, of `latent_row_lanes`; donated.
        plan: `plan_step` for the same implementation.
        latent: How a row is read.
        implementation: "portable" for CPU and GPU, "pallas" for TPU, "reference" for tests.

    Returns:
        Attended values in q's dtype, finite for filler; and the pool.

    Raises:
        ValueError: "pallas" and shapes that the kernels cannot take.
    """
    if implementation == "pallas":
        (T, H, C), J = q_THC.shape, pages_P1SJ.shape[3]
        q_TX = lanes.query_rows(q_THC, pages_P1SJ.dtype, scale=latent.scale * LOG2_E)
        new_TJ = jnp.pad(new_TC.astype(pages_P1SJ.dtype), ((0, 0), (0, J - C)))
        out_TX, pages_P1SJ = attend_rows(q_TX, new_TJ, pages_P1SJ, plan, C)
        out_THV = out_TX.reshape(T, H, J)[:, :, : latent.value_channels]
        return out_THV.astype(q_THC.dtype), pages_P1SJ
    pages_P1SJ = kv_update(
        pages_P1SJ,
        new_TC[:, None].astype(pages_P1SJ.dtype),
        plan.slot_T,
        plan.num_tokens,
        implementation=_update_of(implementation),
    )
    attended_THV = ragged_paged_attention(
        q_THC, pages_P1SJ, plan.ragged, latent=latent, implementation=implementation
    )
    return attended_THV, pages_P1SJ


def _update_of(implementation: Implementation) -> Literal["portable", "native", "reference"]:
    return "portable" if implementation == "pallas" else implementation


def attend_rows(
    q_TX: Float[Array, "T X"],
    new_TY: Float[Array, "T Y"],
    pages_PKSJ: Float[Array, "P K S J"],
    plan: StepPlan,
    channels: int,
    *,
    window: int | None = None,
) -> tuple[Float[Array, "T X"], Float[Array, "P K S J"]]:
    """`write_and_attend` by the TPU kernels, of rows that lie as those read them (`layout`).

    Args:
        q_TX: Queries, rotated and scaled, heads side by side.
        new_TY: A key and then its value for each KV head, or a row that is both.
        pages_PKSJ: One layer's pool; donated.
        plan: `plan_step` for "pallas".
        channels: C, of one head.
        window: Keys up to its own that a token sees at most; None: all.

    Returns:
        Attended values where the queries were (`lanes.outputs`), zeros for filler; and the pool.
    """
    assert plan.extends is not None, "the plan was made for another implementation"
    ragged = plan.ragged
    return kernel.ragged_paged_attention(
        q_TX,
        new_TY,
        pages_PKSJ,
        plan.start_B1,
        ragged.lengths_B,
        ragged.tables_BQ,
        ragged.num_decodes,
        plan.extends,
        ragged.seen_T,
        channels=layout.query_lanes(channels),
        max_decode=min(q_TX.shape[0], ragged.lengths_B.shape[0]),
        window=window,
    )


def ragged_paged_attention(
    q_THC: Float[Array, "T H C"],
    pages_PJSC: Float[Array, "P J S C"],
    ragged: Ragged,
    *,
    latent: Latent | None = None,
    window: int | None = None,
    implementation: Literal["portable", "native", "reference"] = "portable",
) -> Float[Array, "T H V"]:
    """Attention of every token over its own sequence, whose pages are written already: up to
    itself, or up to `ragged.seen_T`.

    Args:
        q_THC: Queries, rotated; any float dtype. Query head h reads KV head h // (H / K).
        pages_PJSC: One layer's pages; rows 0 .. K-1 of J are keys, K .. 2K-1 values. Keys and
            values of this step's tokens are already in their pages.
        ragged: The step's sequences.
        latent: J is 1, and a row is key and value at once; None: keys and values, scaled by C^-0.5.
        window: Keys up to its own that a token sees at most, whatever it sees behind; None: all.
        implementation: "portable" for CPU and GPU, "native" for a CPU whose kernels are registered
            (`kernels_pallas.native`; as "portable" of arrays that they do not take), "reference"
            for tests.

    Returns:
        Attended values in q's dtype, V channels (C but for `latent`); rows of no sequence hold
        finite filler.
    """
    if implementation == "reference":
        return paged_attention_reference(q_THC, pages_PJSC, ragged, latent, window)
    if implementation == "native" and _native_takes(q_THC, pages_PJSC, latent):
        from kernels_pallas.native.pages import attend_pages

        return attend_pages(
            q_THC,
            pages_PJSC,
            ragged.num_decodes,
            ragged.num_sequences,
            ragged.starts_B,
            ragged.counts_B,
            ragged.lengths_B,
            ragged.tables_BQ,
            ragged.seen_T,
            window=window,
        )
    return paged_attention_portable(q_THC, pages_PJSC, ragged, latent, window)


def _native_takes(q_THC: Array, pages_PJSC: Array, latent: Latent | None) -> bool:
    from kernels_pallas.native import pages

    floats = q_THC.dtype == pages_PJSC.dtype == jnp.float32
    return floats and latent is None and pages.takes(q_THC.shape, pages_PJSC.shape)
