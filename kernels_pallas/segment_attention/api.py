"""Attention within segments and within windows of a lane of patches. Traced.

The caller says which implementation runs; nothing falls back in silence.
"""

from typing import Literal

from jaxtyping import Array, Float, Int32

from kernels_pallas.segment_attention import portable, reference

Implementation = Literal["portable", "reference"]


def segment_attention(
    q_NHC: Float[Array, "N H C"],
    k_NHC: Float[Array, "N H C"],
    v_NHC: Float[Array, "N H C"],
    segment_N: Int32[Array, " N"],
    *,
    implementation: Implementation,
) -> Float[Array, "N H C"]:
    """Softmax attention of each patch over all patches of its segment, scaled by C^-0.5.

    Args:
        q_NHC: Queries, not scaled.
        k_NHC: Keys.
        v_NHC: Values.
        segment_N: Segment of each patch, 0 to N - 1, or -1 for padding. Padding may stand
            anywhere; the others never fall from one patch to the next.
        implementation: portable: blocks that follow the segments; reference: an N x N array.

    Returns:
        In the dtype of the inputs, zeros for padding.
    """
    match implementation:
        case "portable":
            return portable.segment_attention(q_NHC, k_NHC, v_NHC, segment_N)
        case "reference":
            return reference.segment_attention(q_NHC, k_NHC, v_NHC, segment_N)


def window_attention(
    q_NHC: Float[Array, "N H C"],
    k_NHC: Float[Array, "N H C"],
    v_NHC: Float[Array, "N H C"],
    window_N: Int32[Array, " N"],
    *,
    implementation: Implementation,
    block: int = 64,
) -> Float[Array, "N H C"]:
    """Softmax attention of each patch over the patches of its window, scaled by C^-0.5.

    Args:
        q_NHC: Queries, not scaled.
        k_NHC: Keys.
        v_NHC: Values.
        window_N: Window of each patch, 0 to N - 1, or -1 for padding; a number means one window
            only within a block of `block` patches, and no window crosses such a block.
        implementation: portable: one block at a time; reference: an N x N array.
        block: Patches of a block; N is a multiple of it.

    Returns:
        In the dtype of the inputs, any finite values for padding.

    Raises:
        ValueError: N is no multiple of `block`.
    """
    if len(window_N) % block:
        raise ValueError(f"a lane of {len(window_N)} patches is no multiple of block={block}")
    match implementation:
        case "portable":
            return portable.window_attention(q_NHC, k_NHC, v_NHC, window_N, block)
        case "reference":
            return reference.window_attention(q_NHC, k_NHC, v_NHC, window_N, block)
