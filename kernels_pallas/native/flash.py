"""Attention of a few queries over keys and values wherever they lie, on a CPU. Host only.

Online softmax (arXiv:2205.14135) by tiles of keys. Queries stand along the lanes: a maximum or a
sum over keys is one of vectors, keys and values are read where they lie and as they lie, and both
products are the same one: keys by queries, and turned values by weights.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32
from numba import njit

from kernels_pallas.native import VECTOR, ffi
from kernels_pallas.native.tiles import IS_WIDE, multiply_tile, transpose_tile, weigh_tile

LANES = 4 * VECTOR if IS_WIDE else VECTOR
"""Queries at a time."""
KEYS = 128
"""Of a tile, at most."""
STEP = 4
"""Channels are a multiple of it. Keys are read in such groups: what lies behind the last one has
to be there, and is not used."""

_LINE = 16  # float32
_VECTORS = LANES // VECTOR
_ROW_BYTES = 4 * LANES
_NEVER = np.float32(-1e30)
_LOG2_E = np.float32(np.log2(np.e))

_four = multiply_tile(STEP, _VECTORS)
_weigh = weigh_tile(_VECTORS)
_turn = transpose_tile(widen=False)


class State(NamedTuple):
    """Scratch of a piece of work: some queries, and what they have seen.

    All but the first two are addresses of float32 in it. X counts lanes, J keys of a tile; C is
    whole vectors here.
    """

    memory: Float32[np.ndarray, " Y"]
    channels: int
    rows: int
    """[X, C]: queries, before `begin`; results, after `finish`."""
    queries: int
    """[C, X]"""
    scores: int
    """[J, X]"""
    sums: int
    """[C, X]: values by their weights."""
    values: int
    """[J, channels]"""
    top: int
    """[X]: the highest score, as an exponent of two."""
    total: int
    """[X]: of the weights."""
    zeros: int
    """[X]"""
    highest: int
    """[X]: the highest score with the tile's."""
    shrink: int
    """[X]: by how much older weights fall."""
    unused: int
    """[X]"""
    seen: int
    """int32[2, X]: the first and the last key that each query sees, for `hide_outside`."""


@njit
def new_state(channels: int) -> State:
    """Scratch for heads of so many channels."""
    size = LANES * _in_vectors(channels)
    memory = np.zeros(3 * size + KEYS * (LANES + channels) + 8 * LANES, np.float32)
    rows = memory.ctypes.data
    queries, sums, scores = rows + 4 * size, rows + 8 * size, rows + 12 * size
    values = scores + KEYS * _ROW_BYTES
    top = values + 4 * KEYS * channels
    total, zeros, highest = top + _ROW_BYTES, top + 2 * _ROW_BYTES, top + 3 * _ROW_BYTES
    shrink, unused, seen = top + 4 * _ROW_BYTES, top + 5 * _ROW_BYTES, top + 6 * _ROW_BYTES
    return State(
        memory, channels, rows, queries, scores, sums, values, top, total, zeros, highest, shrink,
        unused, seen,
    )  # fmt: skip


@njit
def put(state: State, lane: int, source: int) -> None:
    """Read a query."""
    _copy(source, state.rows + 4 * lane * _in_vectors(state.channels), state.channels)


@njit
def take(state: State, lane: int, target: int) -> None:
    """Write a result."""
    _copy(state.rows + 4 * lane * _in_vectors(state.channels), target, state.channels)


