"""The Qwen2 text decoder with M-RoPE (Qwen2-VL, arXiv:2409.12191 §2.1). Traced."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from jaxmm.device.image_rows import ImageRows
from jaxmm.device.kv import KVPages, PagedAttention
from jaxmm.device.linear import gated_linear, linear
from jaxmm.device.norms import rms_norm
from jaxmm.device.rope import Rope
from jaxmm.models.config import TextConfig


class TextLayer(nnx.Module):
    """Attention and MLP, each on a normalised input, each added to the residual."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        d, f = config.width, config.mlp_width
        o = (config.num_heads + 2 * config.num_kv_heads) * config.head_channels
        # rows of qkv by KV head: its query heads, its key, its value; so they split over chips
        self.attn_norm_D = nnx.Param(jnp.ones((d,), dtype))
        self.qkv_OD = nnx.Param(jnp.zeros((o, d), dtype))
        self.qkv_O = nnx.Param(jnp.zeros((o,), dtype))
        self.out_DO = nnx.Param(jnp.zeros((d, config.num_heads * config.head_channels), dtype))
        self.mlp_norm_D = nnx.Param(jnp.ones((d,), dtype))
        self.gate_up_2FD = nnx.Param(jnp.zeros((2, f, d), dtype))
        self.down_DF = nnx.Param(jnp.zeros((d, f), dtype))
        self.config = config

    def __call__(
        self,
        hidden_TD: Float[Array, "T D"],
        rope: Rope,
        pages: Float[Array, "P ..."],
        attention: PagedAttention,
    ) -> tuple[Float[Array, "X D"], Float[Array, "P ..."]]:
        """One layer; returns the residual and the layer's pages with the step's KV written."""
        config = self.config
        with jax.named_scope("attention"):
            x_TD = rms_norm(hidden_TD, self.attn_norm_D[...], config.rms_eps)
            qkv_TO = linear(x_TD, self.qkv_OD[...], self.qkv_O[...])
            attended_TO, pages = attention(qkv_TO, rope, pages, channels=config.head_channels)
            hidden_TD, attended_TO = attention.kept(hidden_TD, attended_TO)
            hidden_TD += linear(attended_TO, self.out_DO[...])
        with jax.named_scope("mlp"):
            x_TD = rms_norm(hidden_TD, self.mlp_norm_D[...], config.rms_eps)
            hidden_TD += gated_mlp(x_TD, self.gate_up_2FD[...], self.down_DF[...])
        return hidden_TD, pages


class TextDecoder(nnx.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        self.embed_VD = nnx.Param(jnp.zeros((config.vocab_size, config.width), dtype))
        self.layers = nnx.List([TextLayer(config, dtype) for _ in range(config.num_layers)])
        self.norm_D = nnx.Param(jnp.ones((config.width,), dtype))
        if not config.tied:
            self.head_VD = nnx.Param(jnp.zeros((config.vocab_size, config.width), dtype))
        self.config = config

    def embed(self, ids_T: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Embeddings of ids, all within the vocabulary."""
        return self.embed_VD[...][ids_T]

    def __call__(
        self,
        hidden_TD: Float[Array, "T D"],
        positions_AT: Int32[Array, "3 T"],
        kv_pages: KVPages,
        attention: PagedAttention,
        rows: ImageRows,
    ) -> tuple[Float[Array, "X D"], KVPages]:
        """Run the layers.

        Args:
            hidden_TD: Embeddings, image rows in place.
            positions_AT: M-RoPE positions (time, height, width).
            kv_pages: Each layer's pages.
            attention: Writes the step's KV and attends.
            rows: Not used: image rows of this family have no levels beyond the embedding.

        Returns:
            The normalised output of the tokens that `attention` keeps, and the pages.
        """
        del rows
        config = self.config
        rope = Rope.of(mrope_angles(positions_AT, config))
        written = []
        for index, (layer, pages) in enumerate(zip(self.layers, kv_pages, strict=True)):
            of_layer = attention.of_layer(index, config.num_layers)
            hidden_TD, pages = layer(hidden_TD, rope, pages, of_layer)
            written.append(pages)
        return rms_norm(hidden_TD, self.norm_D[...], config.rms_eps), tuple(written)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Float32 logits of some rows of the output."""
        head_VD = self.embed_VD if self.config.tied else self.head_VD
        return linear(hidden_BD, head_VD[...]).astype(jnp.float32)


def gated_mlp(
    x_TD: Float[Array, "T D"], gate_up_2FD: Float[Array, "2 F D"], down_DF: Float[Array, "D F"]
) -> Float[Array, "T D"]:
    """SwiGLU (arXiv:2002.05202)."""
    return linear(gated_linear(x_TD, gate_up_2FD), down_DF)


def mrope_angles(positions_AT: Int32[Array, "3 T"], config: TextConfig) -> Float[Array, "T X"]:
    """Angles of M-RoPE, float32, X = C/2.

    The first `mrope_section[0]` frequencies turn with time, the next with height, the last with
    width.
    """
    half = config.head_channels // 2
    exponent_X = jnp.arange(half, dtype=jnp.float32) / half
    axis_X = jnp.repeat(jnp.arange(3), jnp.asarray(config.mrope_section), total_repeat_length=half)
    position_TX = positions_AT.astype(jnp.float32)[axis_X].T
    return position_TX * config.rope_theta**-exponent_X
