"""The vision encoder of Gemma 3 (arXiv:2503.19786, section 2.1). Traced.

SigLIP (arXiv:2303.15343) over pictures of one size, with learned positions; the patches of a square
are averaged, normalised and projected into one row.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmm.device.lane import Lane
from jaxmm.device.lane_attention import attend_images
from jaxmm.device.linear import linear
from jaxmm.device.norms import layer_norm, offset_rms_norm
from jaxmm.models.config import VisionConfig
from jaxmm.models.qwen2_vl.vision import NORM_EPS, Layer, normalise, zeros
from jaxmm.models.qwen3_vl.vision import tanh_gelu
from kernels_pallas.segment_attention.api import Implementation


class VisionEncoder(nnx.Module):
    """Pictures to rows; see `__call__`."""

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
        width = config.width
        self.patch_EU = zeros(dtype, width, config.patch_values)
        self.patch_E = zeros(dtype, width)
        self.positions_XE = zeros(dtype, config.picture_side**2, width)
        self.layers = nnx.List([Layer(config, dtype, tanh_gelu, axis) for _ in range(config.depth)])
        self.norm_E = zeros(dtype, width)
        self.norm_bias_E = zeros(dtype, width)
        self.row_norm_E = zeros(dtype, width)
        self.row_ED = zeros(dtype, width, config.out_width)

    def __call__(self, lane: Lane) -> Float[Array, "M D"]:
        """Encode one lane to N / merge_size^2 rows in lane order, finite for padding."""
        pixels_NU = normalise(lane.patches_NU, self.patch_EU.dtype, self.config)
        x_NE = linear(pixels_NU, self.patch_EU[...], self.patch_E[...])
        row_N, column_N = lane.coords_N2[:, 0], lane.coords_N2[:, 1]
        x_NE += self.positions_XE[...][row_N * self.config.picture_side + column_N]

        def attend(qkv_NO: Array) -> Array:
            return attend_images(
                qkv_NO,
                None,
                lane.segment_N,
                channels=self.config.head_channels,
                implementation=self.implementation,
            )

        for layer in self.layers:
            with jax.named_scope("vision_layer"):
                x_NE = layer(x_NE, attend)
        x_NE = layer_norm(x_NE, self.norm_E[...], self.norm_bias_E[...], NORM_EPS)
        square_MXE = x_NE.reshape(-1, self.config.merged_patches, self.config.width)
        mean_ME = jnp.mean(square_MXE, axis=1, dtype=jnp.float32).astype(x_NE.dtype)
        mean_ME = offset_rms_norm(mean_ME, self.row_norm_E[...], NORM_EPS)
        rows_MD = jnp.dot(mean_ME, self.row_ED[...], preferred_element_type=jnp.float32)
        return rows_MD.astype(x_NE.dtype)