@njit
def seen(state: State) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last key that each query sees, int32[X] each."""
    return ffi.int32s(state.seen, LANES), ffi.int32s(state.seen + _ROW_BYTES, LANES)


@njit(error_model="numpy")
def begin(state: State) -> None:
    """Take queries that are not scaled."""
    width = _in_vectors(state.channels)
    for c in range(0, width, VECTOR):
        for x in range(0, LANES, VECTOR):
            source = state.rows + 4 * (x * width + c)
            _turn(source, width, state.queries + 4 * (c * LANES + x), LANES)
    scale = _LOG2_E / np.sqrt(np.float32(state.channels))
    queries = ffi.floats(state.queries, state.channels * LANES)
    for i in range(len(queries)):
        queries[i] *= scale
    _fill(state.sums, state.channels * LANES, np.float32(0.0))
    _fill(state.top, LANES, _NEVER)
    _fill(state.total, LANES, np.float32(0.0))


@njit
def score(state: State, keys: int, stride: int, num_keys: int) -> None:
    """Score some keys, at most `KEYS`, that lie `stride` numbers apart."""
    for j in range(0, num_keys, STEP):
        source, out = keys + 4 * j * stride, state.scores + j * _ROW_BYTES
        _four(source, stride, 1, state.queries, LANES, state.zeros, 0, out, LANES, state.channels)


@njit
def fetch(state: State, rows: int, stride: int, num_keys: int) -> None:
    """Bring what is read next nearer: rows far apart are not foreseen by the processor."""
    for j in range(num_keys):
        for c in range(0, state.channels, _LINE):
            ffi.prefetch(rows + 4 * (j * stride + c))


@njit
def hide(state: State, key: int) -> None:
    """Let no query see a key of the tile."""
    _fill(state.scores + key * _ROW_BYTES, LANES, _NEVER)


@njit(fastmath=True)
def hide_outside(state: State, first_key: int, num_keys: int) -> None:
    """Let each query see its first key, its last and those between."""
    first_X, last_X = seen(state)
    inside = True
    for x in range(LANES):
        inside &= first_X[x] <= first_key and last_X[x] >= first_key + num_keys - 1
    if inside:
        return
    for j in range(num_keys):
        key = np.int32(first_key + j)
        scores = ffi.floats(state.scores + j * _ROW_BYTES, LANES)
        for x in range(LANES):
            if key < first_X[x] or key > last_X[x]:
                scores[x] = _NEVER


@njit
def add(state: State, values: int, stride: int, num_keys: int) -> None:
    """Add the values of the keys that were scored."""
    if _find_highest(state, num_keys):
        _shrink(state)
    _weigh(state.scores, state.top, state.total, num_keys)
    if stride != state.channels:
        # rows far apart share few places of the first-level cache, and each is read C / 4 times
        for j in range(num_keys):
            _copy(values + 4 * j * stride, state.values + 4 * j * state.channels, state.channels)
        values = state.values
    for c in range(0, state.channels, STEP):
        sums = state.sums + c * _ROW_BYTES
        source = values + 4 * c
        _four(source, 1, state.channels, state.scores, LANES, sums, LANES, sums, LANES, num_keys)


@njit(error_model="numpy")
def finish(state: State) -> None:
    """Leave the results in the rows; zeros where nothing was scored."""
    width, total = _in_vectors(state.channels), ffi.floats(state.total, LANES)
    for c in range(state.channels):
        sums = ffi.floats(state.sums + c * _ROW_BYTES, LANES)
        for x in range(LANES):
            sums[x] = np.float32(0.0) if total[x] == 0 else sums[x] / total[x]
    for c in range(0, width, VECTOR):
        for x in range(0, LANES, VECTOR):
            source = state.sums + 4 * (c * LANES + x)
            _turn(source, LANES, state.rows + 4 * (x * width + c), width)


@njit(fastmath=True)
def _find_highest(state: State, num_keys: int) -> bool:
    """Whether any score is above the highest before; and the highest of all."""
    top, highest = ffi.floats(state.top, LANES), ffi.floats(state.highest, LANES)
    for x in range(LANES):
        highest[x] = top[x]
    for j in range(num_keys):
        scores = ffi.floats(state.scores + j * _ROW_BYTES, LANES)
        for x in range(LANES):
            highest[x] = max(highest[x], scores[x])
    rises = False
    for x in range(LANES):
        rises |= highest[x] > top[x]
    return rises


@njit(fastmath=True)
def _shrink(state: State) -> None:
    """Weigh what was added by the new highest score."""
    shrink, total = ffi.floats(state.shrink, LANES), ffi.floats(state.total, LANES)
    _copy(state.top, state.shrink, LANES)
    _weigh(state.shrink, state.highest, state.unused, 1)
    _copy(state.highest, state.top, LANES)
    for x in range(LANES):
        total[x] *= shrink[x]
    for c in range(state.channels):
        sums = ffi.floats(state.sums + c * _ROW_BYTES, LANES)
        for x in range(LANES):
            sums[x] *= shrink[x]


@njit
def _fill(address: int, count: int, value: np.float32) -> None:
    array = ffi.floats(address, count)
    for i in range(count):
        array[i] = value


@njit
def _copy(source: int, target: int, count: int) -> None:
    values, out = ffi.floats(source, count), ffi.floats(target, count)
    for i in range(count):
        out[i] = values[i]


@njit
def _in_vectors(channels: int) -> int:
    return (channels + VECTOR - 1) // VECTOR * VECTOR
