"""The vision encoder of Qwen2.5-VL (arXiv:2502.13923, section 2.1.1). Traced.

Qwen2-VL's, with RMS norms, a gated MLP, and attention over windows of 8 x 8 patches in all but a
few layers. The host packs patches so that no window crosses a block of 64, so nothing is
reordered here.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmm.device.lane import Lane
from jaxmm.device.lane_attention import attend_windows
from jaxmm.device.linear import gated_linear, summed_linear
from jaxmm.device.norms import rms_norm
from jaxmm.device.rope import Rope
from jaxmm.models.config import VisionConfig
from jaxmm.models.qwen2_vl.vision import (
    NORM_EPS,
    Attend,
    embed_patches,
    fused_heads,
    merge,
    rope_angles,
    segment_attend,
    zeros,
)
from kernels_pallas.segment_attention.api import Implementation


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
        self.layers = nnx.List([_Layer(config, dtype, axis) for _ in range(config.depth)])
        self.merger = _Merger(config, dtype)

    def __call__(self, lane: Lane) -> Float[Array, "M D"]:
        """Encode one lane to N // 4 rows in lane order, finite for padding."""
        x_NE = embed_patches(lane, self.patch_EU[...], self.config)
        rope = Rope.of(rope_angles(lane.coords_N2, self.config.head_channels))
        attend_image = segment_attend(lane, rope, self.config, self.implementation)
        window_N = lane.window_N
        assert window_N is not None, "this family has windows"

        def attend_window(qkv_NO: Array) -> Array:
            return attend_windows(
                qkv_NO,
                rope,
                window_N,
                channels=self.config.head_channels,
                block=self.config.window_patches,
                implementation=self.implementation,
            )

        for index, layer in enumerate(self.layers):
            full = index in self.config.full_attention_layers
            with jax.named_scope("vision_layer"):
                x_NE = layer(x_NE, attend_image if full else attend_window)
        return self.merger(x_NE)


class _Layer(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike, axis: str | None):
        width, mlp_width = config.width, config.mlp_width
        self.axis = axis
        self.attn_norm_E = zeros(dtype, width)
        self.qkv_3OE = zeros(dtype, 3, width, width)
        self.qkv_3O = zeros(dtype, 3, width)
        self.out_EO = zeros(dtype, width, width)
        self.out_E = zeros(dtype, width)
        self.mlp_norm_E = zeros(dtype, width)
        self.gate_up_2FE = zeros(dtype, 2, mlp_width, width)
        self.gate_up_2F = zeros(dtype, 2, mlp_width)
        self.down_EF = zeros(dtype, width, mlp_width)
        self.down_E = zeros(dtype, width)

    def __call__(self, x_NE: Float[Array, "N E"], attend: Attend) -> Float[Array, "N E"]:
        normed_NE = rms_norm(x_NE, self.attn_norm_E[...], NORM_EPS)
        attended_NO = attend(fused_heads(normed_NE, self.qkv_3OE[...], self.qkv_3O[...]))
        x_NE = x_NE + summed_linear(attended_NO, self.out_EO[...], self.out_E[...], self.axis)
        normed_NE = rms_norm(x_NE, self.mlp_norm_E[...], NORM_EPS)
        gated_NF = gated_linear(normed_NE, self.gate_up_2FE[...], self.gate_up_2F[...])
        return x_NE + summed_linear(gated_NF, self.down_EF[...], self.down_E[...], self.axis)


class _Merger(nnx.Module):
    """Four neighbouring patches to one row."""

    def __init__(self, config: VisionConfig, dtype: DTypeLike):
        self.norm_E = zeros(dtype, config.width)
        merged = config.width * config.merged_patches
        self.hidden_XX = zeros(dtype, merged, merged)
        self.hidden_X = zeros(dtype, merged)
        self.out_DX = zeros(dtype, config.out_width, merged)
        self.out_D = zeros(dtype, config.out_width)

    def __call__(self, x_NE: Float[Array, "N E"]) -> Float[Array, "M D"]:
        normed_NE = rms_norm(x_NE, self.norm_E[...], NORM_EPS)
        return merge(
            normed_NE, self.hidden_XX[...], self.hidden_X[...], self.out_DX[...], self.out_D[...]
        )
