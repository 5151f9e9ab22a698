"""Toy: one linear layer over patches, one over the four patches of a row. Traced."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmm.device.lane import Lane
from jaxmm.device.linear import linear
from jaxmm.models.config import VisionConfig
from jaxmm.models.qwen2_vl.vision import zeros
from kernels_pallas.segment_attention.api import Implementation


class VisionEncoder(nnx.Module):
    """Patches to rows, each patch for itself."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        implementation: Implementation = "portable",
        axis: str | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        self.patch_EU = zeros(dtype, config.width, config.patch_values)
        self.merge_DX = zeros(dtype, config.out_width, 4 * config.width)

    def __call__(self, lane: Lane) -> Float[Array, "M D"]:
        pixels_NU = lane.patches_NU.astype(self.patch_EU.dtype) / 255
        x_NE = linear(pixels_NU, self.patch_EU[...])
        return linear(x_NE.reshape(-1, self.merge_DX.shape[1]), self.merge_DX[...])
