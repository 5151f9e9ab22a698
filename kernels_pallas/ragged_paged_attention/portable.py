"""Ragged paged attention in plain JAX, with work in proportion to the real lengths. Traced.

Flash attention (arXiv:2205.14135): loops with traced bounds run over sequences, query blocks and
key blocks; nothing of size T x T or T x max_len is made.
"""

from typing import TYPE_CHECKING, NamedTuple, cast

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

if TYPE_CHECKING:
    from kernels_pallas.ragged_paged_attention.api import Latent, Ragged


class _Tile(NamedTuple):
    """Queries and keys of one turn."""

    queries: int
    keys: int


_DECODE = _Tile(1, 64)  # a small page's worth of keys stays in the first-level cache
_TAIL = _Tile(64, 512)  # short chunks, and what the tiles above leave over
_WIDE = _Tile(192, 512)  # most of a whole tile, in one turn instead of three
_WHOLE = _Tile(256, 512)  # a million scores: enough for XLA's CPU backend to use all threads
_LAST_KEYS = 256  # of all these, where so few are left
_NEVER = -1e30  # finite, so that a block without a visible key leaves no NaN behind


def paged_attention_portable(
    q_THC: Float[Array, "T H C"],
    pages_PJSC: Float[Array, "P J S C"],
    ragged: "Ragged",
    latent: "Latent | None" = None,
    window: int | None = None,
) -> Float[Array, "T H V"]:
    """See `ragged_paged_attention`."""
    num_tokens, num_heads, channels = q_THC.shape
    num_kv = pages_PJSC.shape[1] if latent else pages_PJSC.shape[1] // 2
    q_TKGC = q_THC.reshape(num_tokens, num_kv, num_heads // num_kv, channels)
    tail, wide = min(_TAIL.queries, num_tokens), min(_WIDE.queries, num_tokens)
    # each with the queries that the last of its turns may lack
    tiles = [(_WHOLE, 0)] if num_tokens >= _WHOLE.queries else []
    tiles += [(_Tile(wide, _WIDE.keys), tail - 1)] if wide > tail else []
    tiles += [(_Tile(tail, _TAIL.keys), tail - 1)]

    def attend(b: Array, offset: Array, out: Array, tile: _Tile) -> Array:
        return _attend_tile(q_TKGC, pages_PJSC, ragged, b, offset, out, tile, latent, window)

    def decode(b: Array, out: Array) -> Array:
        return attend(b, jnp.int32(0), out, _DECODE)

    def extend(b: Array, out: Array) -> Array:
        # Ascending tiles: what the last one writes past its chunk's end, the next chunk
        # overwrites.
        left, done = ragged.counts_B[b], jnp.int32(0)
        for tile, slack in tiles:
            turns = (left + slack) // tile.queries

            def turn(i: Array, out: Array, tile: _Tile = tile, done: Array = done) -> Array:
                return attend(b, done + i * tile.queries, out, tile)

            out = lax.fori_loop(0, turns, turn, out)
            left, done = left - turns * tile.queries, done + turns * tile.queries
        return out

    values = latent.value_channels if latent else channels
    out_TKGV = jnp.zeros((*q_TKGC.shape[:3], values), q_TKGC.dtype)
    out_TKGV = lax.fori_loop(0, ragged.num_decodes, decode, out_TKGV)
    out_TKGV = lax.fori_loop(ragged.num_decodes, ragged.num_sequences, extend, out_TKGV)
    return out_TKGV.reshape(num_tokens, num_heads, values)


def _attend_tile(
    q_TKGC: Float[Array, "T K G C"],
    pages_PJSC: Float[Array, "P J S C"],
    ragged: "Ragged",
    sequence: Int32[Array, ""],
    offset: Int32[Array, ""],
    out_TKGV: Float[Array, "T K G V"],
    tile: _Tile,
    latent: "Latent | None",
    window: int | None,
) -> Float[Array, "T K G V"]:
    """Attend some queries of one sequence, from `offset` in its chunk on, into `out_TKGV`."""
    num_tokens, num_kv, group, channels = q_TKGC.shape
    page_size = pages_PJSC.shape[2]
    block = tile.queries
    num_table_pages = ragged.tables_BQ.shape[1]

    def pages_of(num_keys: int) -> int:
        return max(1, min(num_keys // page_size, num_table_pages))

    # A tile that would reach past the step's end begins earlier, and leaves what it finds there.
    wanted = ragged.starts_B[sequence] + offset
    token = jnp.minimum(wanted, num_tokens - block)
    skipped = wanted - token
    length = ragged.lengths_B[sequence]
    first_position = length - ragged.counts_B[sequence] + offset
    position_X = first_position - skipped + jnp.arange(block)
    last_X = position_X
    num_keys = jnp.minimum(length, first_position + block)
    if ragged.seen_T is not None:
        last_X = lax.dynamic_slice_in_dim(ragged.seen_T, token, block)
        ours_X = (position_X >= first_position) & (position_X < length)
        num_keys = jnp.minimum(length, jnp.max(jnp.where(ours_X, last_X, 0)) + 1)
    last_X = jnp.minimum(last_X, length - 1)  # of rows behind the chunk's last
    lowest = 0 if window is None else jnp.maximum(first_position - window + 1, 0) // page_size

    scale = jnp.asarray(latent.scale if latent else channels**-0.5, q_TKGC.dtype)
    q_XKGC = lax.dynamic_slice_in_dim(q_TKGC, token, block) * scale
    q_KYC = q_XKGC.transpose(1, 0, 2, 3).reshape(num_kv, block * group, channels)

    def over_keys(
        carry: tuple[Array, Array, Array], start_page: Array, block_pages: int, turns: Array
    ) -> tuple[Array, Array, Array]:
        """Go on with `turns` blocks of keys, from a page on."""

        def turn(i: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, ...]:
            page = start_page + i * block_pages
            return add_keys(page, block_pages, carry)

        return cast(tuple[Array, Array, Array], lax.fori_loop(0, turns, turn, carry))

    def add_keys(
        page: Array, block_pages: int, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, ...]:
        sum_KYV, max_KY, total_KY = carry
        # The last turn may reach past the table: shift it back and let the mask drop repeats.
        first_page = jnp.minimum(page, num_table_pages - block_pages)
        k_KZC, v_KZV = _read_pages(
            pages_PJSC,
            lax.dynamic_slice(ragged.tables_BQ, (sequence, first_page), (1, block_pages))[0],
            latent,
        )
        scores_KYZ = jnp.einsum("KYC,KZC->KYZ", q_KYC, k_KZC, preferred_element_type=jnp.float32)
        key_Z = first_page * page_size + jnp.arange(block_pages * page_size)
        visible_XZ = (key_Z[None] <= last_X[:, None]) & (key_Z[None] >= page * page_size)
        if window is not None:
            visible_XZ &= key_Z[None] > position_X[:, None] - window
        visible_YZ = jnp.repeat(visible_XZ, group, axis=0)
        scores_KYZ = jnp.where(visible_YZ[None], scores_KYZ, _NEVER)
        new_max_KY = jnp.maximum(max_KY, scores_KYZ.max(-1))
        weights_KYZ = jnp.exp(scores_KYZ - new_max_KY[..., None])
        shrink_KY = jnp.exp(max_KY - new_max_KY)
        v_KZV = jnp.where((key_Z < length)[:, None], v_KZV, 0)  # what others left there may be NaN
        part_KYV = jnp.einsum(
            "KYZ,KZV->KYV",
            weights_KYZ.astype(v_KZV.dtype),
            v_KZV,
            preferred_element_type=jnp.float32,
        )
        return (
            sum_KYV * shrink_KY[..., None] + part_KYV,
            new_max_KY,
            total_KY * shrink_KY + weights_KYZ.sum(-1),
        )

    start = (
        jnp.zeros((*q_KYC.shape[:2], out_TKGV.shape[3]), jnp.float32),
        jnp.full(q_KYC.shape[:2], _NEVER, jnp.float32),
        jnp.zeros(q_KYC.shape[:2], jnp.float32),
    )
    num_pages = (num_keys + page_size - 1) // page_size
    done = jnp.int32(lowest)
    carry, last = start, pages_of(tile.keys)
    if tile != _DECODE:  # large blocks while more keys are left than a small one has
        large, last = last, pages_of(_LAST_KEYS)
        turns = (num_pages - done - last + large - 1) // large
        carry = over_keys(carry, done, large, turns)
        done += turns * large
    turns = (num_pages - done + last - 1) // last
    sum_KYV, _, total_KY = over_keys(carry, done, last, turns)
    attended_KYV = (sum_KYV / total_KY[..., None]).astype(q_TKGC.dtype)
    attended_XKGV = attended_KYV.reshape(num_kv, block, group, -1).transpose(1, 0, 2, 3)
    if tile not in (_DECODE, _WHOLE):  # those are within the step always
        old_XKGV = lax.dynamic_slice_in_dim(out_TKGV, token, block)
        is_new_X = jnp.arange(block) >= skipped
        attended_XKGV = jnp.where(is_new_X[:, None, None, None], attended_XKGV, old_XKGV)
    return lax.dynamic_update_slice_in_dim(out_TKGV, attended_XKGV, token, 0)


def _read_pages(
    pages_PJSC: Float[Array, "P J S C"], page_X: Int32[Array, " X"], latent: "Latent | None"
) -> tuple[Float[Array, "K Z C"], Float[Array, "K Z V"]]:
    """Read the keys and values of some pages, in order."""
    num_rows, page_size, channels = pages_PJSC.shape[1:]
    if page_X.shape[0] == 1:  # a slice; a gather of one page would copy it once more
        kv_JZC = lax.dynamic_index_in_dim(pages_PJSC, page_X[0], 0, keepdims=False)
    else:
        kv_XJSC = pages_PJSC[page_X]
        keys = page_X.shape[0] * page_size
        kv_JZC = kv_XJSC.transpose(1, 0, 2, 3).reshape(num_rows, keys, channels)
    if latent is not None:
        return kv_JZC, kv_JZC[:, :, : latent.value_channels]
    return kv_JZC[: num_rows // 2], kv_JZC[num_rows // 2 :]
