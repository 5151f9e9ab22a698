"""The vision encoder of Qwen2-VL (arXiv:2409.12191, section 2.1). Traced.

A ViT over 14 x 14 patches with two-dimensional rope; images of any size share a lane and attend
each within itself; four neighbouring patches are merged into one row of the decoder's width.
Weights are [out, in], as in the files.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from jaxmm.device.lane import Lane
from jaxmm.device.lane_attention import attend_images
from jaxmm.device.linear import linear, summed_linear
from jaxmm.device.norms import layer_norm
from jaxmm.device.rope import Rope
from jaxmm.models.config import VisionConfig
from kernels_pallas.segment_attention.api import Implementation

NORM_EPS = 1e-6
ROPE_THETA = 10000.0

Attend = Callable[[Array], Array]
"""The fused projection [N, 3 O] to the attended values [N, O], of the heads that a chip has."""


class VisionEncoder(nnx.Module):
    """Patches of several images to rows; see `__call__`."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        implementation: Implementation = "portable",
        axis: str | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        self.config = config
        self.implementation = implementation
        self.patch_EU = zeros(dtype, config.width, config.temporal_patch_size * config.patch_values)
        self.layers = nnx.List(
            [Layer(config, dtype, quick_gelu, axis) for _ in range(config.depth)]
        )
        self.merger = Merger(config, config.width, dtype)

    def __call__(self, lane: Lane) -> Float[Array, "M D"]:
        """Encode one lane to N // 4 rows in lane order, finite for padding."""
        x_NE = embed_patches(lane, self.patch_EU[...], self.config)
        rope = Rope.of(rope_angles(lane.coords_N2, self.config.head_channels))
        attend = segment_attend(lane, rope, self.config, self.implementation)

        for layer in self.layers:
            with jax.named_scope("vision_layer"):
                x_NE = layer(x_NE, attend)
        return self.merger(x_NE)


class Layer(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(
        self,
        config: VisionConfig,
        dtype: DTypeLike,
        activation: Callable[[Array], Array],
        axis: str | None,
    ):
        self.activation = activation
        self.axis = axis
        width, mlp_width = config.width, config.mlp_width
        self.attn_norm_E = zeros(dtype, width)
        self.attn_norm_bias_E = zeros(dtype, width)
        self.qkv_3OE = zeros(dtype, 3, width, width)
        self.qkv_3O = zeros(dtype, 3, width)
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
        attended_NO = attend(fused_heads(normed_NE, self.qkv_3OE[...], self.qkv_3O[...]))
        x_NE = x_NE + summed_linear(attended_NO, self.out_EO[...], self.out_E[...], self.axis)
        normed_NE = layer_norm(x_NE, self.mlp_norm_E[...], self.mlp_norm_bias_E[...], NORM_EPS)
        up_NF = self.activation(linear(normed_NE, self.up_FE[...], self.up_F[...]))
        return x_NE + summed_linear(up_NF, self.down_EF[...], self.down_E[...], self.axis)


class Merger(nnx.Module):
    """Four neighbouring patches to one row, normalised each, or together by a wider norm."""

    def __init__(self, config: VisionConfig, norm_width: int, dtype: DTypeLike):
        self.norm_E = zeros(dtype, norm_width)
        self.norm_bias_E = zeros(dtype, norm_width)
        merged = config.width * config.merged_patches
        self.hidden_XX = zeros(dtype, merged, merged)
        self.hidden_X = zeros(dtype, merged)
        self.out_DX = zeros(dtype, config.out_width, merged)
        self.out_D = zeros(dtype, config.out_width)

    def __call__(self, x_NE: Float[Array, "N E"]) -> Float[Array, "M D"]:
        x_NE = x_NE.reshape(-1, self.norm_E.shape[0])
        normed_NE = layer_norm(x_NE, self.norm_E[...], self.norm_bias_E[...], NORM_EPS)
        return merge(
            normed_NE, self.hidden_XX[...], self.hidden_X[...], self.out_DX[...], self.out_D[...]
        )


def zeros(dtype: DTypeLike, *shape: int) -> nnx.Param[Array]:
    """A parameter yet to be loaded; under `nnx.eval_shape` it takes no memory."""
    return nnx.Param(jnp.zeros(shape, dtype))


def fused_heads(
    x_NE: Float[Array, "N E"], qkv_3OE: Float[Array, "3 O E"], qkv_3O: Float[Array, "3 O"]
) -> Float[Array, "N 3*O"]:
    """Queries, keys and values, each with the heads that a chip has side by side."""
    return linear(x_NE, qkv_3OE.reshape(-1, qkv_3OE.shape[-1]), qkv_3O.reshape(-1))


def segment_attend(
    lane: Lane, rope: Rope, config: VisionConfig, implementation: Implementation
) -> Attend:
    """Attention of each patch over its own frame."""

    def attend(qkv_NO: Array) -> Array:
        return attend_images(
            qkv_NO,
            rope,
            lane.segment_N,
            channels=config.head_channels,
            implementation=implementation,
        )

    return attend


def embed_patches(
    lane: Lane,
    patch_EU: Float[Array, "E 2*U"],
    config: VisionConfig,
    bias_E: Float[Array, " E"] | None = None,
) -> Float[Array, "N E"]:
    """Normalise pixels and project them.

    The projection takes the two frames of a time step. A still picture is the same frame twice,
    so for a lane without video its two halves are added up: half the work, and half the pixels
    to send.
    """
    shape = (config.width, config.in_channels, config.temporal_patch_size, config.patch_size**2)
    half_TEU = jnp.moveaxis(patch_EU.reshape(shape), 2, 0)
    half_TEU = half_TEU.reshape(config.temporal_patch_size, config.width, config.patch_values)

    def still() -> Array:
        frame_EU = half_TEU.sum(axis=0, dtype=jnp.float32).astype(patch_EU.dtype)
        return linear(normalise(lane.patches_NU, patch_EU.dtype, config), frame_EU, bias_E)

    def moving() -> Array:
        first_NU, second_NU = (
            normalise(x_NU, patch_EU.dtype, config) for x_NU in (lane.patches_NU, lane.later_NU)
        )
        return linear(first_NU, half_TEU[0], bias_E) + linear(second_NU, half_TEU[1])

    return lax.cond(lane.any_later, moving, still)


def normalise(
    patches_NU: UInt8[Array, "N U"], dtype: DTypeLike, config: VisionConfig
) -> Float[Array, "N U"]:
    """Pixels of zero mean and unit variance, by channel."""
    mean_U = jnp.repeat(jnp.array(config.image_mean, jnp.float32), config.patch_size**2)
    std_U = jnp.repeat(jnp.array(config.image_std, jnp.float32), config.patch_size**2)
    pixels_NU = (patches_NU.astype(jnp.float32) / 255.0 - mean_U) / std_U
    return pixels_NU.astype(dtype)


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
