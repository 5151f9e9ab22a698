"""The paged KV cache as the layers see it. Traced."""

from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Int32

from kernels_pallas.kv_update import kv_update
from kernels_pallas.ragged_paged_attention import Ragged, ragged_paged_attention


class PagedAttention(NamedTuple):
    """Where this step's tokens are written, and whose keys each of them sees."""

    slot_T: Int32[Array, " T"]
    num_tokens: Int32[Array, ""]
    ragged: Ragged

    def __call__(
        self,
        q_THC: Float[Array, "T H C"],
        kv_TJC: Float[Array, "T J C"],
        pages_PJSC: Float[Array, "P J S C"],
    ) -> tuple[Float[Array, "T H C"], Float[Array, "P J S C"]]:
        """Write the step's keys and values, then attend.

        Args:
            q_THC: Rotated queries.
            kv_TJC: Rotated keys, then values, by KV head.
            pages_PJSC: One layer's pages.
        """
        pages_PJSC = kv_update(
            pages_PJSC, kv_TJC.astype(pages_PJSC.dtype), self.slot_T, self.num_tokens
        )
        return ragged_paged_attention(q_THC, pages_PJSC, self.ragged), pages_PJSC
