"""Keys and values of a step into their pages, on a CPU. Host only, but for `write_slots`.

XLA's CPU backend writes one token after the other, each as an operation of its own.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.native import SLOTS, ffi

_TOKENS = 32  # of a piece
_KV, _SLOT, _NUM_TOKENS = range(3)


def write_slots(
    pages_PJSC: Float[Array, "P J S C"],
    kv_TJC: Float[Array, "T J C"],
    slot_T: Int32[Array, " T"],
    num_tokens: Int32[Array, ""],
) -> Float[Array, "P J S C"]:
    """See `kv_update`; all float32. Where two tokens have one slot, numbers of
    either may stand there."""
    return ffi.run_kernel(
        SLOTS, pages_PJSC.shape, kv_TJC, slot_T, num_tokens.astype(jnp.int32), filled=pages_PJSC
    )


def _count_pieces(frame: int) -> int:
    return (ffi.number(frame, _NUM_TOKENS) + _TOKENS - 1) // _TOKENS


def _do_piece(frame: int, piece: int) -> int:
    pages, kv = ffi.result(frame, 0), ffi.argument(frame, _KV)
    num_heads, page_size, channels = ffi.dim(pages, 1), ffi.dim(pages, 2), ffi.dim(pages, 3)
    slots = ffi.data(ffi.argument(frame, _SLOT))
    stop = min(ffi.number(frame, _NUM_TOKENS), (piece + 1) * _TOKENS)
    for token in range(piece * _TOKENS, stop):
        slot = ffi.load_int32(slots + 4 * token)
        first = slot // page_size * num_heads * page_size + slot % page_size
        for head in range(num_heads):
            row = ffi.data(kv) + 4 * (token * num_heads + head) * channels
            place = ffi.data(pages) + 4 * (first + head * page_size) * channels
            source, target = ffi.floats(row, channels), ffi.floats(place, channels)
            for c in range(channels):
                target[c] = source[c]
    return ffi.DONE


KERNELS = {SLOTS: (_count_pieces, _do_piece)}
