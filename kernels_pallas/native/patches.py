"""Attention among the patches of a lane, on a CPU. Host only, but for `attend_patches`.

A piece of work is one head of a block of patches. Those of one segment in it are queries together;
the keys are read where they lie.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from numba import njit

from kernels_pallas.native import PATCHES, ffi, flash


def takes(q_NHC: tuple[int, ...], block: int | None) -> bool:
    """Whether the kernel takes heads of such a shape, and such blocks."""
    return all(n % flash.STEP == 0 for n in (q_NHC[0], q_NHC[2], block or 0))


def attend_patches(
    q_NHC: Float[Array, "N H C"],
    k_NHC: Float[Array, "N H C"],
    v_NHC: Float[Array, "N H C"],
    segment_N: Int32[Array, " N"],
    *,
    block: int | None,
) -> Float[Array, "N H C"]:
    """Softmax attention over the keys of the query's own segment, scaled by C^-0.5.

    Args:
        q_NHC: float32, not scaled; N and C are multiples of `flash.STEP`.
        k_NHC: float32.
        v_NHC: float32.
        segment_N: Negative for padding, which may stand anywhere and gets zeros.
        block: A segment is one within so many patches alone, where its patches may stand in any
            order; None: numbers never fall, and each is one segment.
    """
    operands = q_NHC, k_NHC, v_NHC, segment_N, jnp.int32(block or 0)
    return ffi.run_kernel(PATCHES, q_NHC.shape, *operands)


def _count_pieces(frame: int) -> int:
    q = ffi.argument(frame, 0)
    return (ffi.dim(q, 0) + flash.LANES - 1) // flash.LANES * ffi.dim(q, 1)


def _do_piece(frame: int, piece: int) -> int:
    q = ffi.argument(frame, 0)
    num_patches, channels = ffi.dim(q, 0), ffi.dim(q, 2)
    blocks = (num_patches + flash.LANES - 1) // flash.LANES
    head, first = piece // blocks, piece % blocks * flash.LANES  # a head's keys stay in the cache
    stop = min(num_patches, first + flash.LANES)
    segment_N = ffi.int32s(ffi.data(ffi.argument(frame, 3)), num_patches)
    block = ffi.number(frame, 4)
    state = flash.new_state(channels)
    while first < stop:
        after, end = first + 1, stop
        if block > 0:
            end = min(stop, first - first % block + block)
        while after < end and segment_N[after] == segment_N[first]:
            after += 1
        _attend(frame, state, segment_N, first, after, head)
        first = after
    return ffi.DONE


@njit(error_model="numpy")
def _attend(
    frame: int,
    state: flash.State,
    segment_N: Int32[np.ndarray, " N"],
    first: int,
    stop: int,
    head: int,
) -> None:
    """Patches of one segment that follow each other."""
    q, k, v = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.argument(frame, 2)
    channels, stride = ffi.dim(q, 2), ffi.dim(q, 1) * ffi.dim(q, 2)
    low, high = 0, 0  # padding sees nothing
    if segment_N[first] >= 0:
        low, high = _bounds(segment_N, first, ffi.number(frame, 4))
    for patch in range(first, stop):
        flash.put(state, patch - first, ffi.data(q) + 4 * (patch * stride + head * channels))
    flash.begin(state)
    for key in range(low - low % flash.STEP, high, flash.KEYS):
        count, ahead = min(flash.KEYS, high - key), 4 * flash.KEYS * stride
        place = 4 * (key * stride + head * channels)
        keys, values = ffi.data(k) + place, ffi.data(v) + place
        flash.fetch(state, keys + ahead, stride, min(flash.KEYS, high - key - count))
        flash.fetch(state, values + ahead, stride, min(flash.KEYS, high - key - count))
        flash.score(state, keys, stride, count)
        for j in range(count):
            if segment_N[key + j] != segment_N[first]:
                flash.hide(state, j)
        flash.add(state, values, stride, count)
    flash.finish(state)
    for patch in range(first, stop):
        target = ffi.data(ffi.result(frame, 0)) + 4 * (patch * stride + head * channels)
        flash.take(state, patch - first, target)


@njit
def _bounds(segment_N: Int32[np.ndarray, " N"], patch: int, block: int) -> tuple[int, int]:
    """The first key of a patch's segment, and the one behind its last."""
    start, stop, own = 0, len(segment_N), segment_N[patch]
    if block > 0:
        start = patch - patch % block
        stop = min(stop, start + block)
    low, high, i = patch, patch + 1, patch - 1
    while i >= start and (block > 0 or segment_N[i] < 0 or segment_N[i] == own):
        low = i if segment_N[i] == own else low
        i -= 1
    i = patch + 1
    while i < stop and (block > 0 or segment_N[i] < 0 or segment_N[i] == own):
        high = i + 1 if segment_N[i] == own else high
        i += 1
    return low, high


KERNELS = {PATCHES: (_count_pieces, _do_piece)}
