"""Segment and window attention in plain jax.numpy, for CPU and GPU. Traced.

Online softmax (arXiv:2205.14135) over blocks: the queries of each segment are taken a block at a
time, and for each block a loop runs over the keys of that segment, so the cost follows the images
and nothing of size N x N exists. Scores and sums are float32.

    lane      0 0 0 0 0 0 1 1 1 - - -      segments, - is padding
    queries   [     ] [     ]              a block starts where a segment does; what it holds of
                          [     ]          the next one is overwritten by that one's block
    keys      [     ] [     ]              the same for keys, but masked
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

_BLOCK = 512
"""Queries of one loop and keys of one step; shorter ones copy more of the keys for each score."""
_TILE = 1 << 20
"""Scores of one step, all its heads: below a million XLA's CPU backend leaves the softmax to one
thread; far above, they leave the cache."""
_MASKED = -1e30
"""Score of a key that the query does not see; finite, so that no infinity meets another."""
_State = tuple[Array, Array]
"""Where the next block of queries starts, and the output so far."""


def segment_attention(
    q_NHC: Float[Array, "N H C"],
    k_NHC: Float[Array, "N H C"],
    v_NHC: Float[Array, "N H C"],
    segment_N: Int32[Array, " N"],
    block: int | None = None,
) -> Float[Array, "N H C"]:
    """Attention over the keys of the query's own segment; zeros for padding.

    Args:
        q_NHC: Queries, not scaled.
        k_NHC: Keys.
        v_NHC: Values.
        segment_N: From 0 to N - 1, never falling; -1 for padding.
        block: Queries of one loop and keys of one step of it, half as many where few are left;
            None chooses.
    """
    num, heads, channels = q_NHC.shape
    key_block = block or min(_BLOCK, max(num // 2, 1))
    block, key_block = min(block or _BLOCK, num), min(key_block, num)
    group = _heads_of_step(heads, block * key_block)
    q_NHC = q_NHC * jnp.asarray(channels**-0.5, q_NHC.dtype)
    real_N = segment_N >= 0
    first_N, stop_N, next_N, gap_N = _segment_bounds(segment_N)

    def attend_heads(arrays: tuple[Array, Array, Array]) -> Array:
        q_HNC, k_HNC, v_HNC = arrays

        def attend_block(state: _State, block: int, key_block: int) -> _State:
            start, out_HNC = state
            keys_from = first_N[start]
            keys = _Keys(keys_from, stop_N[start], jnp.minimum(gap_N[keys_from], stop_N[start]))
            # a block that would reach past the lane begins earlier, and leaves what it finds there
            first = jnp.minimum(start, num - block)
            q_HBC = lax.dynamic_slice_in_dim(q_HNC, first, block, 1)
            out_HBC = _attend(q_HBC, k_HNC, v_HNC, real_N, keys, key_block)
            old_HBC = lax.dynamic_slice_in_dim(out_HNC, first, block, 1)
            is_new_B1 = (first + jnp.arange(block) >= start)[:, None]
            out_HBC = jnp.where(is_new_B1, out_HBC, old_HBC)
            out_HNC = lax.dynamic_update_slice_in_dim(out_HNC, out_HBC, first, 1)
            return next_N[jnp.minimum(start + block, stop_N[start])], out_HNC

        def attend_next(state: _State) -> _State:
            # few patches, of a small image or the rest of a large one, would be mostly filler
            half, key_half = max(block // 2, 1), max(key_block // 2, 1)
            whole = partial(attend_block, block=block, key_block=key_block)
            short = partial(attend_block, block=half, key_block=key_half)
            start = state[0]
            after: _State = lax.cond(stop_N[start] - start > half, whole, short, state)
            return after

        state = (next_N[0], jnp.zeros_like(q_HNC))
        return lax.while_loop(lambda state: state[0] < num, attend_next, state)[1]

    groups = (
        jnp.moveaxis(x_NHC, 1, 0).reshape(-1, group, num, channels)
        for x_NHC in (q_NHC, k_NHC, v_NHC)
    )
    out_GHNC: Array = lax.map(attend_heads, tuple(groups))
    out_NHC = jnp.moveaxis(out_GHNC.reshape(heads, num, channels), 0, 1)
    return jnp.where(segment_N[:, None, None] < 0, 0, out_NHC)


def _heads_of_step(heads: int, scores: int) -> int:
    """Heads of one step, which divide all: as many as have `_TILE` scores together, or one."""
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and n * scores <= _TILE]
    return max(fits, default=1)


class _Keys(NamedTuple):
    """The keys of a segment."""

    first: Array
    stop: Array
    gap: Array
    """Where the first padding among them is, or `stop`."""


def _segment_bounds(segment_N: Array) -> tuple[Array, Array, Array, Array]:
    """For each patch: where its segment begins and ends, and the next patch that is no padding,
    and that is.

    Those count the patch itself; the third array has one entry more, for the end of the lane.
    """
    num = len(segment_N)
    index_N = jnp.arange(num, dtype=jnp.int32)
    is_pad_N = segment_N < 0
    place_N = jnp.where(is_pad_N, num, segment_N)  # padding is dropped
    first_I = jnp.full(num, num, jnp.int32).at[place_N].min(index_N, mode="drop")
    stop_I = jnp.zeros(num, jnp.int32).at[place_N].max(index_N + 1, mode="drop")
    next_N = lax.cummin(jnp.where(is_pad_N, num, index_N), reverse=True)
    gap_N = lax.cummin(jnp.where(is_pad_N, index_N, num), reverse=True)
    return first_I[segment_N], stop_I[segment_N], jnp.append(next_N, num), gap_N


def _attend(
    q_HBC: Array, k_HNC: Array, v_HNC: Array, real_N: Array, keys: _Keys, block: int
) -> Array:
    """One block of scaled queries against the keys of a segment, `block` of them (J) at a time."""
    State = tuple[Array, Array, Array]

    def add_block(j: Array, state: State, *, masked: bool) -> State:
        top_HB, sum_HB, out_HBC = state
        wanted = keys.first + j * block
        start = jnp.minimum(wanted, real_N.shape[0] - block)
        k_HJC = lax.dynamic_slice_in_dim(k_HNC, start, block, 1)
        v_HJC = lax.dynamic_slice_in_dim(v_HNC, start, block, 1)
        score_HBJ = jnp.einsum("hbc,hjc->hbj", q_HBC, k_HJC, preferred_element_type=jnp.float32)
        if masked:
            key_J = start + jnp.arange(block)
            seen_J = lax.dynamic_slice_in_dim(real_N, start, block)
            seen_J &= (key_J >= wanted) & (key_J < keys.stop)
            score_HBJ = jnp.where(seen_J, score_HBJ, _MASKED)
        new_top_HB = jnp.maximum(top_HB, score_HBJ.max(axis=-1))
        weight_HBJ = jnp.exp(score_HBJ - new_top_HB[..., None])
        decay_HB = jnp.exp(top_HB - new_top_HB)
        weight_sum_HB = weight_HBJ.sum(axis=-1)
        weight_HBJ = weight_HBJ.astype(v_HJC.dtype)
        added_HBC = jnp.einsum(
            "hbj,hjc->hbc", weight_HBJ, v_HJC, preferred_element_type=jnp.float32
        )
        sum_HB = sum_HB * decay_HB + weight_sum_HB
        return new_top_HB, sum_HB, out_HBC * decay_HB[..., None] + added_HBC

    top_HB = jnp.full(q_HBC.shape[:2], _MASKED, jnp.float32)
    state = (top_HB, jnp.zeros_like(top_HB), jnp.zeros(q_HBC.shape, jnp.float32))
    # the mask is a pass over all scores: blocks without padding go without
    whole = (keys.gap - keys.first) // block
    num_blocks = (keys.stop - keys.first + block - 1) // block
    state = lax.fori_loop(0, whole, partial(add_block, masked=False), state)
    _, sum_HB, out_HBC = lax.fori_loop(whole, num_blocks, partial(add_block, masked=True), state)
    return (out_HBC / sum_HB[..., None]).astype(v_HNC.dtype)  # the first key is always seen


def window_attention(
    q_NHC: Float[Array, "N H C"],
    k_NHC: Float[Array, "N H C"],
    v_NHC: Float[Array, "N H C"],
    window_N: Int32[Array, " N"],
    block: int,
) -> Float[Array, "N H C"]:
    """Attention over the keys of the query's own window; no window crosses a block boundary."""
    num, heads, channels = q_NHC.shape

    def attend_window(arrays: tuple[Array, Array, Array, Array]) -> Array:
        q_HBC, k_HBC, v_HBC = (jnp.moveaxis(x_BHC, 1, 0) for x_BHC in arrays[:3])
        window_B = arrays[3]
        score_HBB = jnp.einsum("hbc,hdc->hbd", q_HBC, k_HBC, preferred_element_type=jnp.float32)
        score_HBB = jnp.where(window_B[:, None] == window_B, score_HBB * channels**-0.5, _MASKED)
        weight_HBB = jax.nn.softmax(score_HBB, axis=-1).astype(v_HBC.dtype)
        # a product that gives "bhc" itself is slower by a seventh on XLA's CPU backend
        return jnp.moveaxis(jnp.einsum("hbd,hdc->hbc", weight_HBB, v_HBC), 0, 1)

    blocks = (x_NHC.reshape(-1, block, heads, channels) for x_NHC in (q_NHC, k_NHC, v_NHC))
    out_JBHC: Array = lax.map(attend_window, (*blocks, window_N.reshape(-1, block)))
    return out_JBHC.reshape(num, heads, channels)
