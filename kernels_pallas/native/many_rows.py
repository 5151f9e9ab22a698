"""The product of many rows with a matrix of bfloat16, on a CPU. Host only, but for two functions.

XLA's products reach two thirds of this arithmetic where rows are many and short, and leave what
follows them a pass over memory of its own. Here a piece of work is a panel of columns by a block of
rows: the panel is widened and turned once, then a few rows at a time meet it, sums in registers
(the blocking of Goto and van de Geijn, doi:10.1145/1356052.1356053, with one level less).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numba import njit

from kernels_pallas.native import GATED_ROWS, MANY_ROWS, VECTOR, ffi
from kernels_pallas.native.tiles import IS_WIDE, gate_tile, multiply_tile, transpose_tile

_ROWS, _VECTORS = (8, 3) if IS_WIDE else (4, 1)
_PANEL = VECTOR * _VECTORS  # columns
_BLOCK = 512  # rows of a piece: enough to pay for the panel

Panel = Float[np.ndarray, "K X"]
"""Scratch. Functions take it as an array: numba frees one after the last line that names it, and
an address names nothing."""

_several, _one = (multiply_tile(n, _VECTORS) for n in (_ROWS, 1))
_turn = transpose_tile(widen=True)


def many_rows(
    x_TD: Float[Array, "T D"],
    weight_FD: Float[Array, "F D"],
    bias_F: Float[Array, " F"] | None = None,
) -> Float[Array, "T F"]:
    """x @ weight.T + bias in float32.

    Args:
        x_TD: float32.
        weight_FD: bfloat16, or uint16 with its bits.
        bias_F: float32.
    """
    bias_F = jnp.zeros(weight_FD.shape[:1], jnp.float32) if bias_F is None else bias_F
    shape = x_TD.shape[0], weight_FD.shape[0]
    return ffi.run_kernel(MANY_ROWS, shape, x_TD, weight_FD, bias_F)


def gated_rows(
    x_TD: Float[Array, "T D"],
    weight_2FD: Float[Array, "2 F D"],
    bias_2F: Float[Array, "2 F"] | None = None,
) -> Float[Array, "T F"]:
    """silu(x @ gate.T + bias) * (x @ up.T + bias) in float32 (arXiv:2002.05202).

    Args:
        x_TD: float32.
        weight_2FD: The gate's and then the others, as in `many_rows`.
        bias_2F: float32.
    """
    bias_2F = jnp.zeros(weight_2FD.shape[:2], jnp.float32) if bias_2F is None else bias_2F
    shape = x_TD.shape[0], weight_2FD.shape[1]
    return ffi.run_kernel(GATED_ROWS, shape, x_TD, weight_2FD, bias_2F)


def _count_pieces(frame: int) -> int:
    y = ffi.result(frame, 0)
    num_rows, width = ffi.dim(y, 0), ffi.dim(y, 1)
    return _blocks(num_rows, _BLOCK) * _blocks(width, _PANEL)


@njit
def _blocks(number: int, size: int) -> int:
    return (number + size - 1) // size


@njit(error_model="numpy")
def _read_panel(weights: int, bias: int, columns: int, panel_KX: Panel) -> None:
    """Some columns in float32, and behind them the bias; zeros where there are none."""
    depth, panel = len(panel_KX) - 1, panel_KX.ctypes.data
    whole = depth - depth % VECTOR if columns == _PANEL else 0
    for first in range(0, _PANEL, VECTOR):
        for k in range(0, whole, VECTOR):
            source = weights + 2 * (first * depth + k)
            _turn(source, depth, panel + 4 * (k * _PANEL + first), _PANEL)
    for column in range(_PANEL):
        for k in range(whole, depth):
            bits = 0
            if column < columns:
                bits = ffi.load_uint16(weights + 2 * (column * depth + k))
            ffi.store_int32(panel + 4 * (k * _PANEL + column), bits << 16)
        bits = ffi.load_int32(bias + 4 * column) if column < columns else 0
        ffi.store_int32(panel + 4 * (depth * _PANEL + column), bits)


@njit(error_model="numpy")
def _multiply(x: int, panel_KX: Panel, out: int, stride: int, num_rows: int) -> None:
    """Rows by a panel, to where rows lie `stride` apart."""
    depth, panel = len(panel_KX) - 1, panel_KX.ctypes.data
    bias = panel + 4 * depth * _PANEL
    whole = num_rows - num_rows % _ROWS
    for row in range(0, whole, _ROWS):
        source, target = x + 4 * row * depth, out + 4 * row * stride
        _several(source, depth, 1, panel, _PANEL, bias, 0, target, stride, depth)
    for row in range(whole, num_rows):
        source, target = x + 4 * row * depth, out + 4 * row * stride
        _one(source, depth, 1, panel, _PANEL, bias, 0, target, stride, depth)


@njit(error_model="numpy")
def _multiply_into(x: int, panel_KX: Panel, tile_RX: Panel, num_rows: int) -> None:
    _multiply(x, panel_KX, tile_RX.ctypes.data, _PANEL, num_rows)


@njit(error_model="numpy")
def _gate(gate_RX: Panel, up_RX: Panel) -> None:
    gate_tile(gate_RX.ctypes.data, up_RX.ctypes.data, gate_RX.size)


def _do_piece(frame: int, piece: int) -> int:
    x, weight, y = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
    depth, width = ffi.dim(x, 1), ffi.dim(y, 1)
    first_row, column, num_rows, columns = _place(piece, ffi.dim(x, 0), width)
    panel_KX = np.empty((depth + 1, _PANEL), np.float32)
    bias = ffi.data(ffi.argument(frame, 2)) + 4 * column
    _read_panel(ffi.data(weight) + 2 * column * depth, bias, columns, panel_KX)
    source = ffi.data(x) + 4 * first_row * depth
    out = ffi.data(y) + 4 * (first_row * width + column)
    if columns == _PANEL:
        _multiply(source, panel_KX, out, width, num_rows)
        return ffi.DONE
    tile_RX = np.empty((_ROWS, _PANEL), np.float32)
    for row in range(0, num_rows, _ROWS):
        count = min(_ROWS, num_rows - row)
        _multiply_into(source + 4 * row * depth, panel_KX, tile_RX, count)
        _copy(tile_RX, out + 4 * row * width, width, count, columns)
    return ffi.DONE


def _do_gated_piece(frame: int, piece: int) -> int:
    x, weight, y = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
    depth, width = ffi.dim(x, 1), ffi.dim(y, 1)
    first_row, column, num_rows, columns = _place(piece, ffi.dim(x, 0), width)
    panels_2KX = np.empty((2, depth + 1, _PANEL), np.float32)
    for half in range(2):
        row = half * width + column
        bias = ffi.data(ffi.argument(frame, 2)) + 4 * row
        _read_panel(ffi.data(weight) + 2 * row * depth, bias, columns, panels_2KX[half])
    tiles_2RX = np.empty((2, _ROWS, _PANEL), np.float32)
    for row in range(0, num_rows, _ROWS):
        count = min(_ROWS, num_rows - row)
        source = ffi.data(x) + 4 * (first_row + row) * depth
        for half in range(2):
            _multiply_into(source, panels_2KX[half], tiles_2RX[half], count)
        _gate(tiles_2RX[0], tiles_2RX[1])
        out = ffi.data(y) + 4 * ((first_row + row) * width + column)
        _copy(tiles_2RX[0], out, width, count, columns)
    return ffi.DONE


@njit
def _place(piece: int, num_rows: int, width: int) -> tuple[int, int, int, int]:
    """First row and column of a piece, and how many of each."""
    panels = _blocks(width, _PANEL)
    row, column = piece // panels * _BLOCK, piece % panels * _PANEL
    return row, column, min(_BLOCK, num_rows - row), min(_PANEL, width - column)


@njit(error_model="numpy")
def _copy(tile_RX: Panel, out: int, stride: int, num_rows: int, columns: int) -> None:
    for row in range(num_rows):
        target = ffi.floats(out + 4 * row * stride, columns)
        for column in range(columns):
            target[column] = tile_RX[row, column]


KERNELS = {
    MANY_ROWS: (_count_pieces, _do_piece),
    GATED_ROWS: (_count_pieces, _do_gated_piece),
}
