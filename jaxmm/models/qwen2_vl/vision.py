"""The vision encoder of Qwen2-VL (arXiv:2409.12191, section 2.1). Traced.

A ViT over 14 x 14 patches with two-dimensional rope; images of any size share a lane and attend
each within itself; four neighbouring patches are merged into one row of the decoder's width.
Weights are [out, in], as in the files.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from jaxmm.device.lane_attention import attend_images
from jaxmm.device.linear import linear
from jaxmm.device.norms import layer_norm
from jaxmm.device.rope import Rope
from jaxmm.models.config import VisionConfig
from kernels_pallas.segment_attention.api import Implementation

NORM_EPS = 1e-6
ROPE_THETA = 10000.0

Attend = Callable[[Array, int], Array]
"""The fused projection [N, O] and its number of heads to the attended values [N, E]."""


class VisionEncoder(nnx.Module):
    """Patches of several images to rows; see `__call__`."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        implementation: Implementation = "portable",
        dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        self.implementation = implementation
        self.patch_EU = zeros(dtype, config.width, config.temporal_patch_size * config.patch_values)
        self.layers = nnx.List([_Layer(config, dtype) for _ in range(config.depth)])
        self.merger = _Merger(config, dtype)

    def __call__(
        self,
        patches_NU: UInt8[Array, "N U"],
        coords_N2: Int32[Array, "N 2"],
        segment_N: Int32[Array, " N"],
        window_N: Int32[Array, " N"] | None = None,
    ) -> Float[Array, "M D"]:
        """Encode one lane.

        Args:
            patches_NU: Pixels of one frame by channel, y, x; four consecutive patches to a row.
            coords_N2: Row and column of each patch in its image.
            segment_N: Which image, never falling; -1 for padding.
            window_N: Not used: this family has no windows.

        Returns:
            N // 4 rows in lane order, finite for padding.
        """
        x_NE = embed_patches(patches_NU, self.patch_EU[...], self.config)
        rope = Rope.of(rope_angles(coords_N2, self.config.head_channels))

        def attend(qkv_NO: Array, num_heads: int) -> Array:
            return attend_images(
                qkv_NO, rope, segment_N, num_heads=num_heads, implementation=self.implementation
            )

        for layer in self.layers:
            with jax.named_scope("vision_layer"):
                x_NE = layer(x_NE, attend)
        return self.merger(x_NE)


class _Layer(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        width, mlp_width = config.width, config.mlp_width
        self.num_heads = config.num_heads
        self.attn_norm_E = zeros(dtype, width)
        self.attn_norm_bias_E = zeros(dtype, width)
        self.qkv_OE = zeros(dtype, 3 * width, width)
        self.qkv_O = zeros(dtype, 3 * width)
        self.out_EO = zeros(dtype, width, width)
        self.out_E = zeros(dtype, width)
        self.mlp_norm_E = zeros(dtype, width)
        self.mlp_norm_bias_E = zeros(dtype, width)
        self.up_FE = zeros(dtype, mlp_width, width)
        self.up_F = zeros(dtype, mlp_width)
        self.down_EF = zeros(dtype, width, mlp_width)
        self.down_E = zeros(dtype, width)

    def __call__(self, x_NE: Float[Array, "N E"], attend: Attend) -> Float[Array, "N E"]:
        normed_NE = layer_norm(x_NE, self.attn_norm_E[...], self.attn_norm_bias_E[...], NORM_EPS)
        qkv_NO = linear(normed_NE, self.qkv_OE[...], self.qkv_O[...])
        attended_NO = attend(qkv_NO, self.num_heads)
        x_NE = x_NE + linear(attended_NO, self.out_EO[...], self.out_E[...])
        normed_NE = layer_norm(x_NE, self.mlp_norm_E[...], self.mlp_norm_bias_E[...], NORM_EPS)
        up_NF = quick_gelu(linear(normed_NE, self.up_FE[...], self.up_F[...]))
        return x_NE + linear(up_NF, self.down_EF[...], self.down_E[...])


class _Merger(nnx.Module):
    """Four neighbouring patches to one row."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        self.norm_E = zeros(dtype, config.width)
        self.norm_bias_E = zeros(dtype, config.width)
        merged = config.width * config.merged_patches
        self.hidden_XX = zeros(dtype, merged, merged)
        self.hidden_X = zeros(dtype, merged)
        self.out_DX = zeros(dtype, config.out_width, merged)
        self.out_D = zeros(dtype, config.out_width)

    def __call__(self, x_NE: Float[Array, "N E"]) -> Float[Array, "M D"]:
        normed_NE = layer_norm(x_NE, self.norm_E[...], self.norm_bias_E[...], NORM_EPS)
        return merge(
            normed_NE, self.hidden_XX[...], self.hidden_X[...], self.out_DX[...], self.out_D[...]
        )


def zeros(dtype: DTypeLike, *shape: int) -> nnx.Param[Array]:
    """A parameter yet to be loaded; under `nnx.eval_shape` it takes no memory."""
    return nnx.Param(jnp.zeros(shape, dtype))


def embed_patches(
    patches_NU: UInt8[Array, "N U"], patch_EU: Float[Array, "E 2*U"], config: VisionConfig
) -> Float[Array, "N E"]:
    """Normalise pixels and project them.

    The projection takes two frames and an image is the same frame twice, so its two halves are
    added up instead: half the work, and half the pixels to send.
    """
    dtype = patch_EU.dtype
    shape = (config.width, config.in_channels, config.temporal_patch_size, config.patch_size**2)
    frame_EU = patch_EU.reshape(shape).sum(axis=2, dtype=jnp.float32)
    frame_EU = frame_EU.reshape(config.width, config.patch_values).astype(dtype)
    mean_U = jnp.repeat(jnp.array(config.image_mean, jnp.float32), config.patch_size**2)
    std_U = jnp.repeat(jnp.array(config.image_std, jnp.float32), config.patch_size**2)
    pixels_NU = (patches_NU.astype(jnp.float32) / 255.0 - mean_U) / std_U
    return linear(pixels_NU.astype(dtype), frame_EU)


def rope_angles(coords_N2: Int32[Array, "N 2"], channels: int) -> Float[Array, "N X"]:
    """Angles, X = C/2: of rows in the first half of the frequencies, of columns in the second."""
    exponent = jnp.arange(0, channels // 2, 2, dtype=jnp.float32) / (channels // 2)
    angle_N2X = coords_N2.astype(jnp.float32)[:, :, None] * ROPE_THETA**-exponent
    return angle_N2X.reshape(len(coords_N2), -1)


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sigmoid approximation of GELU (arXiv:1606.08415, section 2)."""
    return x * jax.nn.sigmoid(1.702 * x)


def merge(
    x_NE: Float[Array, "N E"],
    hidden_XX: Float[Array, "X X"],
    hidden_X: Float[Array, " X"],
    out_DX: Float[Array, "D X"],
    out_D: Float[Array, " D"],
) -> Float[Array, "M D"]:
    """Lay the patches of a row side by side and project them."""
    x_MX = x_NE.reshape(-1, len(hidden_X))
    x_MX = jax.nn.gelu(linear(x_MX, hidden_XX, hidden_X), approximate=False)
    return linear(x_MX, out_DX, out_D)
