"""Segment and window attention in plain jax.numpy, for CPU and GPU. Traced.

Online softmax (arXiv:2205.14135) over blocks: for each block of queries a loop runs over the key
blocks from the first to the last that holds a patch of the same segments, so the cost follows the
images and nothing of size N x N exists. Scores and sums are float32.

          keys ->   . . . . . . . .        image 0 | image 1 | padding
    queries 0 0     # # . . . . . .        one loop runs over the #
            0 1     # # # # # # . .        a block of two images covers both, masked inside
            1 1     . . # # # # . .
            - -     . . . . . . . .        padding: no key block at all, zeros
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

_BLOCK = 256
"""Queries, and keys, of one step: scores of 256 KB a head stay in cache, matmuls run near peak."""
_SMALL_LANE = 1024
"""Up to this many patches blocks are half as large: images are small, and edges cost more."""
_UNUSED = (1 << 31) - 1
"""Above every segment."""
_MASKED = -1e30
"""Score of a key that the query does not see; finite, so that no infinity meets another."""


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
        segment_N: -1 for padding; the others never fall.
        block: Queries of one loop and keys of one step of it; None chooses.
    """
    num = len(q_NHC)
    block = block or (_BLOCK if num > _SMALL_LANE else _BLOCK // 2)
    pad = -num % block
    segment_N = jnp.pad(segment_N, (0, pad), constant_values=-1)
    q_HNC, k_HNC, v_HNC = (
        jnp.pad(jnp.moveaxis(x_NHC, 1, 0), ((0, 0), (0, pad), (0, 0)))
        for x_NHC in (q_NHC, k_NHC, v_NHC)
    )
    first_J, stop_J = _key_blocks(segment_N.reshape(-1, block))

    def attend_block(j: Array, out_HNC: Array) -> Array:
        q_HBC = lax.dynamic_slice_in_dim(q_HNC, j * block, block, 1)
        segment_B = lax.dynamic_slice_in_dim(segment_N, j * block, block)
        key_blocks = (first_J[j], stop_J[j])
        out_HBC = _attend(q_HBC, segment_B, k_HNC, v_HNC, segment_N, key_blocks)
        return lax.dynamic_update_slice_in_dim(out_HNC, out_HBC, j * block, 1)

    out_HNC = lax.fori_loop(0, len(first_J), attend_block, jnp.zeros_like(q_HNC))
    return jnp.moveaxis(out_HNC[:, :num], 0, 1)


def _key_blocks(segment_JB: Array) -> tuple[Array, Array]:
    """For each query block the half-open range of key blocks that hold one of its segments."""
    # a block of padding gets an empty range of segments, from _UNUSED to -1
    low_J = jnp.where(segment_JB < 0, _UNUSED, segment_JB).min(axis=1)
    high_J = segment_JB.max(axis=1)
    shared_JJ = (low_J <= high_J[:, None]) & (high_J >= low_J[:, None])
    first_J = jnp.argmax(shared_JJ, axis=1)
    stop_J = len(low_J) - jnp.argmax(shared_JJ[:, ::-1], axis=1)
    return first_J, jnp.where(shared_JJ.any(axis=1), stop_J, first_J)


def _attend(
    q_HBC: Array,
    segment_B: Array,
    k_HNC: Array,
    v_HNC: Array,
    segment_N: Array,
    key_blocks: tuple[Array, Array],
) -> Array:
    """One block of queries against a range of key blocks; J stands for the keys of one."""
    block, scale = len(segment_B), q_HBC.shape[-1] ** -0.5

    def add_block(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top_HB, sum_HB, out_HBC = state
        k_HJC = lax.dynamic_slice_in_dim(k_HNC, j * block, block, 1)
        v_HJC = lax.dynamic_slice_in_dim(v_HNC, j * block, block, 1)
        segment_J = lax.dynamic_slice_in_dim(segment_N, j * block, block)
        score_HBJ = jnp.einsum("hbc,hjc->hbj", q_HBC, k_HJC, preferred_element_type=jnp.float32)
        score_HBJ = jnp.where(segment_B[:, None] == segment_J, score_HBJ * scale, _MASKED)
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
    _, sum_HB, out_HBC = lax.fori_loop(*key_blocks, add_block, state)
    out_HBC = out_HBC / jnp.maximum(sum_HB, 1e-30)[..., None]  # a block of padding has no sum
    return jnp.where(segment_B[:, None] < 0, 0.0, out_HBC).astype(v_HNC.dtype)


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
        return jnp.einsum("hbd,hdc->bhc", weight_HBB, v_HBC)

    blocks = (x_NHC.reshape(-1, block, heads, channels) for x_NHC in (q_NHC, k_NHC, v_NHC))
    out_JBHC: Array = lax.map(attend_window, (*blocks, window_N.reshape(-1, block)))
    return out_JBHC.reshape(num, heads, channels)
