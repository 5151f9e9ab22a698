"""Attention within segments and within windows of a lane of patches. Traced.

The caller says which implementation runs; "native" is "portable" for heads that it does not take.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.segment_attention import kernel, portable, reference, windows

Implementation = Literal["portable", "native", "pallas", "reference"]


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
        implementation: portable: blocks that follow the segments; native: the kernel for CPUs,
            portable for heads that it does not take; pallas: the TPU kernel; reference: an N x N
            array.

    Returns:
        In the dtype of the inputs, zeros for padding.

    Raises:
        ValueError: "pallas" and an N that is no multiple of 128.
    """
    match implementation:
        case "pallas":
            tile, block = kernel.segment_sizes(len(segment_N))
            # the same for all layers, so XLA makes it once
            plan = kernel.plan_segments(segment_N, tile=tile, block=block)
            q_NX, v_NX = (x_NHC.reshape(len(x_NHC), -1) for x_NHC in (_scaled(q_NHC), v_NHC))
            k_HNC = jnp.moveaxis(k_NHC, 1, 0)
            out_NX = kernel.segment_attention(q_NX, k_HNC, v_NX, plan, tile=tile, block=block)
            return out_NX.reshape(q_NHC.shape)
        case "native" if _native_takes(q_NHC, None):
            return _native(q_NHC, k_NHC, v_NHC, segment_N, None)
        case "portable" | "native":
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
        implementation: portable: one block at a time; the others as in `segment_attention`.
        block: Patches of a block; N is a multiple of it.

    Returns:
        In the dtype of the inputs, any finite values for padding.

    Raises:
        ValueError: N is no multiple of `block`; or "pallas" and other blocks than of 64 patches,
            or an N that is no multiple of 128.
    """
    if len(window_N) % block:
        raise ValueError(f"a lane of {len(window_N)} patches is no multiple of block={block}")
    match implementation:
        case "pallas":
            if block != windows.WINDOW:
                raise ValueError(f"windows of {block} patches; the kernel has {windows.WINDOW}")
            num, _, channels = q_NHC.shape
            q_NX, k_NX, v_NX = (x_NHC.reshape(num, -1) for x_NHC in (_scaled(q_NHC), k_NHC, v_NHC))
            out_NX = windows.window_attention(q_NX, k_NX, v_NX, window_N, channels=channels)
            return out_NX.reshape(q_NHC.shape)
        case "native" if _native_takes(q_NHC, block):
            return _native(q_NHC, k_NHC, v_NHC, window_N, block)
        case "portable" | "native":
            return portable.window_attention(q_NHC, k_NHC, v_NHC, window_N, block)
        case "reference":
            return reference.window_attention(q_NHC, k_NHC, v_NHC, window_N, block)


def _native_takes(q_NHC: Array, block: int | None) -> bool:
    from kernels_pallas.native import patches

    return q_NHC.dtype == jnp.float32 and patches.takes(q_NHC.shape, block)


def _native(q_NHC: Array, k_NHC: Array, v_NHC: Array, id_N: Array, block: int | None) -> Array:
    from kernels_pallas.native import patches

    return patches.attend_patches(q_NHC, k_NHC, v_NHC, id_N, block=block)


def _scaled(q_NHC: Float[Array, "N H C"]) -> Float[Array, "N H C"]:
    """Queries as the kernels take them; XLA joins it to the rotation before it."""
    scale = kernel.query_scale(q_NHC.shape[2])
    return (q_NHC.astype(jnp.float32) * scale).astype(q_NHC.dtype)
