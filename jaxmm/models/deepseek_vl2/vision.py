"""The vision encoder of DeepSeek-VL2 (arXiv:2412.10302, section 3.1). Traced.

SigLIP (arXiv:2303.15343) over square tiles, each for itself, with learned positions; four
neighbouring patches become one row. Tile t has the patches from t * side^2 on: `pack_tiles`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmm.device.lane import Lane
from jaxmm.device.lane_attention import attend_images
from jaxmm.device.linear import linear
from jaxmm.device.norms import layer_norm
from jaxmm.models.config import VisionConfig
from jaxmm.models.qwen2_vl.vision import NORM_EPS, Layer, normalise, zeros
from jaxmm.models.qwen3_vl.vision import tanh_gelu
from kernels_pallas.segment_attention.api import Implementation


class VisionEncoder(nnx.Module):
    """Tiles of several pictures to rows; see `__call__`."""

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
        width, out_width = config.width, config.out_width
        self.patch_EU = zeros(dtype, width, config.patch_values)
        self.patch_E = zeros(dtype, width)
        self.positions_1XE = zeros(dtype, 1, config.tile_side**2, width)
        self.layers = nnx.List([Layer(config, dtype, tanh_gelu, axis) for _ in range(config.depth)])
        self.norm_E = zeros(dtype, width)
        self.norm_bias_E = zeros(dtype, width)
        self.hidden_DX = zeros(dtype, out_width, width * config.merged_patches)
        self.hidden_D = zeros(dtype, out_width)
        self.out_DD = zeros(dtype, out_width, out_width)
        self.out_D = zeros(dtype, out_width)
        self.line_end_D = zeros(dtype, out_width)
        self.separator_D = zeros(dtype, out_width)

    def __call__(self, lane: Lane) -> Float[Array, "M D"]:
        """Encode one lane; finite for padding.

        Returns:
            Rows of each tile, line by line; then as many line ends as tiles have lines; then a
            separator for every two tiles.
        """
        x_NE = self._embed(lane)

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
        x_ML = unfold(x_NE, self.config.tile_side)
        hidden_MD = linear(x_ML, self.hidden_DX[...], self.hidden_D[...])
        hidden_MD = jax.nn.gelu(hidden_MD, approximate=False)
        return self._with_marks(linear(hidden_MD, self.out_DD[...], self.out_D[...]))

    def _embed(self, lane: Lane) -> Float[Array, "N E"]:
        """Patches, and where in their tile they are."""
        pixels_NU = normalise(lane.patches_NU, self.patch_EU.dtype, self.config)
        x_NE = linear(pixels_NU, self.patch_EU[...], self.patch_E[...])
        positions_XE = self.positions_1XE[0]
        tiles, rest = divmod(len(x_NE), len(positions_XE))
        positions_NE = jnp.tile(positions_XE, (tiles, 1))
        return x_NE + jnp.pad(positions_NE, ((0, rest), (0, 0)))

    def _with_marks(self, x_MD: Float[Array, "M D"]) -> Float[Array, "M2 D"]:
        """Rows, with what stands at the ends of lines and between views behind them."""
        lines = -(-self.config.tile_side // self.config.merge_size)
        tiles = len(x_MD) // lines**2
        shape = (tiles * lines, self.config.out_width)
        line_ends_XD = jnp.broadcast_to(self.line_end_D[...], shape)
        separators_XD = jnp.broadcast_to(self.separator_D[...], (tiles // 2, shape[1]))
        return jnp.concatenate([x_MD, line_ends_XD, separators_XD])


def unfold(x_NE: Float[Array, "N E"], side: int) -> Float[Array, "M X"]:
    """Lay the patches of each 2 x 2 block side by side, channel by channel: X = 4 E.

    A tile of an odd number of patches by side is filled up with zeros at the right and bottom.

    Args:
        x_NE: Tiles one behind the other, each in raster order, and what is no whole tile.
        side: Patches by side of a tile.
    """
    tiles, width, lines = len(x_NE) // side**2, x_NE.shape[1], -(-side // 2)
    x_JYXE = x_NE[: tiles * side**2].reshape(tiles, side, side, width)
    rest = 2 * lines - side
    x_JYXE = jnp.pad(x_JYXE, ((0, 0), (0, rest), (0, rest), (0, 0)))
    blocks = x_JYXE.reshape(tiles, lines, 2, lines, 2, width)
    return blocks.transpose(0, 1, 3, 5, 2, 4).reshape(tiles * lines**2, 4 * width)
