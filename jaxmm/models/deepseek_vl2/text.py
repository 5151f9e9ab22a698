"""The DeepSeek-V2 text decoder (arXiv:2405.04434), with and without latent attention. Traced."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from jaxmm.device.backend import Backend
from jaxmm.device.experts import Routing, expert_mlp, route_scores
from jaxmm.device.image_rows import ImageRows
from jaxmm.device.kv import KVPages, PagedAttention
from jaxmm.device.linear import linear
from jaxmm.device.norms import rms_norm
from jaxmm.device.rope import Rope, rotate
from jaxmm.models.config import LatentAttention, TextConfig
from jaxmm.models.qwen2_vl.text import gated_mlp
from kernels_pallas.ragged_paged_attention import Latent

_ROW_EPS = 1e-6
"""Of the norm of the compressed row, whatever the other norms have."""


class TextLayer(nnx.Module):
    """Attention and MLP, each on a normalised input, each added to the residual."""

    def __init__(self, config: TextConfig, dtype: DTypeLike, *, experts: bool) -> None:
        self.attn_norm_D = nnx.Param(jnp.ones((config.width,), dtype))
        self.mlp_norm_D = nnx.Param(jnp.ones((config.width,), dtype))
        self.attention = (
            HeadAttention(config, dtype)
            if config.latent is None
            else RowAttention(config, config.latent, dtype)
        )
        self.mlp = Experts(config, dtype) if experts else Mlp(config.width, config.mlp_width, dtype)
        self.rms_eps = config.rms_eps

    def __call__(
        self,
        hidden_TD: Float[Array, "T D"],
        rope: Rope,
        pages: Float[Array, "P ..."],
        attention: PagedAttention,
    ) -> tuple[Float[Array, "X D"], Float[Array, "P ..."]]:
        """One layer; returns the residual and the layer's pages with the step's KV written."""
        with jax.named_scope("attention"):
            x_TD = rms_norm(hidden_TD, self.attn_norm_D[...], self.rms_eps)
            attended_TD, pages = self.attention(x_TD, rope, pages, attention)
            hidden_TD, attended_TD = attention.kept(hidden_TD, attended_TD)
            hidden_TD += attended_TD
        with jax.named_scope("mlp"):
            x_TD = rms_norm(hidden_TD, self.mlp_norm_D[...], self.rms_eps)
            hidden_TD += self.mlp(x_TD, attention.backend)
        return hidden_TD, pages


class HeadAttention(nnx.Module):
    """Attention with keys and values of their own."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        d, c = config.width, config.head_channels
        o = (config.num_heads + 2 * config.num_kv_heads) * c
        # rows of qkv by KV head: its query heads, its key, its value; so they split over chips
        self.qkv_OD = nnx.Param(jnp.zeros((o, d), dtype))
        self.out_DO = nnx.Param(jnp.zeros((d, config.num_heads * c), dtype))
        self.channels = c

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        rope: Rope,
        pages: Float[Array, "P ..."],
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T D"], Float[Array, "P ..."]]:
        qkv_TO = linear(x_TD, self.qkv_OD[...])
        attended_TO, pages = attention(qkv_TO, rope, pages, channels=self.channels)
        return linear(attended_TO, self.out_DO[...]), pages


class RowAttention(nnx.Module):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1), on compressed rows themselves.

    A head's key and value are linear in the row, so its query is led through the keys' projection
    once, instead of every key; and the values' projection comes after the sum over tokens.
    """

    def __init__(self, config: TextConfig, latent: LatentAttention, dtype: DTypeLike) -> None:
        d, h = config.width, config.num_heads
        made = h * (latent.nope_channels + latent.value_channels)
        self.query_OD = nnx.Param(jnp.zeros((h * latent.query_channels, d), dtype))
        self.row_CD = nnx.Param(jnp.zeros((latent.row_channels, d), dtype))
        self.row_norm_C = nnx.Param(jnp.ones((latent.rank,), dtype))
        self.key_value_OC = nnx.Param(jnp.zeros((made, latent.rank), dtype))
        self.out_DO = nnx.Param(jnp.zeros((d, h * latent.value_channels), dtype))
        self.num_heads = h
        self.latent = latent

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        rope: Rope,
        pages: Float[Array, "P ..."],
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T D"], Float[Array, "P ..."]]:
        latent, num_tokens = self.latent, len(x_TD)
        key_HXC, value_HXC = self._projections()
        q_THC = linear(x_TD, self.query_OD[...]).reshape(num_tokens, self.num_heads, -1)
        nope_THX, turned_THX = jnp.split(q_THC, [latent.nope_channels], axis=2)
        led_THC = _per_head("THX,HXC->THC", nope_THX, key_HXC)
        query_THC = jnp.concatenate([led_THC, _rotate_pairs(turned_THX, rope)], axis=2)
        how = Latent(latent.rank, latent.query_channels**-0.5)
        summed_THC, pages = attention.latent(query_THC, self._row(x_TD, rope), pages, how)
        value_THX = _per_head("THC,HXC->THX", summed_THC, value_HXC)
        return linear(value_THX.reshape(num_tokens, -1), self.out_DO[...]), pages

    def _row(self, x_TD: Float[Array, "T D"], rope: Rope) -> Float[Array, "T C"]:
        """What is kept of each token: the normalised row, and the key's rotated channels."""
        row_TC, turned_TX = jnp.split(linear(x_TD, self.row_CD[...]), [self.latent.rank], axis=1)
        row_TC = rms_norm(row_TC, self.row_norm_C[...], _ROW_EPS)
        return jnp.concatenate([row_TC, _rotate_pairs(turned_TX[:, None], rope)[:, 0]], axis=1)

    def _projections(self) -> tuple[Float[Array, "H X C"], Float[Array, "H Y C"]]:
        """From rows to the unrotated channels of each head's keys, and to its values."""
        both_HOC = self.key_value_OC[...].reshape(self.num_heads, -1, self.latent.rank)
        key_HXC, value_HXC = jnp.split(both_HOC, [self.latent.nope_channels], axis=1)
        return key_HXC, value_HXC


