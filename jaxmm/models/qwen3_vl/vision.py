"""The vision encoder of Qwen3-VL (arXiv:2511.21631, section 2). Traced.

Qwen2-VL's, with learned positions that are interpolated to each image's size, a plain GELU MLP,
and deepstack: the outputs of a few layers become further levels of each row, which the decoder
adds behind its first layers (arXiv:2406.04334).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxmm.device.lane import Lane
from jaxmm.device.rope import Rope
from jaxmm.models.config import VisionConfig
from jaxmm.models.qwen2_vl.vision import (
    Layer,
    Merger,
    embed_patches,
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
        width, merged = config.width, config.width * config.merged_patches
        self.patch_EU = zeros(dtype, width, config.temporal_patch_size * config.patch_values)
        self.patch_E = zeros(dtype, width)
        self.positions_XE = zeros(dtype, config.position_side**2, width)
        self.layers = nnx.List([Layer(config, dtype, tanh_gelu, axis) for _ in range(config.depth)])
        self.merger = Merger(config, width, dtype)
        self.deepstack = nnx.List([Merger(config, merged, dtype) for _ in config.deepstack_layers])

    def __call__(self, lane: Lane) -> Float[Array, "M Z*D"]:
        """Encode one lane to N // 4 rows in lane order, level after level, finite for padding."""
        assert lane.size_N2 is not None, "learned positions need the size of each frame"
        x_NE = embed_patches(lane, self.patch_EU[...], self.config, self.patch_E[...])
        side = self.config.position_side
        x_NE += interpolate(self.positions_XE[...], side, lane.coords_N2, lane.size_N2)
        rope = Rope.of(rope_angles(lane.coords_N2, self.config.head_channels))
        attend = segment_attend(lane, rope, self.config, self.implementation)
        levels: list[Array] = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope("vision_layer"):
                x_NE = layer(x_NE, attend)
            if index in self.config.deepstack_layers:
                levels.append(self.deepstack[len(levels)](x_NE))
        return jnp.concatenate([self.merger(x_NE), *levels], axis=1)


def tanh_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The tanh approximation of GELU (arXiv:1606.08415, section 2)."""
    return jax.nn.gelu(x, approximate=True)


def interpolate(
    table_XE: Float[Array, "X E"],
    side: int,
    coords_N2: Int32[Array, "N 2"],
    size_N2: Int32[Array, "N 2"],
) -> Float[Array, "N E"]:
    """Stretch a square table of positions over frames of any size, bilinear, corners on corners.

    Args:
        table_XE: The table, X = side * side, row by row.
        side: Entries by side.
        coords_N2: Row and column of each patch.
        size_N2: Height and width of each patch's frame; 0 for padding.
    """
    steps_N2 = jnp.maximum(size_N2 - 1, 1).astype(jnp.float32)  # a frame of one reads entry 0
    at_N2 = coords_N2.astype(jnp.float32) * ((side - 1) / steps_N2)
    low_N2 = jnp.clip(jnp.floor(at_N2).astype(jnp.int32), 0, side - 1)
    high_N2 = jnp.minimum(low_N2 + 1, side - 1)
    part_N2 = at_N2 - low_N2
    sum_NE = jnp.zeros((len(coords_N2), table_XE.shape[1]), jnp.float32)
    for row_N, row_part_N in ((low_N2[:, 0], 1 - part_N2[:, 0]), (high_N2[:, 0], part_N2[:, 0])):
        for col_N, col_part_N in (
            (low_N2[:, 1], 1 - part_N2[:, 1]),
            (high_N2[:, 1], part_N2[:, 1]),
        ):
            weight_N1 = (row_part_N * col_part_N)[:, None]
            sum_NE += table_XE[row_N * side + col_N].astype(jnp.float32) * weight_N1
    return sum_NE.astype(table_XE.dtype)
