"""The paged KV cache as the layers see it. Traced."""

from functools import partial
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float, Int32

from jaxmm.device.backend import Backend
from jaxmm.device.sharding import WHOLE, spec_of
from jaxmm.models.config import TextConfig
from kernels_pallas.ragged_paged_attention import (
    Ragged,
    StepPlan,
    page_shape,
    plan_step,
    write_and_attend,
)

KVPages = tuple[Float[Array, "P ..."], ...]
"""Each layer's pool; the axes behind P are the implementation's (`page_shape`)."""

KV_POOL = spec_of("PK")
"""How one layer's pool is split; whatever follows K is whole."""


def pool_shape(
    config: TextConfig, num_pages: int, page_size: int, backend: Backend
) -> tuple[int, ...]:
    """Shape of one layer's pool; its second axis is split over chips like KV heads."""
    page = page_shape(
        page_size, config.num_kv_heads, config.head_channels, implementation=backend.kernels
    )
    return (num_pages, *page)


class PagedAttention(NamedTuple):
    """Where this step's tokens are written, and whose keys each of them sees."""

    plan: StepPlan
    backend: Backend

    @classmethod
    def of_step(
        cls,
        ragged: Ragged,
        slot_T: Int32[Array, " T"],
        num_tokens: Int32[Array, ""],
        *,
        page_size: int,
        backend: Backend,
    ) -> "PagedAttention":
        """Lay out a step once, for all its layers."""
        plan = plan_step(
            ragged, slot_T, num_tokens, page_size=page_size, implementation=backend.kernels
        )
        return cls(plan, backend)

    def __call__(
        self,
        q_THC: Float[Array, "T H C"],
        k_TKC: Float[Array, "T K C"],
        v_TKC: Float[Array, "T K C"],
        pages: Float[Array, "P ..."],
    ) -> tuple[Float[Array, "T H C"], Float[Array, "P ..."]]:
        """Write the step's keys and values, then attend; each chip does its own heads.

        Args:
            q_THC: Rotated queries; head h reads KV head h // (H / K).
            k_TKC: Rotated keys.
            v_TKC: Values.
            pages: One layer's pool.
        """
        attend: Any = self.backend.per_chip(
            partial(write_and_attend, implementation=self.backend.kernels),
            (spec_of("THC"), spec_of("TKC"), spec_of("TKC"), KV_POOL, WHOLE),
            (spec_of("THC"), KV_POOL),
        )
        return attend(q_THC, k_TKC, v_TKC, pages, self.plan)
