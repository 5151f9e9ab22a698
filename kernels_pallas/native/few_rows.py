"""The product of a few rows with a matrix of bfloat16, on a CPU. Host only, but for `few_rows`.

A step of decodes is bound by reading weights. XLA's CPU backend multiplies float32 by float32, at
half the memory's speed; this reads the weights once, as the bfloat16 that a checkpoint holds, and
widens them in registers. Sums are in float32.
"""

from jaxtyping import Array, Float

from kernels_pallas.native import FEW_ROWS, ffi
from kernels_pallas.native.vectors import dot_pairs, dot_rows

_PIECE = 192  # columns: tens of microseconds

_dot, _dot_pair = dot_rows(widen=True), dot_pairs(widen=True)


def few_rows(x_TD: Float[Array, "T D"], weight_FD: Float[Array, "F D"]) -> Float[Array, "T F"]:
    """x @ weight.T in float32.

    Args:
        x_TD: float32; T at most `MAX_ROWS`.
        weight_FD: bfloat16, or uint16 with its bits; D is a multiple of 16.
    """
    shape = x_TD.shape[0], weight_FD.shape[0]
    return ffi.run_kernel(FEW_ROWS, shape, x_TD, weight_FD)


def _count_pieces(frame: int) -> int:
    return (ffi.dim(ffi.argument(frame, 1), 0) + _PIECE - 1) // _PIECE


def _do_piece(frame: int, piece: int) -> int:
    x, weight, y = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.result(frame, 0)
    num_rows, depth, width = ffi.dim(x, 0), ffi.dim(x, 1), ffi.dim(weight, 0)
    stop = min(width, (piece + 1) * _PIECE)
    for column in range(piece * _PIECE, stop - 1, 2):
        weights = ffi.data(weight) + 2 * column * depth
        _dot_pair(ffi.data(x), weights, ffi.data(y) + 4 * column, depth, width, num_rows)
    if stop % 2:
        weights = ffi.data(weight) + 2 * (stop - 1) * depth
        _dot(ffi.data(x), weights, ffi.data(y) + 4 * (stop - 1), depth, width, num_rows)
    return ffi.DONE


KERNELS = {FEW_ROWS: (_count_pieces, _do_piece)}
