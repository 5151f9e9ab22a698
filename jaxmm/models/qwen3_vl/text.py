"""The Qwen3 text decoder with interleaved M-RoPE and deepstack (arXiv:2511.21631, §2). Traced."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from jaxmm.device.backend import Backend
from jaxmm.device.experts import expert_mlp, route
from jaxmm.device.image_rows import ImageRows
from jaxmm.device.kv import KVPages, PagedAttention
from jaxmm.device.linear import linear
from jaxmm.device.norms import rms_norm
from jaxmm.device.rope import Rope
from jaxmm.models.config import TextConfig
from jaxmm.models.qwen2_vl.text import gated_mlp
from kernels_pallas.rotate_heads import Norms


class TextLayer(nnx.Module):
    """Attention with normalised queries and keys, and an MLP, each added to the residual."""

    def __init__(self, config: TextConfig, dtype: DTypeLike, *, experts: bool) -> None:
        d, c = config.width, config.head_channels
        o = (config.num_heads + 2 * config.num_kv_heads) * c
        # rows of qkv by KV head: its query heads, its key, its value; so they split over chips
        self.attn_norm_D = nnx.Param(jnp.ones((d,), dtype))
        self.qkv_OD = nnx.Param(jnp.zeros((o, d), dtype))
        self.q_norm_C = nnx.Param(jnp.ones((c,), dtype))
        self.k_norm_C = nnx.Param(jnp.ones((c,), dtype))
        self.out_DO = nnx.Param(jnp.zeros((d, config.num_heads * c), dtype))
        self.mlp_norm_D = nnx.Param(jnp.ones((d,), dtype))
        self.mlp = Experts(config, dtype) if experts else Mlp(config, dtype)
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
            attended_TO, pages = attention(
                linear(x_TD, self.qkv_OD[...]),
                rope,
                pages,
                channels=config.head_channels,
                norms=Norms(self.q_norm_C[...], self.k_norm_C[...]),
                eps=config.rms_eps,
            )
            hidden_TD, attended_TO = attention.kept(hidden_TD, attended_TO)
            hidden_TD += linear(attended_TO, self.out_DO[...])
        with jax.named_scope("mlp"):
            x_TD = rms_norm(hidden_TD, self.mlp_norm_D[...], config.rms_eps)
            hidden_TD += self.mlp(x_TD, attention.backend)
        return hidden_TD, pages


class Mlp(nnx.Module):
    """One MLP for all tokens."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        d, f = config.width, config.mlp_width
        self.gate_up_2FD = nnx.Param(jnp.zeros((2, f, d), dtype))
        self.down_DF = nnx.Param(jnp.zeros((d, f), dtype))

    def __call__(self, x_TD: Float[Array, "T D"], _: Backend) -> Float[Array, "T D"]:
        return gated_mlp(x_TD, self.gate_up_2FD[...], self.down_DF[...])


class Experts(nnx.Module):
    """A few of Z MLPs for each token, chosen by a router (arXiv:1701.06538)."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        z, d, f = config.num_experts, config.width, config.expert_width
        # X, all experts, is whole on every chip; of Z each chip has a part
        self.router_XD = nnx.Param(jnp.zeros((z, d), dtype))
        self.gate_up_ZDO = nnx.Param(jnp.zeros((z, d, 2 * f), dtype))
        self.down_ZFD = nnx.Param(jnp.zeros((z, f, d), dtype))
        self.per_token = config.experts_per_token

    def __call__(self, x_TD: Float[Array, "T D"], backend: Backend) -> Float[Array, "T D"]:
        routing = route(linear(x_TD, self.router_XD[...]), self.per_token)
        return expert_mlp(x_TD, self.gate_up_ZDO[...], self.down_ZFD[...], routing, backend)


class TextDecoder(nnx.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        self.embed_VD = nnx.Param(jnp.zeros((config.vocab_size, config.width), dtype))
        self.layers = nnx.List(
            [
                TextLayer(config, dtype, experts=config.has_experts(layer))
                for layer in range(config.num_layers)
            ]
        )
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
            rows: Level i of the image rows is added after layer i - 1, to image tokens only.

        Returns:
            The normalised output of the tokens that `attention` keeps, and the pages.
        """
        config = self.config
        rope = Rope.of(mrope_angles(positions_AT, config))
        written = []
        for index, (layer, pages) in enumerate(zip(self.layers, kv_pages, strict=True)):
            of_layer = attention.of_layer(index, config.num_layers)
            has_rows = index < config.deepstack_levels  # which are added to all tokens
            hidden_TD, pages = layer(hidden_TD, rope, pages, attention if has_rows else of_layer)
            written.append(pages)
            if has_rows:
                (hidden_TD,) = of_layer.kept(rows.add(hidden_TD, level=index + 1))
        return rms_norm(hidden_TD, self.norm_D[...], config.rms_eps), tuple(written)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Float32 logits of some rows of the output."""
        head_VD = self.embed_VD if self.config.tied else self.head_VD
        return linear(hidden_BD, head_VD[...]).astype(jnp.float32)


def mrope_angles(positions_AT: Int32[Array, "3 T"], config: TextConfig) -> Float[Array, "T X"]:
    """Angles of interleaved M-RoPE, float32, X = C/2.

    Frequencies turn with time, height, width, time, …; where the section of height or width is
    used up, with time.
    """
    half = config.head_channels // 2
    index_X = jnp.arange(half)
    section_A = jnp.array((half, *config.mrope_section[1:]))
    axis_X = jnp.where(index_X < 3 * section_A[index_X % 3], index_X % 3, 0)
    position_TX = positions_AT.astype(jnp.float32)[axis_X].T
    return position_TX * config.rope_theta ** -(index_X.astype(jnp.float32) / half)