class Mlp(nnx.Module):
    """One MLP for all tokens."""

    def __init__(self, width: int, inner: int, dtype: DTypeLike) -> None:
        self.gate_up_2FD = nnx.Param(jnp.zeros((2, inner, width), dtype))
        self.down_DF = nnx.Param(jnp.zeros((width, inner), dtype))

    def __call__(self, x_TD: Float[Array, "T D"], _: Backend) -> Float[Array, "T D"]:
        return gated_mlp(x_TD, self.gate_up_2FD[...], self.down_DF[...])


class Experts(nnx.Module):
    """A few of Z MLPs for each token, and one that all take (arXiv:2401.06066)."""

    def __init__(self, config: TextConfig, dtype: DTypeLike) -> None:
        z, d, f = config.num_experts, config.width, config.expert_width
        # X, all experts, is whole on every chip; of Z each chip has a part
        self.router_XD = nnx.Param(jnp.zeros((z, d), jnp.float32))
        self.bias_X = nnx.Param(jnp.zeros((z,), jnp.float32)) if config.expert_bias else None
        self.gate_up_ZDO = nnx.Param(jnp.zeros((z, d, 2 * f), dtype))
        self.down_ZFD = nnx.Param(jnp.zeros((z, f, d), dtype))
        self.shared = Mlp(d, config.shared_width, dtype) if config.shared_width else None
        self.config = config

    def __call__(self, x_TD: Float[Array, "T D"], backend: Backend) -> Float[Array, "T D"]:
        routing = self._route(x_TD)
        y_TD = expert_mlp(x_TD, self.gate_up_ZDO[...], self.down_ZFD[...], routing, backend)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD, backend)

    def _route(self, x_TD: Float[Array, "T D"]) -> Routing:
        """Choose experts; scores are float32 from the first product on."""
        config = self.config
        logits_TX = linear(x_TD.astype(jnp.float32), self.router_XD[...])
        sigmoid = config.expert_scores == "sigmoid"
        scores_TX = jax.nn.sigmoid(logits_TX) if sigmoid else jax.nn.softmax(logits_TX, axis=-1)
        return route_scores(
            scores_TX,
            None if self.bias_X is None else self.bias_X[...],
            config.experts_per_token,
            shares=config.expert_shares,
            scale=config.expert_scale,
        )


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
            positions_AT: Three times each token's index.
            kv_pages: Each layer's pages.
            attention: Writes the step's KV and attends.
            rows: Not used: image rows of this family have no levels beyond the embedding.

        Returns:
            The normalised output of the tokens that `attention` keeps, and the pages.
        """
        del rows
        config = self.config
        half = config.mrope_section[0]
        exponent_X = jnp.arange(half, dtype=jnp.float32) / half
        position_T1 = positions_AT[0].astype(jnp.float32)[:, None]
        rope = Rope.of(position_T1 * config.rope_theta**-exponent_X)
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


def _rotate_pairs(x_THX: Float[Array, "T H X"], rope: Rope) -> Float[Array, "T H X"]:
    """Rotate channel 2i with channel 2i + 1; the result has even channels first, then odd ones.

    Scores do not depend on the order, as long as queries and keys have the same.
    """
    pairs = x_THX.reshape(*x_THX.shape[:2], -1, 2)
    return rotate(pairs.swapaxes(2, 3).reshape(x_THX.shape), rope)


def _per_head(formula: str, x: Float[Array, "T H X"], weight: Array) -> Float[Array, "T H Y"]:
    """Lead each head through a matrix of its own, summed in float32, in the dtype of x."""
    return jnp.einsum(formula, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)
