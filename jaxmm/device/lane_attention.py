"""Attention among the patches of a lane, from one projection of a layer to the other. Traced."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxmm.device.rope import Rope, rotate
from kernels_pallas.rotate_heads import rotate_packed, takes_packed
from kernels_pallas.segment_attention import kernel, windows
from kernels_pallas.segment_attention.api import (
    Implementation,
    segment_attention,
    window_attention,
)


def attend_images(
    qkv_NO: Float[Array, "N O"],
    rope: Rope | None,
    segment_N: Int32[Array, " N"],
    *,
    channels: int,
    implementation: Implementation,
) -> Float[Array, "N E"]:
    """Attention of each patch over its own image.

    Args:
        qkv_NO: Queries, keys, values, each with its heads side by side (O = 3 E).
        rope: Positions of the patches; None: nothing is rotated.
        segment_N: Which image, never falling; -1 for padding.
        channels: C, of one head.
        implementation: Of the attention.
    """
    num_patches = len(qkv_NO)
    if implementation == "pallas" and takes_packed(_num_heads(qkv_NO, channels), channels):
        tables = rope.whole_heads() if rope is not None else _no_turn(num_patches, channels)
        scale = kernel.query_scale(channels)
        q_NX, k_HNC = rotate_packed(qkv_NO, *tables, scale=scale, keys_by_head=True)
        tile, block = kernel.segment_sizes(num_patches)
        # the same for all layers, so XLA makes it once
        plan = kernel.plan_segments(segment_N, tile=tile, block=block)
        return kernel.segment_attention(
            q_NX,
            k_HNC,
            qkv_NO,
            plan,
            tile=tile,
            block=block,
            first_value_lane=2 * q_NX.shape[1],
        )
    heads = _rotated(qkv_NO, channels, rope)
    attended_NHC = segment_attention(*heads, segment_N, implementation=implementation)
    return attended_NHC.reshape(num_patches, -1)


def attend_windows(
    qkv_NO: Float[Array, "N O"],
    rope: Rope,
    window_N: Int32[Array, " N"],
    *,
    channels: int,
    block: int,
    implementation: Implementation,
) -> Float[Array, "N E"]:
    """Attention of each patch over its own window.

    Args:
        qkv_NO: Queries, keys, values, each with its heads side by side (O = 3 E).
        rope: Positions of the patches.
        window_N: Which window; none crosses a multiple of `block`; -1 for padding.
        channels: C, of one head.
        block: Patches of a full window.
        implementation: Of the attention.
    """
    packed = implementation == "pallas" and takes_packed(_num_heads(qkv_NO, channels), channels)
    if packed and block == windows.WINDOW:
        scale = kernel.query_scale(channels)
        q_NX, k_NX = rotate_packed(qkv_NO, *rope.whole_heads(), scale=scale, keys_by_head=False)
        return windows.window_attention(
            q_NX,
            k_NX,
            qkv_NO,
            window_N,
            channels=channels,
            first_value_lane=2 * q_NX.shape[1],
        )
    heads = _rotated(qkv_NO, channels, rope)
    attended_NHC = window_attention(*heads, window_N, block=block, implementation=implementation)
    return attended_NHC.reshape(len(qkv_NO), -1)


def _no_turn(num_patches: int, channels: int) -> tuple[Float[Array, "N C"], Float[Array, "N C"]]:
    """Cosines and sines that turn nothing: the kernel then parts the heads, which XLA does by
    copies, 45 MiB a layer of 4096 patches of SigLIP."""
    shape = num_patches, channels
    return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)


def _num_heads(qkv_NO: Float[Array, "N O"], channels: int) -> int:
    return qkv_NO.shape[1] // 3 // channels


def _rotated(
    qkv_NO: Float[Array, "N O"], channels: int, rope: Rope | None
) -> tuple[Float[Array, "N H C"], Float[Array, "N H C"], Float[Array, "N H C"]]:
    q_NHC, k_NHC, v_NHC = (
        x_NE.reshape(len(qkv_NO), -1, channels) for x_NE in jnp.split(qkv_NO, 3, axis=-1)
    )
    if rope is None:
        return q_NHC, k_NHC, v_NHC
    return rotate(q_NHC, rope), rotate(k_NHC, rope), v_NHC
