"""Attention of decodes over paged keys and values, on a CPU. Host only, but for `attend_decodes`.

XLA's CPU backend runs the small operations of such an attention one after the other on one thread.
Here a piece of work is one KV head of one sequence; a page is read once, where it lies. Softmax by
pages as in flash attention (arXiv:2205.14135).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from kernels_pallas.native import VECTOR, ffi
from kernels_pallas.native.vectors import dot_rows

NAME = "jaxmm_attend_decodes"

_score = dot_rows(widen=False)
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)
_SMALL_TERMS = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2
_POLYNOMIAL = tuple(map(np.float32, (*_SMALL_TERMS, 1.6666665459e-1, 0.5)))
"""Of exp on [-ln 2 / 2, ln 2 / 2], as in the Cephes library's expf."""


def takes(q_THC: tuple[int, ...], pages_PJSC: tuple[int, ...]) -> bool:
    """Whether the kernel takes arrays of such shapes."""
    return q_THC[1] % (pages_PJSC[1] // 2) == 0 and q_THC[2] % VECTOR == 0


def attend_decodes(
    q_THC: Float[Array, "T H C"],
    pages_PJSC: Float[Array, "P J S C"],
    num_decodes: Int32[Array, ""],
    starts_B: Int32[Array, " B"],
    lengths_B: Int32[Array, " B"],
    tables_BQ: Int32[Array, "B Q"],
    *,
    window: int | None,
) -> Float[Array, "T H C"]:
    """Attention of the first sequences, of one query each; the other rows are zeros.

    Args:
        q_THC: float32, not scaled; C is a multiple of 16.
        pages_PJSC: float32, the keys of each KV head and then the values of each.
        num_decodes: How many sequences.
        starts_B: Row of each one's query.
        lengths_B: Keys of each one, its own among them.
        tables_BQ: Their pages.
        window: Keys up to its own that a query sees at most; None: all.
    """
    shape = jax.ShapeDtypeStruct(q_THC.shape, jnp.float32)
    run = jax.ffi.ffi_call(NAME, shape, input_output_aliases={7: 0})
    numbers = (num_decodes, starts_B, lengths_B, tables_BQ, jnp.int32(window or 0))
    out_THC: Array = run(q_THC, pages_PJSC, *numbers, jnp.zeros(q_THC.shape, jnp.float32))
    return out_THC


@intrinsic
def _power_of_two(_: object, __: object) -> object:
    """2 to the power of a whole number from -126 to 127."""

    def code(_: object, builder: ir.IRBuilder, __: object, args: tuple[object, ...]) -> object:
        biased = builder.add(args[0], ir.Constant(ffi.INT32, 127))
        bits = builder.shl(biased, ir.Constant(ffi.INT32, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), code


@intrinsic
def _floats(_: object, __: object) -> object:
    """An address as a pointer to float32."""

    def code(_: object, builder: ir.IRBuilder, __: object, args: tuple[object, ...]) -> object:
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.intp), code


@njit(fastmath=True, inline="always")
def _exp(x: np.float32) -> np.float32:
    """exp of a number that is not positive, to 2e-7 of it: plain arithmetic makes vectors."""
    x = max(x, _LOWEST)
    whole = np.float32(np.floor(x * _LOG2_E + np.float32(0.5)))
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    sum_ = _POLYNOMIAL[0]
    for c in _POLYNOMIAL[1:]:
        sum_ = sum_ * rest + c
    return (sum_ * rest * rest + rest + np.float32(1.0)) * _power_of_two(np.int32(whole))


@njit
def _count_pieces(frame: int) -> int:
    num_decodes = ffi.load_int32(ffi.data(ffi.argument(frame, 2)))
    return num_decodes * (ffi.dim(ffi.argument(frame, 1), 1) // 2)


@njit(fastmath=True, error_model="numpy")
def _do_piece(frame: int, piece: int) -> None:
    q, pages, tables = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.argument(frame, 5)
    num_heads, channels = ffi.dim(q, 1), ffi.dim(q, 2)
    num_kv, page_size = ffi.dim(pages, 1) // 2, ffi.dim(pages, 2)
    sequence, kv_head = piece // num_kv, piece % num_kv
    group = num_heads // num_kv
    token = ffi.load_int32(ffi.data(ffi.argument(frame, 3)) + 4 * sequence)
    length = ffi.load_int32(ffi.data(ffi.argument(frame, 4)) + 4 * sequence)
    window = ffi.load_int32(ffi.data(ffi.argument(frame, 6)))
    table = ffi.data(tables) + 4 * sequence * ffi.dim(tables, 1)
    first = 4 * (token * num_heads + kv_head * group) * channels
    scale = np.float32(1.0) / np.sqrt(np.float32(channels))
    queries_GC = carray(_floats(ffi.data(q) + first), (group, channels))
    scaled_GC = np.empty((group, channels), np.float32)
    for g in range(group):
        for c in range(channels):
            scaled_GC[g, c] = queries_GC[g, c] * scale
    out_GC = carray(_floats(ffi.data(ffi.result(frame, 0)) + first), (group, channels))
    score_GS = np.empty((group, page_size), np.float32)
    sum_G2 = np.empty((group, 2), np.float32)  # the highest score, and the sum of weights
    for g in range(group):
        sum_G2[g, 0], sum_G2[g, 1] = np.float32(-1e30), np.float32(0.0)
        for c in range(channels):
            out_GC[g, c] = np.float32(0.0)
    lowest = max(0, length - window) if window > 0 else 0
    page_bytes, head_bytes = 8 * num_kv * page_size * channels, 4 * page_size * channels
    for turn in range(lowest // page_size, (length + page_size - 1) // page_size):
        page = ffi.load_int32(table + 4 * turn)
        keys = ffi.data(pages) + page * page_bytes + kv_head * head_bytes
        values = keys + num_kv * head_bytes
        start, stop = max(0, lowest - turn * page_size), min(page_size, length - turn * page_size)
        value_SC = carray(_floats(values), (page_size, channels))
        for s in range(start, stop):
            key, out = keys + 4 * s * channels, score_GS.ctypes.data + 4 * s
            _score(scaled_GC.ctypes.data, key, out, channels, page_size, group)
        for g in range(group):
            highest = sum_G2[g, 0]
            for s in range(start, stop):
                highest = max(highest, score_GS[g, s])
            shrink = _exp(sum_G2[g, 0] - highest)
            total = sum_G2[g, 1] * shrink
            for s in range(start, stop):
                weight = _exp(score_GS[g, s] - highest)
                score_GS[g, s] = weight
                total += weight
            sum_G2[g, 0], sum_G2[g, 1] = highest, total
            for c in range(channels):
                out_GC[g, c] *= shrink
            for s in range(start, stop):
                weight = score_GS[g, s]
                for c in range(channels):
                    out_GC[g, c] += weight * value_SC[s, c]
    for g in range(group):
        for c in range(channels):
            out_GC[g, c] /= sum_G2[g, 1]


def register() -> None:
    """Compile the kernel, for this process."""
    ffi.register(NAME, _count_pieces, _do_piece)
