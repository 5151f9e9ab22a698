"""Attention over paged keys and values, on a CPU. Host only, but for `attend_pages`.

XLA's CPU backend runs the small operations of such an attention one after the other on one thread.
Here a piece of work is one KV head of one decode, or of a block of the queries of a chunk: of every
token the query heads of that group, side by side. A page is read where it lies. Softmax by pages
(arXiv:2205.14135).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels_pallas.native import PAGES, VECTOR, ffi, flash
from kernels_pallas.native.tiles import multiply_tile
from kernels_pallas.native.vectors import dot_rows

_QUERIES, _PAGES, _NUM_DECODES, _NUM_SEQUENCES, _STARTS = range(5)
_COUNTS, _LENGTHS, _TABLES, _SEEN, _WINDOW = range(5, 10)

_AT_ONCE = 4  # query heads of a decode
_score, _add_values = dot_rows(widen=False), multiply_tile(_AT_ONCE, 1)
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)
_SMALL_TERMS = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2
_POLYNOMIAL = tuple(map(np.float32, (*_SMALL_TERMS, 1.6666665459e-1, 0.5)))
"""Of exp on [-ln 2 / 2, ln 2 / 2], as in the Cephes library's expf."""


def takes(q_THC: tuple[int, ...], pages_PJSC: tuple[int, ...]) -> bool:
    """Whether the kernel takes arrays of such shapes."""
    groups = q_THC[1] % (pages_PJSC[1] // 2) == 0
    return groups and q_THC[2] % VECTOR == 0 and pages_PJSC[2] % flash.STEP == 0


def attend_pages(
    q_THC: Float[Array, "T H C"],
    pages_PJSC: Float[Array, "P J S C"],
    num_decodes: Int32[Array, ""],
    num_sequences: Int32[Array, ""],
    starts_B: Int32[Array, " B"],
    counts_B: Int32[Array, " B"],
    lengths_B: Int32[Array, " B"],
    tables_BQ: Int32[Array, "B Q"],
    seen_T: Int32[Array, " T"] | None,
    *,
    window: int | None,
) -> Float[Array, "T H C"]:
    """Attention of every query over its own sequence; zeros for rows of none.

    Args:
        q_THC: float32, not scaled; C is a multiple of 16.
        pages_PJSC: float32, the keys of each KV head and then the values of each; S is a multiple
            of 4.
        num_decodes: How many sequences have one query, and come first.
        num_sequences: How many there are.
        starts_B: First row of each one's queries.
        counts_B: How many queries each one has.
        lengths_B: Keys of each one, those of its queries the last among them.
        tables_BQ: Their pages.
        seen_T: Last key that each row's query sees, at least its own; not read of decodes. None:
            its own.
        window: Keys up to its own that a query sees at most; None: all.
    """
    seen = jnp.zeros(0, jnp.int32) if seen_T is None else seen_T
    sequences = num_decodes, num_sequences, starts_B, counts_B, lengths_B, tables_BQ
    operands = q_THC, pages_PJSC, *sequences, seen, jnp.int32(window or 0)
    zeros = jnp.zeros(q_THC.shape, jnp.float32)
    return ffi.run_kernel(PAGES, q_THC.shape, *operands, filled=zeros)


@intrinsic
def _power_of_two(_: object, __: object) -> object:
    """2 to the power of a whole number from -126 to 127."""

    def code(_: object, builder: ir.IRBuilder, __: object, args: tuple[object, ...]) -> object:
        biased = builder.add(args[0], ir.Constant(ffi.INT32, 127))
        bits = builder.shl(biased, ir.Constant(ffi.INT32, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), code


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


def _count_pieces(frame: int) -> int:
    num_kv = ffi.dim(ffi.argument(frame, _PAGES), 1) // 2
    blocks, num_decodes = 0, ffi.number(frame, _NUM_DECODES)
    for sequence in range(num_decodes, ffi.number(frame, _NUM_SEQUENCES)):
        blocks += _num_blocks(frame, sequence)
    return (num_decodes + blocks) * num_kv


def _do_piece(frame: int, piece: int) -> int:
    num_kv = ffi.dim(ffi.argument(frame, _PAGES), 1) // 2
    block, kv_head = piece // num_kv, piece % num_kv
    num_decodes = ffi.number(frame, _NUM_DECODES)
    if block < num_decodes:
        _do_decode(frame, block, kv_head)
        return ffi.DONE
    block -= num_decodes
    sequence = num_decodes
    while block >= _num_blocks(frame, sequence):
        block -= _num_blocks(frame, sequence)
        sequence += 1
    _do_block(frame, sequence, kv_head, block * flash.LANES)
    return ffi.DONE


@njit
def _of_sequence(frame: int, operand: int, sequence: int) -> int:
    return ffi.load_int32(ffi.data(ffi.argument(frame, operand)) + 4 * sequence)


@njit
def _group(frame: int) -> int:
    num_kv = ffi.dim(ffi.argument(frame, _PAGES), 1) // 2
    return ffi.dim(ffi.argument(frame, _QUERIES), 1) // num_kv


@njit
def _num_blocks(frame: int, sequence: int) -> int:
    rows = _of_sequence(frame, _COUNTS, sequence) * _group(frame)
    return (rows + flash.LANES - 1) // flash.LANES


@njit(error_model="numpy")
def _do_block(frame: int, sequence: int, kv_head: int, first_row: int) -> None:
    """Some queries of one KV head of a chunk: row r is of its token r // G."""
    pages, group = ffi.argument(frame, _PAGES), _group(frame)
    num_kv, page_size, channels = ffi.dim(pages, 1) // 2, ffi.dim(pages, 2), ffi.dim(pages, 3)
    num_rows = min(flash.LANES, _of_sequence(frame, _COUNTS, sequence) * group - first_row)
    state = flash.new_state(channels)
    low, high = _take_rows(frame, state, sequence, kv_head, first_row, num_rows)
    flash.begin(state)
    page_bytes, head_bytes = 8 * num_kv * page_size * channels, 4 * page_size * channels
    for first in range(low - low % page_size, high + 1, page_size):
        page = ffi.data(pages) + _page(frame, sequence, first // page_size) * page_bytes
        for offset in range(0, page_size, flash.KEYS):
            key = first + offset
            num_keys = min(flash.KEYS, page_size - offset, high + 1 - key)
            if num_keys > 0 and key + num_keys > low:
                keys = page + kv_head * head_bytes + 4 * offset * channels
                flash.score(state, keys, channels, num_keys)
                flash.hide_outside(state, key, num_keys)
                values = keys + num_kv * head_bytes
                flash.add(state, values, channels, num_keys)
    flash.finish(state)
    for row in range(num_rows):
        target = _row(frame, ffi.result(frame, 0), sequence, kv_head, first_row + row)
        flash.take(state, row, target)


@njit
def _take_rows(
    frame: int, state: flash.State, sequence: int, kv_head: int, first_row: int, num_rows: int
) -> tuple[int, int]:
    """Read queries and what each sees; gives the first and the last key that any of them does."""
    q, group = ffi.argument(frame, _QUERIES), _group(frame)
    count = _of_sequence(frame, _COUNTS, sequence)
    length = _of_sequence(frame, _LENGTHS, sequence)
    seen, start = ffi.argument(frame, _SEEN), _of_sequence(frame, _STARTS, sequence)
    has_seen, window = ffi.dim(seen, 0) > 0, ffi.number(frame, _WINDOW)
    first_X, last_X = flash.seen(state)
    low, high = length, 0
    for x in range(flash.LANES):
        row = first_row + min(x, num_rows - 1)  # the last one again, where there are no more
        flash.put(state, x, _row(frame, q, sequence, kv_head, row))
        token = row // group
        own = last = length - count + token
        if has_seen:
            last = ffi.load_int32(ffi.data(seen) + 4 * (start + token))
        first_X[x] = max(0, own - window + 1) if window > 0 else 0
        last_X[x] = last
        low, high = min(low, first_X[x]), max(high, last)
    return low, min(high, length - 1)


@njit
def _row(frame: int, array: int, sequence: int, kv_head: int, row: int) -> int:
    """Address of a row of a sequence's queries, or of its results."""
    group = _group(frame)
    token = _of_sequence(frame, _STARTS, sequence) + row // group
    head = kv_head * group + row % group
    return ffi.data(array) + 4 * (token * ffi.dim(array, 1) + head) * ffi.dim(array, 2)


@njit
def _page(frame: int, sequence: int, place: int) -> int:
    tables = ffi.argument(frame, _TABLES)
    return ffi.load_int32(ffi.data(tables) + 4 * (sequence * ffi.dim(tables, 1) + place))


@njit(fastmath=True, error_model="numpy")
def _do_decode(frame: int, sequence: int, kv_head: int) -> None:
    """One KV head of one query."""
    q, pages = ffi.argument(frame, _QUERIES), ffi.argument(frame, _PAGES)
    num_heads, channels = ffi.dim(q, 1), ffi.dim(q, 2)
    num_kv, page_size = ffi.dim(pages, 1) // 2, ffi.dim(pages, 2)
    group = num_heads // num_kv
    token = _of_sequence(frame, _STARTS, sequence)
    length = _of_sequence(frame, _LENGTHS, sequence)
    window = ffi.number(frame, _WINDOW)
    first = 4 * (token * num_heads + kv_head * group) * channels
    scale = np.float32(1.0) / np.sqrt(np.float32(channels))
    queries_GC = ffi.floats(ffi.data(q) + first, (group, channels))
    scaled_GC = np.empty((group, channels), np.float32)
    for g in range(group):
        for c in range(channels):
            scaled_GC[g, c] = queries_GC[g, c] * scale
    padded = (group + _AT_ONCE - 1) // _AT_ONCE * _AT_ONCE
    score_GS = np.zeros((padded, page_size), np.float32)
    sum_GC = np.zeros((padded, channels), np.float32)
    sum_G2 = np.zeros((group, 2), np.float32)  # the highest score, and the sum of weights
    for g in range(group):
        sum_G2[g, 0] = np.float32(-1e30)
    lowest = max(0, length - window) if window > 0 else 0
    page_bytes, head_bytes = 8 * num_kv * page_size * channels, 4 * page_size * channels
    for turn in range(lowest // page_size, (length + page_size - 1) // page_size):
        page = _page(frame, sequence, turn)
        keys = ffi.data(pages) + page * page_bytes + kv_head * head_bytes
        values = keys + num_kv * head_bytes
        start, stop = max(0, lowest - turn * page_size), min(page_size, length - turn * page_size)
        for g in range(group):
            query = scaled_GC.ctypes.data + 4 * g * channels
            out = score_GS.ctypes.data + 4 * (g * page_size + start)
            _score(keys + 4 * start * channels, query, out, channels, 1, stop - start)
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
                sum_GC[g, c] *= shrink
        for g in range(0, padded, _AT_ONCE):
            weights = score_GS.ctypes.data + 4 * (g * page_size + start)
            for c in range(0, channels, VECTOR):
                value, sums = values + 4 * (start * channels + c), sum_GC.ctypes.data
                sums += 4 * (g * channels + c)
                _add_values(
                    weights, page_size, 1, value, channels, sums, channels, sums, channels,
                    stop - start,
                )  # fmt: skip
    out_GC = ffi.floats(ffi.data(ffi.result(frame, 0)) + first, (group, channels))
    for g in range(group):
        for c in range(channels):
            out_GC[g, c] = sum_GC[g, c] / sum_G2[g, 1]


KERNELS = {PAGES: (_count_pieces, _do_piece)}
