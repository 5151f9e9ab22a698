"""KV update in plain JAX: one small slice a token, so that the pages are never copied. Traced."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

_GROUP = 8
"""Tokens of one turn: on a CPU a turn of the loop costs more than the copy of a token."""


def kv_update_portable(
    pages_PJSC: Float[Array, "P J S C"],
    kv_TJC: Float[Array, "T J C"],
    slot_T: Int32[Array, " T"],
    num_tokens: Int32[Array, ""],
) -> Float[Array, "P J S C"]:
    """See `kv_update`."""
    page_size = pages_PJSC.shape[2]
    group = min(_GROUP, kv_TJC.shape[0])
    zero = jnp.int32(0)

    def write(t: Int32[Array, ""], pages: Array) -> Array:
        token_JC = lax.dynamic_index_in_dim(kv_TJC, t, 0, keepdims=False)
        page, place = slot_T[t] // page_size, slot_T[t] % page_size
        return lax.dynamic_update_slice(pages, token_JC[None, :, None], (page, zero, place, zero))

    def write_group(g: Int32[Array, ""], pages: Array) -> Array:
        for i in range(group):  # the last group writes the last token again and again
            pages = write(jnp.minimum(g * group + i, num_tokens - 1), pages)
        return pages

    return lax.fori_loop(0, (num_tokens + group - 1) // group, write_group, pages_PJSC)
