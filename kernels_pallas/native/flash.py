"""Attention of a few queries over keys and values wherever they lie, on a CPU. Host only.

Online softmax (arXiv:2205.14135) by tiles of keys. Queries stand along the lanes: a maximum or a
sum over keys is one of vectors, keys and values are read where they lie and as they lie, and both
products are the same one: keys by queries, and turned values by weights.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32
from numba import njit

from kernels_pallas.native import VECTOR, ffi
from kernels_pallas.native.tiles import multiply_tile, transpose_tile, weigh_tile

LANES = 64
"""Queries at a time."""
KEYS = 128
"""Of a tile, at most."""
STEP = 4
"""Channels are a multiple of it. Keys are read in such groups: what lies behind the last one has
to be there, and finite."""

_LINE = 16  # float32
_VECTORS = LANES // VECTOR
_NEVER = np.float32(-1e30)
_LOG2_E = np.float32(np.log2(np.e))
_TOP, _TOTAL, _ZEROS, _HIGHEST, _SHRINK, _UNUSED = range(6)

_four = multiply_tile(STEP, _VECTORS)
_weigh = weigh_tile(_VECTORS)
_turn = transpose_tile(widen=False)


class State(NamedTuple):
    """Scratch of a piece of work, some queries and what they have seen. C is whole vectors."""

    rows_XC: Float[np.ndarray, "X C"]
    """Queries, before `begin`; results, after `finish`."""
    q_CX: Float[np.ndarray, "C X"]
    score_JX: Float[np.ndarray, "J X"]
    out_CX: Float[np.ndarray, "C X"]
    value_JC: Float[np.ndarray, "J C"]
    of_lane_6X: Float[np.ndarray, "6 X"]
    """The highest score, in powers of two; the sum of weights; zeros; and room for three more."""
    first_X: Int32[np.ndarray, " X"]
    """The first key that each query sees, for `hide_outside`."""
    last_X: Int32[np.ndarray, " X"]
    """The last one."""


@njit
def new_state(channels: int) -> State:
    """Scratch for heads of so many channels."""
    rounded = (channels + VECTOR - 1) // VECTOR * VECTOR
    return State(
        np.zeros((LANES, rounded), np.float32),
        np.empty((rounded, LANES), np.float32),
        np.empty((KEYS, LANES), np.float32),
        np.empty((rounded, LANES), np.float32),
        np.empty((KEYS, channels), np.float32),
        np.zeros((6, LANES), np.float32),
        np.zeros(LANES, np.int32),
        np.zeros(LANES, np.int32),
    )


@njit(error_model="numpy")
def begin(state: State, channels: int) -> None:
    """Take queries that are not scaled."""
    scale = _LOG2_E / np.sqrt(np.float32(channels))
    for c in range(0, state.rows_XC.shape[1], VECTOR):
        for x in range(0, LANES, VECTOR):
            source = state.rows_XC[x:, c:].ctypes.data
            _turn(source, state.rows_XC.shape[1], state.q_CX[c:, x:].ctypes.data, LANES)
    for c in range(channels):
        for x in range(LANES):
            state.q_CX[c, x] *= scale
            state.out_CX[c, x] = np.float32(0.0)
    for x in range(LANES):
        state.of_lane_6X[_TOP, x], state.of_lane_6X[_TOTAL, x] = _NEVER, np.float32(0.0)


@njit
def score(state: State, channels: int, keys: int, stride: int, num_keys: int) -> None:
    """Score some keys, at most `KEYS`, that lie `stride` numbers apart."""
    q, scores, zeros = _address(state.q_CX), _address(state.score_JX), _lane(state, _ZEROS)
    for j in range(0, num_keys, STEP):
        row, out = keys + 4 * j * stride, scores + 4 * j * LANES
        _four(row, stride, 1, q, LANES, zeros, 0, out, LANES, channels)
    for j in range(num_keys, _in_steps(num_keys)):
        hide(state, j)


@njit
def fetch(channels: int, rows: int, stride: int, num_keys: int) -> None:
    """Bring what is read next nearer: rows far apart are not foreseen by the processor."""
    for j in range(num_keys):
        for c in range(0, channels, _LINE):
            ffi.prefetch(rows + 4 * (j * stride + c))


@njit
def hide(state: State, key: int) -> None:
    """Let no query see a key of the tile."""
    for x in range(LANES):
        state.score_JX[key, x] = _NEVER


@njit(fastmath=True)
def hide_outside(state: State, first_key: int, num_keys: int) -> None:
    """Let each query see its first key, its last and those between."""
    inside = True
    for x in range(LANES):
        inside &= state.first_X[x] <= first_key
        inside &= state.last_X[x] >= first_key + num_keys - 1
    if inside:
        return
    for j in range(num_keys):
        key = np.int32(first_key + j)
        for x in range(LANES):
            if key < state.first_X[x] or key > state.last_X[x]:
                state.score_JX[j, x] = _NEVER


@njit(fastmath=True, error_model="numpy")
def add(state: State, channels: int, values: int, stride: int, num_keys: int) -> None:
    """Add the values of the keys that were scored."""
    lane, score_JX = state.of_lane_6X, state.score_JX
    rounded, rises = _in_steps(num_keys), False
    lane[_HIGHEST, :] = lane[_TOP]
    for j in range(rounded):
        for x in range(LANES):
            lane[_HIGHEST, x] = max(lane[_HIGHEST, x], score_JX[j, x])
    for x in range(LANES):
        rises |= lane[_HIGHEST, x] > lane[_TOP, x]
    if rises:
        lane[_SHRINK, :] = lane[_TOP]
        _weigh(_lane(state, _SHRINK), _lane(state, _HIGHEST), _lane(state, _UNUSED), 1)
        for x in range(LANES):
            lane[_TOTAL, x] *= lane[_SHRINK, x]
            lane[_TOP, x] = lane[_HIGHEST, x]
        for c in range(channels):
            for x in range(LANES):
                state.out_CX[c, x] *= lane[_SHRINK, x]
    if stride != channels:
        # rows far apart share few places of the first-level cache, and each is read C / 4 times
        value_JC = ffi.strided_floats(values, (rounded, channels), stride)
        for j in range(rounded):
            for c in range(channels):
                state.value_JC[j, c] = value_JC[j, c]
        values = _address(state.value_JC)
    scores, out = _address(score_JX), _address(state.out_CX)
    _weigh(scores, _lane(state, _TOP), _lane(state, _TOTAL), rounded)
    for c in range(0, channels, STEP):
        sums = out + 4 * c * LANES
        _four(values + 4 * c, 1, channels, scores, LANES, sums, LANES, sums, LANES, rounded)


@njit(fastmath=True, error_model="numpy")
def finish(state: State, channels: int) -> None:
    """Leave the results in `rows_XC`."""
    for c in range(channels):
        for x in range(LANES):
            state.out_CX[c, x] /= state.of_lane_6X[_TOTAL, x]
    for c in range(0, state.rows_XC.shape[1], VECTOR):
        for x in range(0, LANES, VECTOR):
            target = state.rows_XC[x:, c:].ctypes.data
            _turn(state.out_CX[c:, x:].ctypes.data, LANES, target, state.rows_XC.shape[1])


@njit
def _in_steps(num_keys: int) -> int:
    return (num_keys + STEP - 1) // STEP * STEP


@njit
def _address(array: Float[np.ndarray, "..."]) -> int:
    return array.ctypes.data


@njit
def _lane(state: State, row: int) -> int:
    return state.of_lane_6X.ctypes.data + 4 * LANES * row
