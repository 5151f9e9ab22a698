"""KV update as one indexed assignment. Traced."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32


def kv_update_reference(
    pages_PJSC: Float[Array, "P J S C"],
    kv_TJC: Float[Array, "T J C"],
    slot_T: Int32[Array, " T"],
    num_tokens: Int32[Array, ""],
) -> Float[Array, "P J S C"]:
    """See `kv_update`."""
    num_pages, _, page_size, _ = pages_PJSC.shape
    page_T = jnp.where(jnp.arange(slot_T.shape[0]) < num_tokens, slot_T // page_size, num_pages)
    return pages_PJSC.at[page_T, :, slot_T % page_size].set(kv_TJC, mode="drop")
