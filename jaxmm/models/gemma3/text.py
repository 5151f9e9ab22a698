"""The text decoder of Gemma 3 (arXiv:2503.19786, section 2). Traced.

Most layers see the last tokens alone and turn positions by a base of their own; a few see all. The
tokens of a picture see each other both ways, in layers of either kind.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from jaxmm.device.image_rows import ImageRows
from jaxmm.device.kv import KVPages, PagedAttention
from jaxmm.device.linear import linear
from jaxmm.device.norms import offset_rms_norm
from jaxmm.device.rope import Rope
from jaxmm.models.config import TextConfig
from kernels_pallas.rotate_heads import Norms


class TextLayer(nnx.Module):
    """Attention and MLP, normalised before and behind, each added to the residual."""

    def __init__(self, config: TextConfig, dtype: DTypeLike, window: int | None) -> None:
        d, f, c = config.width, config.mlp_width, config.head_channels
        o = (config.num_heads + 2 * config.num_kv_heads) * c
        self.attn_norm_D = nnx.Param(jnp.zeros((d,), dtype))
        self.qkv_OD = nnx.Param(jnp.zeros((o, d), dtype))
        self.q_norm_C = nnx.Param(jnp.zeros((c,), dtype))
        self.k_norm_C = nnx.Param(jnp.zeros((c,), dtype))
        self.out_DO = nnx.Param(jnp.zeros((d, config.num_heads * c), dtype))
        self.attn_out_norm_D = nnx.Param(jnp.zeros((d,), dtype))
        self.mlp_norm_D = nnx.Param(jnp.zeros((d,), dtype))
        self.gate_up_2FD = nnx.Param(jnp.zeros((2, f, d), dtype))
        self.down_DF = nnx.Param(jnp.zeros((d, f), dtype))
        self.mlp_out_norm_D = nnx.Param(jnp.zeros((d,), dtype))
        self.config = config
        self.window = window

    def __call__(
        self,
        hidden_TD: Float[Array, "T D"],
        rope: Rope,
        pages: Float[Array, "P ..."],
        attention: PagedAttention,
    ) -> tuple[Float[Array, "X D"], Float[Array, "P ..."]]:
        """One layer; returns the residual and the layer's pages with the step's KV written."""
        eps = self.config.rms_eps
        with jax.named_scope("attention"):
            x_TD = offset_rms_norm(hidden_TD, self.attn_norm_D[...], eps)
            attended_TO, pages = attention(
                linear(x_TD, self.qkv_OD[...]),
                rope,
                pages,
                channels=self.config.head_channels,
                norms=self._head_norms(),
                eps=eps,
                window=self.window,
            )
            hidden_TD, attended_TO = attention.kept(hidden_TD, attended_TO)
            x_TD = linear(attended_TO, self.out_DO[...])
            hidden_TD += offset_rms_norm(x_TD, self.attn_out_norm_D[...], eps)
        with jax.named_scope("mlp"):
            x_TD = offset_rms_norm(hidden_TD, self.mlp_norm_D[...], eps)
            gate_up_T2F = linear(x_TD, self.gate_up_2FD[...])
            x_TF = jax.nn.gelu(gate_up_T2F[:, 0], approximate=True) * gate_up_T2F[:, 1]
            x_TD = linear(x_TF, self.down_DF[...])
            hidden_TD += offset_rms_norm(x_TD, self.mlp_out_norm_D[...], eps)
        return hidden_TD, pages

    def _head_norms(self) -> Norms:
        """Scales of queries and keys, float32. Attention divides scores by the root of the head
        channels; what the model divides by instead goes into the queries."""
        config = self.config
        scale = (config.head_channels / config.score_divisor) ** 0.5
        q_C, k_C = (1.0 + x[...].astype(jnp.float32) for x in (self.q_norm_C, self.k_norm_C))
        return Norms(q_C * scale, k_C)


class TextDecoder(nnx.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        assert config.sliding is not None, "the family's config has a window"
        self.embed_VD = nnx.Param(jnp.zeros((config.vocab_size, config.width), dtype))
        self.layers = nnx.List(
            [
                TextLayer(config, dtype, config.sliding.of_layer(layer))
                for layer in range(config.num_layers)
            ]
        )
        self.norm_D = nnx.Param(jnp.zeros((config.width,), dtype))
        if not config.tied:
            self.head_VD = nnx.Param(jnp.zeros((config.vocab_size, config.width), dtype))
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def embed(self, ids_T: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Embeddings of ids, all within the vocabulary, times the root of their width; both are
        rounded to the type that the decoder computes in, as the model was trained."""
        root = jnp.asarray(self.config.width**0.5, self.dtype)
        return self.embed_VD[...][ids_T].astype(self.dtype) * root

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
            positions_AT: The same in all three rows.
            kv_pages: Each layer's pages.
            attention: Writes the step's KV and attends.
            rows: Not used: image rows of this family have no levels beyond the embedding.

        Returns:
            The normalised output of the tokens that `attention` keeps, and the pages.
        """
        del rows
        config = self.config
        assert config.sliding is not None, "the family's config has a window"
        position_T = positions_AT[0].astype(jnp.float32)
        whole = rope_of(position_T / config.rope_factor, config.rope_theta, config)
        local = rope_of(position_T, config.sliding.rope_theta, config)
        written = []
        for index, (layer, pages) in enumerate(zip(self.layers, kv_pages, strict=True)):
            rope = whole if layer.window is None else local
            of_layer = attention.of_layer(index, config.num_layers)
            hidden_TD, pages = layer(hidden_TD, rope, pages, of_layer)
            written.append(pages)
        return offset_rms_norm(hidden_TD, self.norm_D[...], config.rms_eps), tuple(written)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Float32 logits of some rows of the output."""
        head_VD = self.embed_VD if self.config.tied else self.head_VD
        return linear(hidden_BD, head_VD[...]).astype(jnp.float32)


def rope_of(position_T: Float[Array, " T"], theta: float, config: TextConfig) -> Rope:
    """Tables of positions, turned by one base."""
    half = config.head_channels // 2
    exponent_X = jnp.arange(half, dtype=jnp.float32) / half
    return Rope.of(position_T[:, None] * theta**-exponent_X)
