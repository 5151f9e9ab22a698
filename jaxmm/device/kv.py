"""The paged KV cache as the layers see it. Traced."""

from functools import partial
from typing import Literal, NamedTuple

from jax import Array
from jaxtyping import Float, Int32

from jaxmm.device.backend import Backend
from jaxmm.device.norms import rms_norm
from jaxmm.device.rope import Rope, rotate
from jaxmm.device.sharding import WHOLE, spec_of
from jaxmm.models.config import TextConfig
from kernels_pallas.ragged_paged_attention import (
    Latent,
    Ragged,
    StepPlan,
    attend_rows,
    latent_row_lanes,
    page_shape,
    plan_step,
    write_and_attend,
    write_and_attend_latent,
)
from kernels_pallas.ragged_paged_attention.layout import query_scale
from kernels_pallas.rotate_heads import Norms, rotate_grouped
from kernels_pallas.tiling import LANES

KVPages = tuple[Float[Array, "P ..."], ...]
"""Each layer's pool; the axes behind P are the implementation's (`page_shape`)."""

Kernels = Literal["portable", "native", "pallas"]

KV_POOL = spec_of("PK")
"""How one layer's pool is split; whatever follows K is whole."""


def pool_shape(
    config: TextConfig, num_pages: int, page_size: int, backend: Backend
) -> tuple[int, ...]:
    """Shape of one layer's pool; its second axis is split over chips like KV heads."""
    if config.latent is not None:
        lanes = latent_row_lanes(config.head_channels, implementation=backend.kernels)
        return num_pages, config.num_kv_heads, page_size, lanes
    page = page_shape(
        page_size, config.num_kv_heads, config.head_channels, implementation=backend.kernels
    )
    return (num_pages, *page)


class PagedAttention(NamedTuple):
    """Where this step's tokens are written, and whose keys each of them sees."""

    plan: StepPlan
    backend: Backend
    wanted_B: Int32[Array, " B"] | None = None
    """The tokens whose output of the decoder is asked for; None: all of them."""
    is_last: bool = False
    """Of the layers; see `kept`."""

    @classmethod
    def of_step(
        cls,
        ragged: Ragged,
        slot_T: Int32[Array, " T"],
        num_tokens: Int32[Array, ""],
        *,
        page_size: int,
        backend: Backend,
        wanted_B: Int32[Array, " B"] | None = None,
    ) -> "PagedAttention":
        """Lay out a step once, for all its layers."""
        plan = plan_step(
            ragged, slot_T, num_tokens, page_size=page_size, implementation=backend.kernels
        )
        return cls(plan, backend, wanted_B)

    def of_layer(self, index: int, num_layers: int) -> "PagedAttention":
        """As one of so many layers takes it."""
        return self._replace(is_last=index == num_layers - 1)

    def kept(self, *arrays: Float[Array, "T _"]) -> tuple[Float[Array, "X _"], ...]:
        """Of the tokens' rows those that a layer goes on with once their keys and values are
        written: all, or in the last layer those that are asked for."""
        if self.wanted_B is None or not self.is_last:
            return arrays
        return tuple(x[self.wanted_B] for x in arrays)

    def __call__(
        self,
        qkv_TO: Float[Array, "T O"],
        rope: Rope,
        pages: Float[Array, "P ..."],
        *,
        channels: int,
        norms: Norms | None = None,
        eps: float = 0.0,
        window: int | None = None,
    ) -> tuple[Float[Array, "T X"], Float[Array, "P ..."]]:
        """Rotate, write the step's keys and values, attend; each chip does its own heads.

        Args:
            qkv_TO: The fused projection: per KV head its query heads, its key, its value.
            rope: Positions of the step's tokens.
            pages: One layer's pool.
            channels: C, of one head.
            norms: Of queries and keys before they are rotated.
            eps: Of the norms.
            window: Keys up to its own that a token sees at most; None: all.

        Returns:
            Attended values, query heads side by side; and the pool.
        """
        attend = self.backend.per_chip(
            partial(
                _attend, channels=channels, eps=eps, window=window, kernels=self.backend.attention
            ),
            (spec_of("TO"), WHOLE, KV_POOL, WHOLE, WHOLE),
            (spec_of("TO"), KV_POOL),
        )
        return attend(qkv_TO, rope, pages, self.plan, norms)

    def latent(
        self,
        q_THC: Float[Array, "T H C"],
        new_TC: Float[Array, "T C"],
        pages: Float[Array, "P ..."],
        how: Latent,
    ) -> tuple[Float[Array, "T H R"], Float[Array, "P ..."]]:
        """Write the step's compressed rows and attend over them; each chip does its own heads.

        Args:
            q_THC: Queries, in the space of the rows, rotated, not scaled.
            new_TC: One row a token, for all heads; every chip keeps all rows.
            pages: One layer's pool.
            how: How a row is read.

        Returns:
            Attended values of each head; and the pool.
        """
        attend = self.backend.per_chip(
            partial(write_and_attend_latent, latent=how, implementation=self.backend.kernels),
            (spec_of("TH"), WHOLE, KV_POOL, WHOLE),
            (spec_of("TH"), KV_POOL),
        )
        return attend(q_THC, new_TC, pages, self.plan)


def _attend(
    qkv_TO: Float[Array, "T O"],
    rope: Rope,
    pages: Float[Array, "P ..."],
    plan: StepPlan,
    norms: Norms | None,
    *,
    channels: int,
    eps: float,
    window: int | None,
    kernels: Kernels,
) -> tuple[Float[Array, "T X"], Float[Array, "P ..."]]:
    """One chip's heads."""
    num_kv = pages.shape[1] if kernels == "pallas" else pages.shape[1] // 2
    if kernels == "pallas" and channels % LANES == 0:
        cos_TC, sin_TC = rope.whole_heads()
        q_TX, new_TY = rotate_grouped(
            qkv_TO,
            cos_TC,
            sin_TC,
            num_kv_heads=num_kv,
            scale=query_scale(channels),
            norms=norms,
            eps=eps,
        )
        return attend_rows(q_TX, new_TY, pages, plan, channels, window=window)
    # heads that do not fill whole registers are padded anyhow, by XLA
    qkv_TKXC = qkv_TO.reshape(len(qkv_TO), num_kv, -1, channels)
    q_THC = qkv_TKXC[:, :, :-2].reshape(len(qkv_TO), -1, channels)
    k_TKC, v_TKC = qkv_TKXC[:, :, -2], qkv_TKXC[:, :, -1]
    if norms is not None:
        q_THC = rms_norm(q_THC, norms.q_C, eps)
        k_TKC = rms_norm(k_TKC, norms.k_C, eps)
    attended_THC, pages = write_and_attend(
        rotate(q_THC, rope),
        rotate(k_TKC, rope),
        v_TKC,
        pages,
        plan,
        window=window,
        implementation=kernels,
    )
    return attended_THC.reshape(len(qkv_TO), -1), pages
