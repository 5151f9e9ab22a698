"""KV update: the op and its choice of implementation. Traced."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kernels_pallas.kv_update.portable import kv_update_portable
from kernels_pallas.kv_update.reference import kv_update_reference

Implementation = Literal["portable", "native", "reference"]


def kv_update(
    pages_PJSC: Float[Array, "P J S C"],
    kv_TJC: Float[Array, "T J C"],
    slot_T: Int32[Array, " T"],
    num_tokens: Int32[Array, ""],
    *,
    implementation: Implementation = "portable",
) -> Float[Array, "P J S C"]:
    """Write each token's keys and values into its slot, in place where the pages are donated.

    Args:
        pages_PJSC: One layer's pages; J holds K keys, then K values.
        kv_TJC: New keys and values in the pages' dtype.
        slot_T: page * page_size + place in the page, for each token.
        num_tokens: Tokens to write; the rest of T is filler.
        implementation: "portable" for CPU and GPU, "native" for a CPU whose kernels are registered
            (`kernels_pallas.native`; float32 alone, else as "portable"), "reference" for tests.
    """
    if implementation == "native" and pages_PJSC.dtype == jnp.float32:
        from kernels_pallas.native.slots import write_slots

        return write_slots(pages_PJSC, kv_TJC, slot_T, num_tokens)
    if implementation == "reference":
        return kv_update_reference(pages_PJSC, kv_TJC, slot_T, num_tokens)
    return kv_update_portable(pages_PJSC, kv_TJC, slot_T, num_tokens)
